"""run.json: what a run was made of, so that it can be understood, and repeated, later."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.config import Refusal, Settings
from toolkit.config.files import mark_not_read
from toolkit.config.reading import forget_reads, is_made_of_settings, public_settings, settings_read, values_of
from toolkit.config.setting import given_settings
from toolkit.data.sources.load import writers_of_sources
from toolkit.distributed.engines import element_count, engine_of
from toolkit.distributed.launch import TRAIN_OPTIONS
from toolkit.models.adapter_files import base_of_adapter
from toolkit.models.compat import attention_of, commit_of
from toolkit.models.tokenizer import tokenizer_commit
from toolkit.runs.copies import edited_copy
from toolkit.runs.overview import given_and_not_read, what_the_run_is
from toolkit.runs.provenance import digests_of_files, toolkit_identity, working_directory
from toolkit.system.digests import digests_of_directories, sha256_of
from toolkit.system.environment import git_commit, package_version, processor_name
from toolkit.system.files import write_atomically
from toolkit.system.json_lines import read_object, strict_json

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from toolkit.data.loading.loaders import StreamLoader, TrainLoader

LIBRARIES = (
    "torch", "accelerate", "transformers", "datasets", "evaluate", "peft", "safetensors", "tokenizers", "numpy",
    "huggingface_hub", "deepspeed",
)  # fmt: skip
_FILE_SETTINGS = ("chat_template", "deepspeed")  # next to the dataset
REPLAYED_DATA = "TOOLKIT_REPLAYED_DATA"  # the variable with the training data that a replay's run must have


def write_run_card(
    path: Path, accelerator: Accelerator | None, config: Settings, model: PreTrainedModel, train: TrainLoader | StreamLoader,
    optimizer: torch.optim.Optimizer | None = None, continued: Sequence[str] = (), say: Callable[[str], None] = print,
    reference: Mapping[str, Any] | None = None, files: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Write settings, recipe, data, model, libraries, hardware and layout of a run as JSON. What is in it is listed here.

    Most of it takes a line or two. `end_run_card` adds how it ended, and leaves of the settings those that were read.
    Without an accelerator (None) it is a run of one process in full precision.

    Args:
        optimizer: the object that updates the weights; the settings for it are not what an edited recipe uses.
        continued: what the run continued with otherwise than it began, at which step; the settings have the last of it alone.
        reference: what the reference or the teacher is made of, that `open_run` is given.
        files: what `digests_of_settings` gives, where it was called before.

    Raises:
        Refusal: it is the run of a replay, and its training data are not those of the original.
    """
    if os.environ.get(REPLAYED_DATA, train.fingerprint) != train.fingerprint:
        raise Refusal(
            "the training data are not those of the run that is replayed: rows, tokenizer or chat template have changed since, "
            "or code of the toolkit that reads and prepares rows. Nothing was trained. Bring back what they were."
        )
    device = accelerator.device if accelerator else next(model.parameters()).device
    processes = accelerator.num_processes if accelerator else 1
    settings, values = public_settings(config), values_of(config)
    names = {name: values.get(name) for name in ("dataset", "model", "model_revision", "tokenizer")}
    described, get_base = describe_optimizer(optimizer), getattr(model, "get_base_model", None)  # of peft
    card = {
        "settings": settings,
        "started": {"date": datetime.now(UTC).isoformat(timespec="seconds"), "directory": working_directory()},
        "continued": list(continued),
        "given": sorted(given_settings(config).intersection(settings)),
        "recipe": recipe_file(),
        "toolkit": toolkit_identity(),
        "launch": shlex.split(os.environ.get(TRAIN_OPTIONS, "")),
        "data": {
            "dataset": names["dataset"], "fingerprint": train.fingerprint, "epoch_size": train.epoch_size,
            "revision": _revision_of(names["dataset"]),
            "commits": getattr(train, "commits", {}),
            "written_by": writers_of_sources(names["dataset"]),
        },
        "model": {
            "name": names["model"],
            "revision": names["model_revision"],
            "base": base_of_adapter(names["model"]),
            "commit": commit_of(model.config),
            "tokenizer": names["tokenizer"] or names["model"],
            "tokenizer_commit": tokenizer_commit(names["tokenizer"], names["model"], names["model_revision"]),
            "directories": digests_of_directories(names["model"], names["tokenizer"]),
            "architecture": type(get_base() if get_base else model).__name__,
            "dtype": str(getattr(model, "dtype", None) or next(model.parameters()).dtype).removeprefix("torch."),
            "attention": attention_of(model.config),
            "parameters": sum(element_count(p) for p in model.parameters()),
            "trainable": sum(element_count(p) for p in model.parameters() if p.requires_grad),
        },
        "reference": reference and dict(reference),
        "optimizer": described and {**described, "from_settings": is_made_of_settings(unwrapped_optimizer(optimizer))},
        "files": digests_of_settings(config) if files is None else dict(files),
        "seeds": {name: value for name, value in settings.items() if name == "seed" or name.endswith("_seed")},
        "layout": {
            "processes": processes,
            "engine": engine_of(accelerator).label(accelerator) if accelerator else "none",
            "precision": accelerator.mixed_precision if accelerator else "no",
            "global_batch_size": train.global_batch_size,
            "micro_batch_size": train.micro_batch_size,
            "gradient_accumulation_steps": -(-train.global_batch_size // (train.micro_batch_size * processes)),
            "steps": train.num_steps,
        },
        "hardware": {
            "device": device_name(device),
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "versions": {"python": platform.python_version(), **library_versions()},
    }
    write_atomically(path, json.dumps(card, indent=1, default=str) + "\n")
    for line in what_the_run_is(card):
        say(line)


def digests_of_settings(config: Settings) -> dict[str, str]:
    """By name: digests of the files that settings name."""
    values = values_of(config)
    return digests_of_files(values.get("dataset"), *(values.get(name) for name in _FILE_SETTINGS))


def files_changed(path: Path, files: Mapping[str, str], config: Settings, *, with_data: bool) -> list[str]:
    """A line about each of these files whose content is another than when the card at `path` was written."""
    before, others = read_object(path).get("files"), [values_of(config).get(name) for name in _FILE_SETTINGS]
    before = before if isinstance(before, dict) else {}
    changed = [name for name, digest in files.items() if before.get(name, digest) != digest and (with_data or name in others)]
    return [f"{name} has another content than when the run began" for name in changed]


def end_run_card(
    path: Path, status: str, seconds: float, metrics: dict[str, Any], config: Settings | None = None,
    say: Callable[[str], None] = print,
) -> None:  # fmt: skip
    """Add how a run ended, how long it took (seconds on the wall) and its last metrics.

    With the config of a run that came to its end, the card's settings are those that the run has read. The others are listed
    apart, as `not_read`, and config.yaml next to the card marks them; those that someone gave are named on the screen.
    """
    if path.exists():
        card = json.loads(path.read_text(encoding="utf-8"))
        if config is not None and status in ("finished", "stopped early"):
            read, settings = settings_read(config), {**card["settings"], **card.get("not_read", {})}
            card["settings"] = {name: value for name, value in settings.items() if name in read}
            card["not_read"] = {name: value for name, value in settings.items() if name not in read}
            mark_not_read(path.with_name("config.yaml"), values_of(config).keys() - read)
            if unread := given_and_not_read(config, given_settings(config)):
                say(f"WARNING: given and never read, so without effect on this run: {unread}")
            forget_reads(config)
        card["end"] = {
            "status": status, "date": datetime.now(UTC).isoformat(timespec="seconds"), "wall_seconds": round(seconds, 3),
            "device_seconds": round(seconds * card["layout"]["processes"], 3), "figures": strict_json(metrics),
        }  # fmt: skip
        write_atomically(path, json.dumps(card, indent=1, default=str) + "\n")


def describe_optimizer(optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
    """The class of an optimizer object and the defaults of its parameter groups; of what an engine has wrapped around it."""
    optimizer = unwrapped_optimizer(optimizer)
    if optimizer is None:
        return None
    given = getattr(optimizer, "defaults", {})
    defaults = {name: value for name, value in given.items() if value is not None and value is not False}
    inner = getattr(optimizer, "inner", None)  # of one that rounds at random
    kind = type(optimizer if inner is None else inner)
    rounding = {} if inner is None else {"rounding": "stochastic"}
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "defaults": defaults, **rounding}


def unwrapped_optimizer(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """The optimizer inside of what an engine has wrapped around it."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped_optimizer(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def device_name(device: torch.device) -> str:
    """The maker's name of a GPU; else the kind of device, such as cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _revision_of(dataset: str | None) -> str | None:
    """That of a Hub dataset, NAME:CONFIG@REVISION."""
    return dataset.rpartition("@")[2] if dataset and "@" in dataset and "," not in dataset else None


@cache
def library_versions() -> dict[str, str]:
    """Versions of the libraries a result may depend on, those that are installed."""
    return {name: version for name in LIBRARIES if (version := package_version(name))}


def recipe_file() -> dict[str, Any]:
    """The script that runs: its name, its path as it was typed, the SHA-256 of its text, the git commit it is at.

    Of a copy of one of the toolkit's recipes also which, and how many of its lines were changed.
    """
    script = Path(sys.argv[0])
    if not script.is_file():
        return {"file": script.name, "path": None, "sha256": None, "commit": None}
    commit, copied = git_commit(script.resolve().parent), edited_copy(script)
    of_copy = {"copied_from": copied[0], "lines_changed": copied[1]} if copied else {}
    return {"file": script.name, "path": str(script), "sha256": sha256_of(script), "commit": commit, **of_copy}
