"""run.json: what a run was made of, so that it can be understood, and repeated, later."""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from toolkit.engines import element_count
from toolkit.output import write_atomically
from toolkit.tracking import public_settings

LIBRARIES = ("torch", "accelerate", "transformers", "datasets", "evaluate", "peft", "safetensors", "tokenizers", "deepspeed")


def write_run_card(path: Path, accelerator: Any, config: Any, model: Any, train: Any) -> None:
    """Write settings, recipe, data, model, libraries, hardware and layout of a run as JSON."""
    device = accelerator.device
    card = {
        "settings": public_settings(config),
        "recipe": recipe_file(),
        "data": {"dataset": getattr(config, "dataset", None), "fingerprint": train.fingerprint, "epoch_size": train.epoch_size},
        "model": {
            "name": getattr(config, "model", None),
            "commit": getattr(model.config, "_commit_hash", None),
            "parameters": sum(element_count(p) for p in model.parameters()),
            "trainable": sum(element_count(p) for p in model.parameters() if p.requires_grad),
        },
        "layout": {
            "processes": accelerator.num_processes,
            "engine": getattr(accelerator, "engine_label", str(accelerator.distributed_type.value)),
            "precision": accelerator.mixed_precision,
            "global_batch_size": train.global_batch_size,
            "micro_batch_size": train.micro_batch_size,
            "gradient_accumulation_steps": -(-train.global_batch_size // (train.micro_batch_size * accelerator.num_processes)),
            "steps": train.num_steps,
        },
        "hardware": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "versions": {"python": platform.python_version(), **library_versions()},
    }
    write_atomically(path, json.dumps(card, indent=1, default=str) + "\n")


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
    """The script that runs: its name, the SHA-256 of its text, and the git commit it stands at."""
    script = Path(sys.argv[0])
    if not script.is_file():
        return {"file": script.name, "sha256": None, "commit": None}
    digest = hashlib.sha256(script.read_bytes()).hexdigest()
    return {"file": script.name, "sha256": digest, "commit": _git_commit(script.resolve().parent)}


def _git_commit(folder: Path) -> str | None:
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"], cwd=folder, capture_output=True, text=True,
            timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()
