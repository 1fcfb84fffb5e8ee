"""A recipe's flags, read here as the container will read them: what it would refuse is refused before anything is sent."""

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.command_line.reading import channels_named, read_command_line
from toolkit.command_line.recipe import config_class_of_file
from toolkit.config import Refusal, check_together, settings_of
from toolkit.config.conditions import packages_of_settings
from toolkit.config.json_and_yaml import parse_yaml, read_text_file
from toolkit.config.reading import values_of
from toolkit.config.setting import flag_of

# The container decides these: they are places and circumstances of its own.
_OF_THE_CONTAINER = {
    "output_dir": "a job writes where SageMaker copies from: checkpoints and metrics to S3 as they come, the model at the end",
    "overwrite_output_dir": "a job has an output directory of its own",
    "resume": "a job continues by itself from what is in its checkpoints' prefix; to resume from another job's, --checkpoints",
    "resume_from": "checkpoints come from S3: give their prefix with --checkpoints s3://BUCKET/PREFIX",
}
_MAY_BE_PATHS = ("dataset", "model", "tokenizer", "chat_template", "deepspeed")


def read_recipe_flags(recipe: Path, flags: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """All settings by name, and those that were given, which become the job's hyperparameters.

    Raises:
        Refusal: whatever the recipe itself would refuse, and settings that are the container's own.
        SystemExit: with code 0, after --help.
    """
    config_class = config_class_of_file(recipe)
    config = read_command_line(config_class, flags, {}, sys.modules[config_class.__module__].__doc__ or "")
    check_together(config)
    given, values = frozenset(config.given or ()), values_of(config)
    for name in sorted(given & _OF_THE_CONTAINER.keys()):
        raise Refusal(f"{flag_of(name)}: {_OF_THE_CONTAINER[name]}.")
    return values, {name: values[name] for name in settings_of(config_class) if name in given}


def check_places(
    settings: Mapping[str, Any], hyperparameters: Mapping[str, Any], channels: Collection[str], included: Sequence[Path], *,
    simulated: bool = False,
) -> None:  # fmt: skip
    """Refuse data, models and files that are on this machine only, and channels that the job hasn't.

    Settings that weren't given count too: a recipe's default may be a directory that is here, and there another one.
    `simulated`: the channels of the job are files and folders of this machine.
    """
    place = "FILE_OR_FOLDER" if simulated else "s3://BUCKET/PREFIX"
    for name in channels_named(hyperparameters):
        if name not in channels:
            there = f"The job's channels are {', '.join(channels)}." if channels else "The job has no channel."
            raise Refusal(f"channel:{name}: {there} Add --channel {name}={place}.")
    sent = {path.name for path in included}
    for name in _MAY_BE_PATHS:
        value = hyperparameters.get(name)
        for part in str(value).split(",") if value else []:
            path = Path(part.rsplit(":", 1)[0] if not Path(part).exists() else part)
            if path.exists() and str(path) not in sent:
                raise Refusal(
                    f"{flag_of(name)} {part}: is on this machine, where the job can't read it. A small file goes along with "
                    f"--include {path} {flag_of(name)} {path.name}. Else {_as_channel(path, flag_of(name), simulated)}"
                )
        default = settings.get(name)
        if name not in hyperparameters and default and Path(default).is_dir():
            raise Refusal(
                f"{flag_of(name)}: isn't given, and {default}, which the recipe takes on this machine, isn't on the job's. "
                f"Give {flag_of(name)}: a name on the Hub, or {_as_channel(default, flag_of(name), simulated)}"
            )


def _as_channel(path: str | Path, flag: str, simulated: bool) -> str:
    if simulated:
        return f"name it as a channel: --channel data={path} {flag} channel:data"
    copied, read = f"--recursive {path}", "channel:data"
    if not Path(path).is_dir():
        copied, read = str(path), f"channel:data/{Path(path).name}"
    return (
        f"bring it to S3 and name it as a channel: aws s3 cp {copied} s3://BUCKET/PREFIX/, then "
        f"--channel data=s3://BUCKET/PREFIX {flag} {read}"
    )


def packages_for(settings: Mapping[str, Any], recipe: Path, accelerate_config: Path | None = None) -> list[str]:
    """What a run of this recipe with these settings imports in addition to the toolkit's own dependencies.

    Args:
        accelerate_config: the file of --accelerate-config.
    """
    from toolkit.tracking.services import packages_of

    trackers = [name for name in settings.get("report_to", []) if name not in ("none", "all")]
    wanted = {package for name in trackers for package in packages_of(name)}
    of_settings = settings.get("zero_stage") or settings.get("deepspeed")
    if of_settings or "DeepSpeedPlugin" in recipe.read_text(encoding="utf-8") or _says_deepspeed(accelerate_config):
        wanted.add("deepspeed")
    return sorted({*wanted, *packages_of_settings(settings).values()})


def _says_deepspeed(accelerate_config: Path | None) -> bool:
    if accelerate_config is None:
        return False
    shown = f"--accelerate-config {accelerate_config}"
    written = parse_yaml(read_text_file(accelerate_config, shown), shown)  # JSON is YAML
    return isinstance(written, dict) and str(written.get("distributed_type")).upper() == "DEEPSPEED"
