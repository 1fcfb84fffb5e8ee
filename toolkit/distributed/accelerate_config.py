"""An Accelerate config file, read as `accelerate launch` reads it: how many ranks it sets, and the variables of each."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.config import Refusal
from toolkit.config.json_and_yaml import parse_yaml, read_text_file
from toolkit.config.setting import did_you_mean
from toolkit.system.console import as_typed

if TYPE_CHECKING:
    from argparse import Namespace

# Of Accelerate's DistributedType: what isn't started as plain processes that torch.distributed brings together.
_NOT_STARTED_HERE = ("XLA", "MEGATRON_LM")
_SECTIONS = {"deepspeed_config": "", "fsdp_config": "fsdp_"}  # and what Accelerate puts before a key that lacks it


@dataclass(frozen=True)
class AccelerateConfig:
    """The ranks that a file sets; None where it leaves something open.

    `processes` are those of one machine, where the file counts all. `environment` holds the variables by which Accelerate,
    in each rank, decides what is meant.
    """

    path: str
    distributed_type: str
    processes: int | None
    machines: int
    machine_rank: int | None
    main_address: str | None
    main_port: int | None
    on_cpu: bool
    environment: Mapping[str, str]


def read_accelerate_config(path: str) -> AccelerateConfig:
    """Read a config file, YAML or JSON, through Accelerate's own parser (importing it takes three seconds).

    Raises:
        Refusal: there is no such file, it can't be read, or it has what `toolkit train` doesn't start.
    """
    written = _written(path)
    try:
        return _as_accelerate_reads(path, written)
    # Whatever a file holds that it doesn't expect, Accelerate (1.15) meets it by chance: int + str, a missing attribute.
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, ImportError, RuntimeError) as problem:
        raise Refusal(f"{path}: Accelerate can't read this config file: {type(problem).__name__}: {problem}") from problem


def check_devices(config: AccelerateConfig) -> None:
    """Refuse a number of processes that only the file gives, on a machine with fewer GPUs."""
    if config.on_cpu or config.processes is None:
        return
    import torch

    found = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    chosen = config.environment.get("CUDA_VISIBLE_DEVICES", "")
    found = min(found, len(chosen.split(","))) if chosen else found
    if found < config.processes:
        there = f"{found} GPU{'s' * (found != 1)} found" if found else "no GPU was found"
        typed = f"type --processes {found}" if found else "--processes 2 starts two on the CPU"
        raise Refusal(f"{config.path}: {config.processes} processes on this machine, one for each GPU, but {there}: {typed}.")


def _written(path: str) -> dict[str, Any]:
    written = parse_yaml(read_text_file(path, path), path)  # JSON is YAML
    if not isinstance(written, dict):
        raise Refusal(f"{path}: not an Accelerate config file, which has keys such as distributed_type and num_processes.")
    return written


def _as_accelerate_reads(path: str, written: dict[str, Any]) -> AccelerateConfig:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    from toolkit.distributed.compat import checked_launch_arguments

    file = load_config_from_file(path)
    kind = str(file.distributed_type.value)
    where = str(file.compute_environment.value)
    if where != "LOCAL_MACHINE" or kind in _NOT_STARTED_HERE:
        found = f"compute_environment {where}" if where != "LOCAL_MACHINE" else f"distributed_type {kind}"
        launch = as_typed("accelerate", "launch", "--config_file", path, "RECIPE")
        raise Refusal(f"{path}: {found} is not for toolkit train. Type: {launch}")
    # A number of threads is given only so that Accelerate doesn't look for one.
    words = ["--config_file", path, "--num_cpu_threads_per_process", "1", "X.py"]
    if file.num_processes == -1:
        words = ["--num_processes", "1", *words]
    arguments = launch_command_parser().parse_args(words)
    _check_sections(path, written, set(vars(arguments)))
    arguments, precision_of_file = checked_launch_arguments(arguments)
    # The machines are this toolkit's affair: their rank, their ports and the programs that reach them.
    arguments.num_machines, arguments.main_process_port = 1, 0
    processes, machines = file.num_processes, file.num_machines
    if processes == -1:
        processes = None
    elif processes < 1 or machines < 1 or processes % machines:
        raise ValueError(f"num_processes {processes} and num_machines {machines}: the first must be a multiple of the second.")
    on_cpu = bool(file.use_cpu) and kind not in ("DEEPSPEED", "FSDP")
    environment = _environment(arguments, [*file.deepspeed_config, *["mixed_precision"] * precision_of_file])
    if on_cpu:
        environment["ACCELERATE_USE_CPU"] = "true"
    return AccelerateConfig(
        path=path, distributed_type=kind, processes=None if processes is None else processes // machines, machines=machines,
        machine_rank=written.get("machine_rank"), main_address=file.main_process_ip, main_port=file.main_process_port or None,
        on_cpu=on_cpu, environment=environment,
    )  # fmt: skip


def _environment(arguments: Namespace, deepspeed_fields: list[str]) -> dict[str, str]:
    """What `accelerate launch` would change in its own environment for the ranks."""
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if arguments.use_deepspeed:
            arguments.deepspeed_fields_from_accelerate_config = ",".join(deepspeed_fields)
            _, environment = prepare_deepspeed_cmd_env(arguments)
        else:
            environment = prepare_multi_gpu_env(arguments)
    environment.pop("OMP_NUM_THREADS", None)  # ours depends on how many ranks are started
    return {name: value for name, value in environment.items() if os.environ.get(name) != value}


def _check_sections(path: str, written: dict[str, Any], known: set[str]) -> None:
    """Refuse a key that Accelerate would take and never look at (it checks only those of the outermost level)."""
    for section, prefix in _SECTIONS.items():
        for key in written.get(section) or {}:
            if key not in known and f"{prefix}{key}" not in known:
                hint = did_you_mean(key, [name for name in known if not prefix or name.startswith(prefix)])
                raise Refusal(f"{path}: {section}: {key}: Accelerate has no such key.{hint}")
