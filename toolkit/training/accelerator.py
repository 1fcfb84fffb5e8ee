"""The Accelerator of a run: device, engine, precision, trackers."""

from __future__ import annotations

import importlib.util
import os
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING

from toolkit.config import Refusal, RunConfig
from toolkit.config.conditions import packages_of_settings
from toolkit.config.reading import values_of
from toolkit.config.rules import check_made_in_code
from toolkit.config.setting import flag_of
from toolkit.system.allocator import keep_few_primitives, keep_freed_memory
from toolkit.system.console import say
from toolkit.system.environment import usable_cores
from toolkit.system.imports import imported_to_stay
from toolkit.tracking.services import tracker_names

if TYPE_CHECKING:
    from accelerate import Accelerator, DeepSpeedPlugin


@imported_to_stay()
def build_accelerator(config: RunConfig, deepspeed_plugin: DeepSpeedPlugin | None = None) -> Accelerator:
    """The `accelerate.Accelerator` for these settings; seeds every generator and checks that output_dir is free.

    Settings made in code are checked here, by the rules of the command line; those that differ from their defaults are given.

    What shards the run is chosen by the settings and by what `accelerate launch` was given
    (`toolkit.distributed.engines.choice`), or by a `DeepSpeedPlugin` made in code, whose "auto" values the settings fill.
    Accumulation stays ours (`train_step` divides by the global totals), so Accelerate is given one step a batch. Where nobody
    names a precision it is bfloat16 on a device where that is faster; a resumed run keeps the one that it has.

    Raises:
        Refusal: settings contradict each other or the launcher's configuration, or have no effect with the others; a
            precision the device lacks, an optimizer that can't be sharded, a tracker or a setting whose library is missing, an
            output directory in use, an earlier run in this process that was sharded.
    """
    from toolkit.distributed.engines import engine_of
    from toolkit.distributed.engines.choice import choose_engine
    from toolkit.distributed.engines.start import check_backend, check_engine, check_no_sharded_run_before, start_engine
    from toolkit.distributed.heartbeat import start_heartbeat
    from toolkit.distributed.mpi import adopt_mpi_ranks
    from toolkit.distributed.ranks import largest, on_main
    from toolkit.runs.directory import check_output_dir
    from toolkit.training.resume import check_settings_to_resume, precision_to_resume

    if config.given is None:  # made in code: no command line has checked it
        check_made_in_code(config)
    adopt_mpi_ranks()
    check_no_sharded_run_before()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not several:
        check_output_dir(config)  # before the imports below: they take seconds
    trackers = tracker_names(config)
    _check_packages(config)
    in_code = deepspeed_plugin and deepspeed_plugin.hf_ds_config.config
    check_engine(choose_engine(config, in_code=in_code), config, in_code=deepspeed_plugin is not None)

    import torch
    from accelerate.utils import check_cuda_p2p_ib_support, set_seed

    # Unless it is to stay on the CPU, Accelerate (1.15) takes each of several ranks without a GPU for a run of one process.
    wants_cpu = config.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes")
    on_cpu = wants_cpu or not torch.accelerator.is_available()
    takes_fp16 = not config.use_cpu and (torch.cuda.is_available() or torch.backends.mps.is_available())
    precision = precision_to_resume(config) or _precision_of_device(config, on_cpu)
    precision = "no" if precision == "fp16" and not takes_fp16 else precision
    choice = choose_engine(config, in_code=in_code, precision=precision)
    if choice.mixed_precision == "fp16" and not takes_fp16:
        raise Refusal("--fp16 needs a GPU: on the CPU use --bf16, or full precision.")
    if config.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = config.tf32
        torch.backends.cudnn.allow_tf32 = config.tf32
    # It plans for every new shape, and texts have any length: the median step of padded rows took 0.2 s, the longest 2.5 s
    # (torch 2.11 on an H200, where it comes first under a mask); one of packed rows took 0.05 s.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if config.full_determinism:
        _be_deterministic(config.seed)
    _take_threads_for_usable_cores()
    if on_cpu:  # DeepSpeed, which transformers imports where it is installed, would log that it looked for others
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        keep_few_primitives()
    # Its default. Without it `tokenizers` warns in each process that is forked after the first text was tokenized.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if not on_cpu:  # what torch warns of in any program: of its first backward pass, and of ranks that wait for each other
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
        warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    if several and not on_cpu and not check_cuda_p2p_ib_support():  # RTX 4000 cards: Accelerate requires these two
        os.environ.update(NCCL_P2P_DISABLE="1", NCCL_IB_DISABLE="1")
    timeout = timedelta(seconds=max(10 * config.hang_timeout, 1800))
    accelerator = start_engine(
        choice, on_cpu=on_cpu, backend=check_backend(config.ddp_backend, on_cpu), timeout=timeout, trackers=trackers,
        project_dir=os.path.join(config.output_dir, "trackers"),
    )  # fmt: skip
    start_heartbeat(accelerator, config.hang_timeout)
    in_half = int(choice.mixed_precision != "no")
    if largest(accelerator, in_half) + largest(accelerator, -in_half):
        raise Refusal("not every rank's device is faster in bfloat16: give one precision for all, --bf16 or --no-bf16.")
    engine = engine_of(accelerator)
    if on_cpu:
        keep_freed_memory(sparing=engine.shards_weights(accelerator))
    if engine.shards and accelerator.is_main_process:
        half = f", {choice.mixed_precision}" if choice.mixed_precision != "no" else ""
        say(f"sharded over {accelerator.num_processes} rank(s): {engine.label(accelerator)}{half}")
    on_main(accelerator, lambda: check_settings_to_resume(config))
    on_main(accelerator, lambda: check_output_dir(config))  # by one rank, for all: another may be writing there already
    set_seed(config.seed)
    return accelerator


def _check_packages(config: RunConfig) -> None:
    """Where they are used they are looked for too; here before the data are read and tokenized for nothing."""
    for name, package in packages_of_settings(values_of(config)).items():
        if importlib.util.find_spec(package) is None:
            raise Refusal(f"{flag_of(name)} needs {package}, which is not installed. Install it: pip install {package}")


def _precision_of_device(config: RunConfig, on_cpu: bool) -> str:
    """bf16 over weights in float32, where the device, or the one that is planned for, multiplies bfloat16 faster."""
    import torch

    from toolkit.system.devices import is_faster_in_bf16

    device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator() or torch.device("cpu")
    return "bf16" if is_faster_in_bf16(device) and values_of(config).get("dtype", "float32") == "float32" else "no"


def _take_threads_for_usable_cores() -> None:
    """Let torch take no more threads than there are cores, where control groups allow less time than that, as of a pod.

    Its threads wait for each other by looking again and again, which is counted: in a group with the time of one core two
    threads took 1.2 times as long as one in `sft.py` (384 wide), four times in layers alone. The environment's number stays.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ and usable_cores() < torch.get_num_threads():
        torch.set_num_threads(usable_cores())


def _be_deterministic(seed: int) -> None:
    """What Trainer means by the name: transformers' own function, before CUDA reads the environment that it sets.

    Raises:
        Refusal: CUDA was used in this process without that environment, as it may be in a notebook.
    """
    import torch
    from transformers.trainer_utils import enable_full_determinism

    # Being initialized is no use yet: bitsandbytes reads the GPU's capability when it is imported, as peft does.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    used = any(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0) > 0 for device in devices)
    if used and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":16:8", ":4096:8"):
        raise Refusal(
            "--full-determinism: CUDA is in use in this process already, too late to make it deterministic. Start again, with "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment, or build the accelerator before anything is put on the GPU."
        )
    enable_full_determinism(seed)
