"""What SageMaker puts into a container: the files of /opt/ml/input, and the variables that its training package makes of them.

For `simulate`. The variables are those of sagemaker-training 5.1 (environment.Environment.to_env_vars) that a script may use.
"""

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.command_line.reading import lossy_text
from toolkit.sagemaker_jobs.request import ENTRY, encoded

_SECRET_NAME = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|CREDENTIALS)$")


def lay_out(
    base: Path, hosts: list[str], this: str, hyperparameters: Mapping[str, Any], channels: Mapping[str, Path],
    instance_type: str, torch_distributed: bool = False,
) -> None:  # fmt: skip
    """Make a machine's /opt/ml at `base`; its code and checkpoints are put there by others.

    A channel is a link to what is on this machine: a folder, or a file in a folder of its own.
    """
    for folder in ("code", "model", "input/config", "input/data", "output/data", "output/intermediate"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    for name, path in channels.items():
        target = base / "input/data" / name
        if path.is_file():
            target.mkdir()
            target = target / path.name
        target.symlink_to(path.resolve())
    group = {"instance_group_name": "homogeneousCluster", "instance_type": instance_type, "hosts": hosts}
    resources = {
        "current_host": this, "hosts": hosts, "current_instance_type": instance_type, "network_interface_name": "lo",
        "current_group_name": "homogeneousCluster", "instance_groups": [group],
    }  # fmt: skip
    kind = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
    of_the_sdk = {"sagemaker_program": ENTRY, "sagemaker_submit_directory": str(base / "code")}
    if torch_distributed:
        of_the_sdk |= encoded({"sagemaker_torch_distributed_enabled": True, "sagemaker_instance_type": instance_type})
    files = {
        "hyperparameters": {**encoded(hyperparameters), **of_the_sdk},
        "resourceconfig": resources,
        "inputdataconfig": dict.fromkeys(channels, kind),
    }  # fmt: skip
    for name, value in files.items():
        (base / "input/config" / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


def outer_environment(job_name: str, base: Path, ours: Mapping[str, str]) -> dict[str, str]:
    """The variables that a container begins with: the caller's without tokens and ranks, the job's own, and the base folder."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SM_") and name not in foreign and (name.startswith("AWS_") or not _SECRET_NAME.search(name))
    }
    return {**kept, "TRAINING_JOB_NAME": job_name, "SAGEMAKER_BASE_DIR": str(base), **ours}


def script_environment(base: Path, hyperparameters: Mapping[str, Any]) -> dict[str, str]:
    """The SM_ variables of the script, from the files at `base`."""
    config = base / "input/config"
    resources = json.loads((config / "resourceconfig.json").read_text())
    channels = {name: str(base / "input/data" / name) for name in json.loads((config / "inputdataconfig.json").read_text())}
    values: dict[str, Any] = {
        "hosts": resources["hosts"], "current_host": resources["current_host"],
        "network_interface_name": resources["network_interface_name"],
        "current_instance_type": resources["current_instance_type"],
        "hps": dict(hyperparameters), "user_args": script_arguments(hyperparameters), "user_entry_point": ENTRY,
        "module_name": ENTRY.removesuffix(".py"), "module_dir": str(base / "code"), "log_level": 20,
        "channels": sorted(channels), "model_dir": str(base / "model"),
        "input_dir": str(base / "input"), "input_config_dir": str(base / "input/config"),
        "output_dir": str(base / "output"), "output_data_dir": str(base / "output/data"),
        "output_intermediate_dir": str(base / "output/intermediate"),
        "num_cpus": os.cpu_count() or 1, "num_gpus": _number_of_gpus(), "num_neurons": 0,
        **{f"channel_{name}": path for name, path in channels.items()},
        **{f"hp_{name}": value for name, value in hyperparameters.items()},
    }  # fmt: skip
    return {f"SM_{name.upper()}": _text(value) for name, value in values.items()} | {"PYTHONPATH": str(base / "code")}


def script_arguments(hyperparameters: Mapping[str, Any]) -> list[str]:
    """The script's arguments, which have lost their types; SM_HPS has them."""
    pairs = [(f"--{name}", lossy_text(value)) for name, value in sorted(hyperparameters.items())]
    return [word for pair in pairs for word in pair]


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _number_of_gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return len([line for line in listed.stdout.splitlines() if line.startswith("GPU ")])
