"""What toolkit replay looks at before it trains: whether the run can be repeated, and what is not as it was."""

import json
import os
from pathlib import Path
from typing import Any

import typer

from toolkit.command_line.recipe_file import find_recipe
from toolkit.config import Refusal, read_config_file
from toolkit.config.json_and_yaml import parse_json, read_text_file
from toolkit.system.console import say


def read_run(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """run.json and config.yaml of a run that has ended.

    Raises:
        Refusal: they are missing, or the run has not ended, or has ended otherwise than its settings define.
    """
    if not directory.is_dir():
        raise typer.BadParameter(f"{directory}: there is no such directory.", param_hint="DIR")
    files = [directory / "run.json", directory / "config.yaml"]
    for path in files:
        if not path.exists():
            raise Refusal(f"{path}: is missing. Every recipe writes it when its run begins.")
    card = parse_json(read_text_file(files[0], str(files[0])), str(files[0]), is_file=True)
    settings = read_config_file(files[1])
    sections = ("recipe", "data", "model", "layout", "hardware", "versions")
    if not isinstance(card, dict) or not all(isinstance(card.get(name), dict) for name in sections):
        raise Refusal(f"{files[0]}: is not a run's card, which has the sections {', '.join(sections)}.")
    written = card.get("settings")
    lacking = sorted(written.keys() - settings.keys()) if isinstance(written, dict) else ["settings"]
    if lacking:
        raise Refusal(f"{files[1]}: lacks {', '.join(lacking[:5])}, and is not what the run wrote. Bring it back from a copy.")
    try:
        if card["end"]["status"] not in ("finished", "stopped early"):
            raise Refusal(f"{directory}: the run is {card['end']['status']}. Continue it with --resume, then replay it.")
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(f"{directory}: the run has not ended, or its run.json is of another version ({error!r}).") from error
    if card.get("continued"):
        first, *more = card["continued"]
        others = f", and {len(more)} more" if more else ""
        raise Refusal(f"{directory}: the run continued otherwise than it began ({first}{others}). It can't be replayed.")
    for name in () if "continued" in card else ("resume_from", "allow_change"):
        if settings.get(name):
            raise Refusal(f"{directory}: {name} is given: the run began elsewhere, or as another one. It can't be replayed.")
    return card, settings


def check_place(into: Path) -> None:
    """Refuse a place for the new run in which there is one already, or a file."""
    from toolkit.runs.directory import holds_a_run

    if into.exists() and not into.is_dir():
        raise Refusal(f"{into}: is a file. Name a directory for the new run: --into DIR")
    if holds_a_run(into):
        raise Refusal(f"{into}: a run is already there. Remove it, or name another directory for the new one: --into DIR")


def check_weights(model: Path) -> None:
    """Refuse a model directory whose weights can't be read: there would be nothing to compare with in the end."""
    from safetensors import SafetensorError, safe_open

    files = sorted(model.glob("*.safetensors"))
    wanted = {name for index in model.glob("*.safetensors.index.json") for name in _files_in(index)}
    lost = wanted - {path.name for path in files}
    if lost or not files:
        missing = ", ".join(sorted(lost)) or "*.safetensors"
        raise Refusal(f"{model}: {missing} is missing: a replay has no weights to be compared with.")
    for path in files:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise Refusal(
                f"{path}: is damaged ({error}): a replay has no weights to be compared with. Bring the file back from a copy."
            ) from error


def directory_of(card: dict[str, Any]) -> Path:
    """The directory in which the run was started, to which its relative paths belong; this one where that is gone."""
    written = card.get("started", {}).get("directory")
    if written is None or Path(os.path.expanduser(written)).is_dir():
        return Path(os.path.expanduser(written)) if written else Path.cwd()
    say(f"the run was started in {written}, which does not exist: its relative paths are taken from here", error=True)
    return Path.cwd()


def script_of(card: dict[str, Any]) -> str:
    """The recipe's file, where it lay or where the toolkit has one of that name."""
    written = card["recipe"]["path"]
    if written and Path(written).is_file():
        return str(written)
    return find_recipe(Path(card["recipe"]["file"]).stem)


def check_inputs(script: str, card: dict[str, Any]) -> None:
    """Refuse another recipe, or other files of the data, of the model or of what else a setting names."""
    from toolkit.runs.provenance import digest_of_source
    from toolkit.system.digests import directory_digest, sha256_of

    if not Path(script).is_file():
        raise typer.BadParameter(f"{script}: there is no such file.", param_hint="--recipe")
    if sha256_of(Path(script)) != card["recipe"]["sha256"]:
        commit = card["recipe"]["commit"]
        at = f" It was at the commit {commit}." if commit else ""
        raise Refusal(f"{script}: is not the recipe of that run, whose text was another.{at} Name that one: --recipe FILE")
    for name, digest in card["model"].get("directories", {}).items():
        if Path(os.path.expanduser(name)).is_dir() and directory_digest(name) != digest:
            raise Refusal(
                f"{name}: the model's files have changed since that run, which began from others. Put those back to replay it."
            )
    for name, digest in card.get("files", {}).items():
        now = digest_of_source(name)
        if now is None:
            raise Refusal(f"{name}: is missing (from {Path.cwd()}). Put it back to replay the run, which read it.")
        if now != digest:
            raise Refusal(f"{name}: has changed since that run, which read it otherwise. Put that back to replay it.")


def say_what_changed(card: dict[str, Any], on_cpu: bool) -> None:
    """On standard error: what may make the weights differ, though no requested change does."""
    import os
    import platform

    import torch

    from toolkit.runs.provenance import toolkit_identity
    from toolkit.runs.run_card import device_name, library_versions
    from toolkit.system.environment import processor_name

    def warn(what: str) -> None:
        say(f"{what}: the weights may differ", error=True)

    before, now = card.get("toolkit"), toolkit_identity()
    if before is None:
        warn("the run's toolkit did not write down which one it was")
    elif before["sha256"] != now["sha256"]:
        warn(f"the toolkit's code has changed since that run: it was {_named(before)} and is {_named(now)}")
    versions = {"python": platform.python_version(), **library_versions()}
    for name, version in card["versions"].items():
        if versions.get(name) != version:
            warn(f"{name} was {version} and is {versions.get(name, 'not there')}")
    accelerator = None if on_cpu or not torch.accelerator.is_available() else torch.accelerator.current_accelerator()
    device = device_name(accelerator or torch.device("cpu"))
    here = {"device": device, "processor": processor_name(), "cores": os.cpu_count()}
    for name, value in here.items():
        if card["hardware"].get(name) != value:
            warn(f"this is another machine than the run's: {name} was {card['hardware'].get(name)} and is {value}")


def _named(toolkit: dict[str, Any]) -> str:
    commit = f", commit {toolkit['commit']}" if toolkit["commit"] else ""
    return f"{toolkit['version']} (sha256 {toolkit['sha256'][:12]}{commit})"


def _files_in(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refusal(f"{index}: can't be read ({error!r}): a replay has no weights to be compared with.") from error
