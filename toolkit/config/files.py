"""Settings in files: any flat YAML in, and config.yaml out, which repeats a run when it is fed back."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from toolkit.config.setting import Refusal, Settings, settings_of, show_value


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The keys and values of a flat YAML file as they stand in it; `read_values` gives them their meaning.

    Raises:
        Refusal: no such file, no UTF-8, no YAML, not flat keys, or a key that stands there twice.
    """
    import yaml

    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Refusal(f"--config {path}: no such file.") from None
    except UnicodeDecodeError as error:
        raise Refusal(f"--config {path}: byte {error.start} is not UTF-8; save the file as UTF-8.") from None
    except OSError as error:
        raise Refusal(f"--config {path}: cannot be read ({error.strerror}).") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise Refusal(f"{where}: is not YAML ({getattr(error, 'problem', None) or error}).") from None
    if root is None or loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise Refusal(f"{path}: must hold lines of the form learning_rate: 0.0002.")
    seen: dict[str, int] = {}
    for key, _ in root.value:  # PyYAML itself lets the last of two win, in silence
        line = key.start_mark.line + 1
        if key.value in seen:
            raise Refusal(f"{path}:{line}: {key.value} stands there twice, first in line {seen[key.value]}: keep one.")
        seen[key.value] = line
    return {str(key): value for key, value in loaded.items()}


def write_config_file(config: Settings, path: str | Path) -> None:
    """Write every setting, panel by panel, with the recipe's default beside each that differs from it."""
    import yaml

    changed = changed_settings(config)
    lines = ["# All settings of this run. Feed it back with --config to repeat the run."]
    for panel, settings in itertools.groupby(settings_of(type(config)).values(), key=lambda setting: setting.panel):
        lines += ["", f"# {panel}"]
        for setting in settings:
            value = getattr(config, setting.name)
            value = list(value) if isinstance(value, tuple) else value
            in_brackets = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=10**6).strip()
            beside = f"  # default: {show_value(setting.default)}" if setting.name in changed else ""
            lines.append(f"{setting.name}: {in_brackets[1:-1]}{beside}")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def changed_settings(config: Settings) -> dict[str, Any]:
    """The settings that differ from the defaults of the config's own class, in the order of its panels."""
    values = {name: (getattr(config, name), setting.default) for name, setting in settings_of(type(config)).items()}
    return {name: value for name, (value, default) in values.items() if value != default}
