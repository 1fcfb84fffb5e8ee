"""run.json: what a run was made of, so that it can be understood, and repeated, later."""

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from toolkit.adapter_files import base_of_adapter
from toolkit.config import Refusal, changed_settings
from toolkit.directory_digest import digests_of_directories
from toolkit.engines import element_count
from toolkit.launch import TRAIN_OPTIONS
from toolkit.output import write_atomically
from toolkit.provenance import digests_of_files, git_commit, processor_name, toolkit_identity, working_directory
from toolkit.tracking import public_settings

LIBRARIES = (
    "torch", "accelerate", "transformers", "datasets", "evaluate", "peft", "safetensors", "tokenizers", "numpy",
    "huggingface_hub", "deepspeed",
)  # fmt: skip
REPLAYED_DATA = "TOOLKIT_REPLAYED_DATA"  # the variable that tells a replay's run which training data it must have


def write_run_card(
    path: Path, accelerator: Any, config: Any, model: Any, train: Any, continued: Sequence[str] = ()
) -> None:
    """Write settings, recipe, data, model, libraries, hardware and layout of a run as JSON. What is in it is listed here.

    `end_run_card` adds how it ended. Without an accelerator (None) it is a run of one process in full precision.

    Args:
        continued: what the run went on with otherwise than it began, at which step; the settings tell the last of it alone.

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
    settings = public_settings(config)
    card = {
        "settings": settings,
        "started": {"date": datetime.now(UTC).isoformat(timespec="seconds"), "directory": working_directory()},
        "continued": list(continued),
        "given": sorted(given_settings(config).intersection(settings)),
        "recipe": recipe_file(),
        "toolkit": toolkit_identity(),
        "launch": shlex.split(os.environ.get(TRAIN_OPTIONS, "")),
        "data": {
            "dataset": getattr(config, "dataset", None), "fingerprint": train.fingerprint, "epoch_size": train.epoch_size,
            "revision": _revision_of(getattr(config, "dataset", None)),
            "commits": getattr(train, "commits", {}),
        },
        "model": {
            "name": getattr(config, "model", None),
            "revision": getattr(config, "model_revision", None),
            "base": base_of_adapter(getattr(config, "model", None)),
            "commit": getattr(model.config, "_commit_hash", None),
            "tokenizer": getattr(config, "tokenizer", None) or getattr(config, "model", None),
            "tokenizer_commit": getattr(getattr(model, "tokenizer", None), "commit", None),
            "directories": digests_of_directories(getattr(config, "model", None), getattr(config, "tokenizer", None)),
            "architecture": type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__,
            "dtype": str(getattr(model, "dtype", None) or next(model.parameters()).dtype).removeprefix("torch."),
            "attention": getattr(model.config, "_attn_implementation", None),
            "parameters": sum(element_count(p) for p in model.parameters()),
            "trainable": sum(element_count(p) for p in model.parameters() if p.requires_grad),
        },
        "files": digests_of_files(*(getattr(config, name, None) for name in ("dataset", "chat_template", "deepspeed"))),
        "seeds": {name: value for name, value in settings.items() if name == "seed" or name.endswith("_seed")},
        "layout": {
            "processes": processes,
            "engine": getattr(accelerator, "engine_label", str(accelerator.distributed_type.value)) if accelerator else "none",
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


def end_run_card(path: Path, status: str, seconds: float, figures: dict[str, Any]) -> None:
    """Add how a run ended, how long it took (seconds on the wall) and its last figures."""
    if path.exists():
        card = json.loads(path.read_text(encoding="utf-8"))
        card["end"] = {
            "status": status, "date": datetime.now(UTC).isoformat(timespec="seconds"), "wall_seconds": round(seconds, 3),
            "device_seconds": round(seconds * card["layout"]["processes"], 3), "figures": figures,
        }  # fmt: skip
        write_atomically(path, json.dumps(card, indent=1, default=str) + "\n")


def files_of_a_run(run: Any) -> list[Path]:
    """The run card and a report, for trackers that keep files."""
    from toolkit.report import write_report

    report = run.output_dir / "trackers" / "report.html"
    report.parent.mkdir(exist_ok=True)
    try:
        write_report([run.output_dir], report)
    except Exception as error:  # a report is not worth a run
        run.say(f"WARNING: no report for the trackers: {type(error).__name__}: {error}")
    return [run.output_dir / "run.json", report]


def device_name(device: torch.device) -> str:
    """The maker's name of a GPU; else the kind of device, such as cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def given_settings(config: Any) -> frozenset[str]:
    """Names of the settings that someone gave; of a config made in code, of those that are not their defaults."""
    known = getattr(config, "given", None)
    return frozenset(changed_settings(config)) if known is None else known


def _revision_of(dataset: str | None) -> str | None:
    """That of a Hub dataset, NAME:CONFIG@REVISION."""
    return dataset.rpartition("@")[2] if dataset and "@" in dataset and "," not in dataset else None


def library_versions() -> dict[str, str]:
    """Versions of the libraries a result may depend on, those that are installed."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def recipe_file() -> dict[str, str | None]:
    """The script that runs: its name, its path as it was typed, the SHA-256 of its text, and the git commit it stands at."""
    script = Path(sys.argv[0])
    if not script.is_file():
        return {"file": script.name, "path": None, "sha256": None, "commit": None}
    commit = git_commit(script.resolve().parent)
    return {"file": script.name, "path": str(script), "sha256": sha256_of(script), "commit": commit}


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
