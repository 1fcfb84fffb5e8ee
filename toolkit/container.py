"""What a SageMaker container tells a recipe: where to write, that it may go on there, where data lie, where the model goes.

Each function reads the environment that it is given; outside a container none of them changes anything.
"""

import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from toolkit.config.setting import Refusal, Setting, Settings, settings_of

AnyConfig = TypeVar("AnyConfig", bound=Settings)

# How long a file may take from its place in the container to S3: SageMaker tells nobody when it is there.
COPYING_BEGINS = 60.0  # seconds
COPYING_SPEED = 50e6  # bytes a second
_CHANNEL = re.compile(r"(?<![\w/.-])channel:([A-Za-z0-9._-]+)")


def in_container(environment: Mapping[str, str] = os.environ) -> bool:
    return "SM_MODEL_DIR" in environment and "SM_HOSTS" in environment


def checkpoint_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that SageMaker keeps equal to a prefix in S3, /opt/ml/checkpoints; None where the job has none."""
    if not in_container(environment):
        return None
    folder = Path(environment["SM_MODEL_DIR"]).parent / "checkpoints"
    return folder if folder.is_dir() else None


def container_settings(environment: Mapping[str, str], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Settings that the container decides where nobody gave them: the output directory, that a run there goes on, its name.

    A recipe that can't resume begins again: a machine that was taken away left half a run behind.
    """
    if not in_container(environment):
        return {}
    output = environment.get("SM_OUTPUT_DATA_DIR") or Path(environment["SM_MODEL_DIR"]).parent / "output/data"
    found: dict[str, Any] = {
        "output_dir": str(checkpoint_folder(environment) or Path(output) / "run"),
        "resume" if "resume" in settings else "overwrite_output_dir": True,
        "run_name": environment.get("TRAINING_JOB_NAME") or None,
    }
    return {name: value for name, value in found.items() if name in settings and value is not None}


def find_channels(config: AnyConfig, environment: Mapping[str, str] = os.environ) -> AnyConfig:
    """The config with each `channel:NAME` replaced by the folder into which SageMaker copied that channel's data.

    Raises:
        Refusal: there is no channel of that name.
    """

    def folder(match: re.Match[str]) -> str:
        name = match[1]
        path = environment.get(f"SM_CHANNEL_{name.upper()}")
        if path is None:
            there = ", ".join(json.loads(environment.get("SM_CHANNELS") or "[]"))
            known = f"this job's channels are {there}." if there else "only SageMaker jobs have channels."
            raise Refusal(f"channel:{name}: {known} A job gets one with --channel {name}=s3://BUCKET/PREFIX.")
        return path

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return [replaced(item) for item in value]
        return _CHANNEL.sub(folder, value) if isinstance(value, str) else value

    values = {name: getattr(config, name) for name in settings_of(type(config))}
    found = {name: new for name, value in values.items() if (new := replaced(value)) != value}
    return dataclasses.replace(config, **found) if found else config


def channels_named(values: Mapping[str, Any]) -> list[str]:
    """The channels that settings name, each once."""
    texts = [text for value in values.values() for text in (value if isinstance(value, list) else [value])]
    return sorted({name for text in texts if isinstance(text, str) for name in _CHANNEL.findall(text)})


def deliver_model(output_dir: str | Path, environment: Mapping[str, str]) -> None:
    """Move the model that a finished run left to SM_MODEL_DIR, which SageMaker packs and sends to S3; on the first rank."""
    model = Path(output_dir) / "model"
    if not in_container(environment) or environment.get("RANK", "0") != "0" or not model.is_dir():
        return
    target = Path(environment["SM_MODEL_DIR"])
    target.mkdir(parents=True, exist_ok=True)
    shutil.copytree(model, target, dirs_exist_ok=True)
    shutil.rmtree(model)  # last: a machine that is taken away now finds it again, or makes it again from the last checkpoint
    print(f"the model is in {target}", flush=True)


def waits_for_s3(checkpoints: Sequence[Path], now: float | None = None) -> list[Path]:
    """Of checkpoints, oldest first, those that must stay although newer ones are there: S3 may hold no newer one whole yet.

    Deleting a file in the container deletes it in S3, at once or later, while copying a checkpoint takes minutes. So two stay:
    the newest one that has had the time to be copied, and the one after it, which will be that next. Nothing has to stay
    outside a container.
    """
    folder = checkpoint_folder()
    if folder is None or not checkpoints or folder.resolve() not in checkpoints[0].resolve().parents:
        return []
    now = time.time() if now is None else now
    copied = [path for path in checkpoints if _seconds_to_copy(path) <= now - _written(path)]
    newest_copied = copied[-1:]
    after = checkpoints[checkpoints.index(newest_copied[0]) + 1 :] if newest_copied else checkpoints
    return [*newest_copied, *after[:1]]


def _seconds_to_copy(checkpoint: Path) -> float:
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    return COPYING_BEGINS + size / COPYING_SPEED


def _written(checkpoint: Path) -> float:
    return max((file.stat().st_mtime for file in checkpoint.iterdir()), default=0.0)
