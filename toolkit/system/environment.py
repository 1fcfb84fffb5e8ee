"""What a bug report needs of a machine: versions, hardware, torch's build, settings; nothing secret.

By allow-list: only variables and keys that are named here are read, and what looks like a secret in their values is taken out.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from toolkit.system.control_groups import cores_of_groups

PACKAGES = (
    "torch", "accelerate", "transformers", "datasets", "evaluate", "peft", "safetensors", "tokenizers", "huggingface_hub",
    "numpy", "pyarrow", "typer", "deepspeed", "bitsandbytes", "flash-attn", "triton", "torchao", "trl", "liger-kernel",
    "wandb", "trackio", "tensorboard", "mlflow", "mlflow-skinny", "sagemaker", "optuna",
)  # fmt: skip
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "HIP_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF", "PYTORCH_ENABLE_MPS_FALLBACK", "TORCH_LOGS", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "TOKENIZERS_PARALLELISM", "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "HF_HOME", "HF_HUB_CACHE",
    "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_ENABLE_HF_TRANSFER",
    "TRANSFORMERS_VERBOSITY", "WANDB_MODE", "SM_NUM_GPUS", "SM_CURRENT_INSTANCE_TYPE", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS",
)  # fmt: skip
ACCELERATE_KEYS = (
    "compute_environment", "distributed_type", "mixed_precision", "num_machines", "num_processes", "use_cpu", "downcast_bf16",
    "enable_cpu_affinity", "gpu_ids", "rdzv_backend", "same_network", "dynamo_config", "deepspeed_config", "fsdp_config",
)  # fmt: skip
_SECRETS = re.compile(
    r"(?<=://)[^/\s@]+@|\b(?:hf|sk|gh[opsu]|github_pat|glpat|xox[abp])[-_][\w-]{8,}|\bAKIA[0-9A-Z]{16}\b|\b[0-9a-f]{40}\b"
)
Report = dict[str, dict[str, Any]]


def environment_report() -> Report:
    """Sections of names and values."""
    return {
        "toolkit": _toolkit(),
        "system": _system(),
        "packages": {name: version for name in PACKAGES if (version := package_version(name))},
        "torch": _torch(),
        "accelerators": _accelerators(),
        "accelerate config": _accelerate_config(),
        "environment": {name: without_secrets(os.environ[name]) for name in VARIABLES if name in os.environ},
    }


def without_secrets(text: str) -> str:
    """A text without tokens, keys and the user's own home directory."""
    text = _SECRETS.sub("[removed]", text)
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


def _toolkit() -> dict[str, Any]:
    import toolkit

    place = Path(toolkit.__file__).resolve().parent
    found = {"version": toolkit.__version__, "in": without_secrets(str(place))}
    if (place.parent / ".git").exists():
        found["commit"] = git_commit(place.parent) or "unknown"
    return found


def _system() -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {without_secrets(sys.prefix)})",
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": f"{usable_cores()} of {os.cpu_count()}",
    }
    with contextlib.suppress(ValueError, OSError, AttributeError):
        found["memory"] = _gigabytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    found["free disk here"] = _gigabytes(shutil.disk_usage(".").free)
    return found


def _torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # a broken installation is what a report may be about
        return {"import": f"fails: {type(error).__name__}: {without_secrets(str(error))}"}
    found: dict[str, Any] = {
        "version": torch.__version__, "cuda": torch.version.cuda or "not built in",
        "threads": torch.get_num_threads(), "deterministic": torch.are_deterministic_algorithms_enabled(),
    }  # fmt: skip
    if getattr(torch.version, "hip", None):
        found["rocm"] = torch.version.hip
    with contextlib.suppress(Exception):
        found["cudnn"] = torch.backends.cudnn.version() or "none"
    with contextlib.suppress(Exception):
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    with contextlib.suppress(Exception):
        found["backends"] = ", ".join(
            name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(torch.distributed, f"is_{name}_available")()
        )
    return found


def _accelerators() -> dict[str, Any]:
    with contextlib.suppress(Exception):
        import torch

        if torch.cuda.is_available():
            found = {}
            for number in range(torch.cuda.device_count()):
                device = torch.cuda.get_device_properties(number)
                found[f"cuda:{number}"] = (
                    f"{device.name}, {_gigabytes(device.total_memory)}, capability {device.major}.{device.minor}"
                )
            driver = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
            return {**found, **({"driver": driver[0]} if driver else {})}
        if torch.backends.mps.is_available():
            return {"mps": platform.machine()}
    return {"found": "none"}


def _accelerate_config() -> dict[str, Any]:
    """The default file of `accelerate config`, where there is one; addresses and commands in it are left out."""
    caches = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    cache = Path(os.environ.get("HF_HOME") or Path(caches) / "huggingface")
    for path in (cache / "accelerate" / "default_config.yaml", cache / "accelerate" / "default_config.json"):
        if path.is_file():
            import yaml

            try:
                read = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
                kept = {key: without_secrets(str(read[key])) for key in ACCELERATE_KEYS if key in read}
            except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
                return {"file": without_secrets(str(path)), "can't be read": without_secrets(str(error))}
            return {"file": without_secrets(str(path)), **kept}
    return {"file": "none"}


def package_version(name: str) -> str | None:
    """The version of a package, None where it is not installed."""
    import importlib.metadata  # with the whole of email

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor_name() -> str:
    """The processor's model where Linux has it, else what Python has."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, model = line.partition(":")
            if name.strip() == "model name" and model.strip():
                return model.strip()
    return platform.processor() or platform.machine()


def git_commit(folder: Path) -> str | None:
    """The commit that a folder is at, `-dirty` where files have changed since; None outside a clone."""
    return _run("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40") or None


def usable_cores() -> int:
    """Cores that this process may run on; a container or a scheduler may allow it fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(cores_of_groups() or cores)))


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
