"""Settings in files: any flat YAML or JSON in, and config.yaml out, which repeats a run when it is fed back."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from toolkit.config.json_and_yaml import parse_json, parse_yaml, read_text_file
from toolkit.config.reading import values_of
from toolkit.config.setting import Refusal, Settings, changed_settings, settings_of, show_value

NOT_READ = "not read by this run"


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The keys and values of a flat YAML file, or JSON where its name ends so, as they are in it.

    `read_values` gives them their meaning.

    Raises:
        Refusal: no such file, no UTF-8, no YAML (JSON), not flat keys, or a key that is there twice.
    """
    if not str(path):
        raise Refusal("--config '': must name a YAML or JSON file of settings.")
    text = read_text_file(path, f"--config {path}")
    # YAML reads most of JSON, but no tabs, and signs beyond 16 bits otherwise.
    loaded = parse_json(text, str(path), is_file=True) if str(path).endswith(".json") else parse_yaml(text, str(path))
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise Refusal(f"{path}: must hold lines of the form learning_rate: 0.0002.")
    return {str(key): value for key, value in loaded.items()}


def write_config_file(config: Settings, path: str | Path) -> None:
    """Write every setting, panel by panel, with the recipe's default next to each that differs from it."""
    import yaml

    changed, values = changed_settings(config), values_of(config)
    lines = ["# All settings of this run. Feed it back with --config to repeat the run."]
    for panel, settings in itertools.groupby(settings_of(type(config)).values(), key=lambda setting: setting.panel):
        lines += ["", f"# {panel}"]
        for setting in settings:
            value = values[setting.name]
            value = list(value) if isinstance(value, tuple) else value
            in_brackets = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=10**6).strip()
            note = f"  # default: {show_value(setting.default)}" if setting.name in changed else ""
            lines.append(f"{setting.name}: {in_brackets[1:-1]}{note}")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def mark_not_read(path: Path, names: Collection[str]) -> None:
    """Mark in a config.yaml which of its settings the run never read; they stay, so that the file repeats the run."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        found = re.match(r"(\w+): ", line)
        if found and found[1] in names and not line.endswith(NOT_READ):
            line += f"; {NOT_READ}" if "  # default: " in line else f"  # {NOT_READ}"
        lines.append(line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
