"""The Accelerator of each engine, on GPUs and on CPU ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from toolkit.config import Refusal, RunConfig
from toolkit.config.reading import values_of
from toolkit.distributed.compat import import_before_the_default_group
from toolkit.distributed.engines.choice import EngineChoice
from toolkit.distributed.engines.deepspeed_config import check_known_keys, fit_buckets
from toolkit.distributed.engines.named import look_up
from toolkit.system.console import say
from toolkit.system.network import free_port

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs
    from torch import nn

# Optimizers that are wrong, or unproven, on shards of a parameter, and why.
_UNSHARDED_ONLY = {
    "adafactor": "its second moment is kept by rows and columns of a whole matrix",
    "adagrad": "torch makes its state before the parameters are sharded",
    "adamw_bnb_8bit": "bitsandbytes' states in blocks are not proven on shards",
    "lion_8bit": "bitsandbytes' states in blocks are not proven on shards",
    "lion_32bit": "bitsandbytes' optimizers are not proven on shards",
}


def check_engine(choice: EngineChoice, config: RunConfig, *, in_code: bool = False) -> None:
    """Refuse an engine that isn't installed, and an optimizer, or a type of weights, that it would make wrong.

    `in_code`: the recipe itself sets it, so that no setting can choose another one.
    """
    if choice.name == "plain":
        return
    settings = values_of(config)  # a check is no use of them: an edited recipe may build its own optimizer
    if choice.name == "zero" and importlib.util.find_spec("deepspeed") is None:
        instead = "" if in_code else " Or shard with --fsdp."
        raise Refusal(f"{choice.title} needs the library DeepSpeed: pip install deepspeed.{instead}")
    if reason := _UNSHARDED_ONLY.get(settings.get("optim", "")):
        raise Refusal(f"--optim {settings['optim']} with {choice.title}: {reason}. Take --optim adamw_torch, or muon.")
    if settings.get("stochastic_rounding"):
        raise Refusal(
            f"--stochastic-rounding with {choice.title}: not proven on shards. Take --bf16 and --dtype float32, whose updates "
            "are not rounded."
        )
    if choice.name == "zero" and settings.get("fp8", "none") != "none":
        raise Refusal(f"--fp8 {settings['fp8']} with {choice.title}: not proven there. Take --fsdp, or leave it out.")
    devices = [look_up(choice.deepspeed, f"zero_optimization.{part}.device") for part in ("offload_optimizer", "offload_param")]
    if "nvme" in devices:
        without = {"save_strategy": "no", "load_best_model_at_end": False, "optim": "adamw_torch"}
        if any(settings.get(name, value) != value for name, value in without.items()):
            raise Refusal(
                "offload to nvme: checkpoints, and optimizers of whole matrices, need the state in memory. Take "
                "--save-strategy no --no-load-best-model-at-end --optim adamw_torch, or the device cpu."
            )
    dtype = settings.get("dtype", "float32")
    if choice.name == "zero" and dtype != "float32" and choice.mixed_precision == "no":
        raise Refusal(
            f"--dtype {dtype} with {choice.title}: DeepSpeed keeps float32 weights next to those it computes with. Take --bf16 "
            "and --dtype float32: the weights of forward and backward are bfloat16 then."
        )


def check_backend(backend: str, on_cpu: bool) -> str | None:
    """The backend by torch's name, None where Accelerate's own choice is right.

    Raises:
        Refusal: torch has no such backend here.
    """
    import torch

    if backend == "mpi" and not torch.distributed.is_mpi_available():
        raise Refusal("--ddp-backend mpi: this torch was built without it. Take gloo: mpirun may start the ranks all the same.")
    if backend == "nccl" and (on_cpu or not torch.distributed.is_nccl_available()):
        raise Refusal("--ddp-backend nccl is for NVIDIA GPUs, and none is used here. Take gloo.")
    if backend == "auto":
        return "gloo" if on_cpu else None
    return backend


def start_engine(
    choice: EngineChoice, *, on_cpu: bool, backend: str | None, timeout: timedelta, trackers: list[str], project_dir: str
) -> Accelerator:
    """The Accelerator of a run. Its steps are one batch each: `train_step` accumulates, and divides by the global totals.

    Args:
        backend: as `check_backend` returns it.
        timeout: after which ranks stop waiting for each other.

    Raises:
        Refusal: an earlier run in this process can't be followed by this one, or a key of DeepSpeed's is unknown to it.
    """
    make_way(choice, on_cpu)
    import_before_the_default_group()
    start = {"plain": _start_plain, "zero": _start_zero, "fsdp": _start_fsdp}[choice.name]
    common = {
        "mixed_precision": choice.mixed_precision, "log_with": trackers or None, "project_dir": project_dir,
        "gradient_accumulation_steps": 1,
    }  # fmt: skip
    with settled_apart():
        return start(choice, on_cpu, backend, timeout, common)


# -- an earlier run in this process: Accelerate keeps one state for each process, which the first run has settled ------

_INSTEAD = "Start this run in a process of its own: toolkit train, or a restarted notebook kernel."


def check_no_sharded_run_before() -> None:
    """Refuse a run after one with ZeRO or FSDP2 in this process, before the variables that Accelerate left of it are read.

    Raises:
        Refusal: there was one.
    """
    import sys

    if "accelerate.state" not in sys.modules:
        return
    from toolkit.distributed.compat import process_state

    kind = getattr(process_state().get("distributed_type"), "value", "NO")
    if kind in ("DEEPSPEED", "FSDP"):
        name = {"DEEPSPEED": "ZeRO", "FSDP": "FSDP2"}[kind]
        raise Refusal(f"an earlier run in this process was sharded by {name}, which can be set up only once. {_INSTEAD}")


def make_way(choice: EngineChoice, on_cpu: bool) -> None:
    """Reset Accelerate's state where an earlier run in this process has settled another precision, device or engine.

    Raises:
        Refusal: that run is one of several ranks, whose process group can be made only once.
    """
    from accelerate.utils import DistributedType

    from toolkit.distributed.compat import forget_process_state, process_state, settled_precision

    process = process_state()
    if not process:
        return
    differs = {
        "device": (process["device"].type == "cpu") != on_cpu,
        "precision": settled_precision() not in (None, choice.mixed_precision),
        "engine": choice.name != "plain",
    }
    if not any(differs.values()):
        return
    if process["distributed_type"] != DistributedType.NO:
        what = " and another ".join(what for what, is_other in differs.items() if is_other)
        ranks = "which has several ranks"
        raise Refusal(f"this run needs another {what} than the one before it in this process, {ranks}. {_INSTEAD}")
    forget_process_state()


@contextlib.contextmanager
def settled_apart() -> Iterator[None]:
    """What the choice of the engine has read from the environment is out of it while the block runs.

    Accelerate (1.15) would take it up a second time, or refuse it. A second Accelerator of this process reads it again.
    """
    read = (
        "ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING",
        "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DEEPSPEED_CONFIG_FILE",
        "FSDP_ACTIVATION_CHECKPOINTING", "ACCELERATE_USE_CPU",
    )  # fmt: skip
    kept = {name: os.environ.pop(name) for name in read if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


# -- one engine each -------------------------------------------------------------------------------------------------


def _start_plain(
    choice: EngineChoice, on_cpu: bool, backend: str | None, timeout: timedelta, common: dict[str, Any]
) -> Accelerator:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    # Gradients lie in the buckets they travel in: one copy of them less.
    handlers = [_group(backend, timeout), DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    return Accelerator(cpu=on_cpu or None, kwargs_handlers=handlers if several else None, **common)


def _start_zero(
    choice: EngineChoice, on_cpu: bool, backend: str | None, timeout: timedelta, common: dict[str, Any]
) -> Accelerator:
    import torch

    from toolkit.distributed.compat import before_prepare, leave_communication_to_gloo

    _make_group_of_one()
    if on_cpu and torch.accelerator.is_available():
        raise Refusal("--use-cpu with ZeRO: DeepSpeed takes any GPU it finds. Put CUDA_VISIBLE_DEVICES='' before the command.")
    if on_cpu:
        leave_communication_to_gloo()
    _quiet_deepspeed()
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    check_known_keys(choice.deepspeed or {})
    plugin = DeepSpeedPlugin(hf_ds_config=choice.deepspeed, zero3_init_flag=False)
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[_group(backend or "nccl", timeout)], **common)
    if os.environ.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false").lower() == "true" and accelerator.is_main_process:
        say("zero3_init_flag of the accelerate config: each rank makes the model whole on the CPU all the same.")
    # While transformers has a config of stage 3 it makes models in shards, with other random weights than one process would.
    unset_hf_deepspeed_config()
    plugin.dschf = None

    def fit(model: nn.Module) -> None:
        count = sum(parameter.numel() for parameter in model.parameters())
        plugin.deepspeed_config.update(fit_buckets(plugin.deepspeed_config, count))

    before_prepare(accelerator, "deepspeed", fit)
    return accelerator


def _start_fsdp(
    choice: EngineChoice, on_cpu: bool, backend: str | None, timeout: timedelta, common: dict[str, Any]
) -> Accelerator:
    _make_group_of_one()
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    from toolkit.distributed.compat import before_prepare, layer_classes, settle_distributed_type

    assert choice.fsdp is not None
    offload = CPUOffloadPolicy(pin_memory=not on_cpu) if choice.offload == "parameters" else None
    half = choice.mixed_precision == "bf16"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=choice.fsdp.reshard_after_forward, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=list(choice.fsdp.wrapped_layers) or None, cpu_ram_efficient_loading=False,
        cpu_offload=offload, activation_checkpointing=False,  # the model's own, as under every engine
        # Gradients are added up in float32, as everywhere.
        mixed_precision_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else None,
    )  # fmt: skip
    # Shards that wait on the CPU are exchanged there.
    group = _group("cuda:nccl,cpu:gloo" if backend in (None, "nccl") else backend, timeout)
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=on_cpu or None, kwargs_handlers=[group], **common)
    if accelerator.distributed_type != DistributedType.FSDP:
        accelerator.state.fsdp_plugin = plugin
        settle_distributed_type(DistributedType.FSDP)

    def name_layers(model: nn.Module) -> None:
        """Accelerate (1.15, fsdp2_prepare_model) shards the input embedding by itself, and fails where one of the model's own
        layers (BERT's) has it inside and was sharded before."""
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        holding = {type(module).__name__ for module in model.modules() if embedding in module.modules()}
        plugin.transformer_cls_names_to_wrap = sorted(layer_classes(model) - holding)

    before_prepare(accelerator, "fsdp2", check_ties)
    if not choice.fsdp.wrapped_layers:
        before_prepare(accelerator, "fsdp2", name_layers)
    return accelerator


def check_ties(model: nn.Module) -> None:
    """Refuse what Accelerate (1.15) cannot put into one group of FSDP2: it does so with a head tied to the input embedding."""
    heads = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    embeddings = {part for head in heads if head is not None for part in head.modules()}  # PEFT may have wrapped them
    owners: dict[nn.Parameter, dict[nn.Module, str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, {})[module] = f"{path}.{name}"
    for found in owners.values():
        if len(found) > 1 and not found.keys() <= embeddings:
            raise Refusal(
                f"--fsdp: {' and '.join(found.values())} are one parameter, which FSDP2 would put into two groups. "
                "Take ZeRO (--zero-stage 3) or DDP."
            )


def _make_group_of_one() -> None:
    """The variables of a world of one rank, for an engine that needs a process group in any case."""
    if "RANK" in os.environ:
        return
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
    )


def _group(backend: str | None, timeout: timedelta) -> InitProcessGroupKwargs:
    from accelerate.utils import InitProcessGroupKwargs

    return InitProcessGroupKwargs(backend=backend, timeout=timeout)


def _quiet_deepspeed() -> None:
    """Warnings and errors only, without the lines about each file it compiles."""
    import logging

    # DeepSpeed (0.19) calls collectives by the names they had before torch 2.13.
    warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated.*", category=FutureWarning)
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    # Of every optimizer that DeepSpeed has no name for; those that are let through here are tested on its shards.
    logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())
