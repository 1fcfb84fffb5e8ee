"""The Accelerator of a run: device, engine, precision, trackers."""

import importlib.util
import os
from datetime import timedelta
from typing import Any

from toolkit.config import Refusal, RunConfig

TRACKERS = ("wandb", "tensorboard", "trackio")


def build_accelerator(config: RunConfig) -> Any:
    """The `accelerate.Accelerator` for these settings; seeds every generator and checks that output_dir is free.

    Accumulation stays ours (`train_step` divides by the global totals), so Accelerate is told of one step a batch.

    Raises:
        Refusal: a precision the device lacks, a tracker whose library is missing, an output directory in use.
    """
    from toolkit.output import check_output_dir
    from toolkit.ranks import on_main

    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not several:
        check_output_dir(config)  # before the imports below: they take seconds
    trackers = tracker_names(config)

    import torch
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs, set_seed

    if config.fp16 and (config.use_cpu or not (torch.cuda.is_available() or torch.backends.mps.is_available())):
        raise Refusal("--fp16 needs a GPU: on the CPU use --bf16, or full precision.")
    if config.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = config.tf32
        torch.backends.cudnn.allow_tf32 = config.tf32
    precision = "bf16" if config.bf16 else "fp16" if config.fp16 else None
    # Ranks without a GPU: unless told to stay on the CPU, Accelerate (1.15) takes each of them for a run of one process.
    on_cpu = config.use_cpu or (several and not torch.accelerator.is_available())
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=max(10 * config.hang_timeout, 1800)))
    accelerator = Accelerator(
        mixed_precision=precision, cpu=on_cpu or None, kwargs_handlers=[timeout] if several else None,
        log_with=trackers or None, project_dir=os.path.join(config.output_dir, "trackers"),
        gradient_accumulation_steps=1,
    )  # fmt: skip
    on_main(accelerator, lambda: check_output_dir(config))  # by one rank, for all: another may be writing there already
    set_seed(config.seed)
    return accelerator


def tracker_names(config: RunConfig) -> list[str]:
    """The trackers asked for, each with its library present."""
    names = [name for name in config.report_to if name != "none"]
    if "all" in names:
        return [name for name in TRACKERS if importlib.util.find_spec(name)]
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise Refusal(f"--report-to {name}: the library is not installed. Type: pip install {name}")
    return names
