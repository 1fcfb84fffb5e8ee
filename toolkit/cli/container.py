"""What a SageMaker container decides of a recipe's settings, its channels, and where its model goes."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from toolkit.config.reading import values_of
from toolkit.config.setting import Refusal, Setting, Settings
from toolkit.system.console import say
from toolkit.system.files import sync_tree
from toolkit.system.sagemaker_container import checkpoint_folder, in_container

AnyConfig = TypeVar("AnyConfig", bound=Settings)


_CHANNEL = re.compile(r"(?<![\w/.-])channel:([A-Za-z0-9._-]+)")


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

    found = {name: new for name, value in values_of(config).items() if (new := replaced(value)) != value}
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
    sync_tree(target)
    shutil.rmtree(model)  # last: a machine that is taken away now finds it again, or makes it again from the last checkpoint
    say(f"the model is in {target}")
