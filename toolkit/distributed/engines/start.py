"""The Accelerator of each engine, on GPUs and on CPU ranks."""

import contextlib
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from toolkit.config import Refusal
from toolkit.config.reading import values_of
from toolkit.config.setting import nearest
from toolkit.distributed.engines.choice import EngineChoice
from toolkit.distributed.engines.deepspeed_config import fit_buckets
from toolkit.distributed.engines.deepspeed_file import KNOWN_KEYS
from toolkit.system.console import say
from toolkit.system.network import free_port

# Optimizers that are wrong, or unproven, on shards of a parameter, and why.
_UNSHARDED_ONLY = {
    "adafactor": "its second moment is kept by rows and columns of a whole matrix",
    "adagrad": "torch makes its state before the parameters are sharded",
    "adamw_bnb_8bit": "bitsandbytes' states in blocks are not proven on shards",
    "lion_8bit": "bitsandbytes' states in blocks are not proven on shards",
    "lion_32bit": "bitsandbytes' optimizers are not proven on shards",
}


def check_engine(choice: EngineChoice, config: Any, *, in_code: bool = False) -> None:
    """Refuse an engine that isn't installed, and an optimizer, or a type of weights, that it would make wrong.

    `in_code`: the recipe itself asks for it, so that no setting can ask for another one.
    """
    if choice.name == "zero" and importlib.util.find_spec("deepspeed") is None:
        instead = "" if in_code else " Or shard with --fsdp."
        raise Refusal(f"{engine_name(choice)} needs the library DeepSpeed: pip install deepspeed.{instead}")
    optim = values_of(config).get("optim", "")  # a check is no use of it: an edited recipe may build its own
    reason = _UNSHARDED_ONLY.get(optim)
    if choice.name != "none" and reason:
        raise Refusal(f"--optim {optim} with {engine_name(choice)}: {reason}. Take --optim adamw_torch, or muon.")
    _check_nvme(choice, config)
    dtype = getattr(config, "dtype", "float32")
    if choice.name == "zero" and dtype != "float32" and choice.mixed_precision == "no":
        raise Refusal(
            f"--dtype {dtype} with {engine_name(choice)}: DeepSpeed keeps float32 weights beside those it computes with. Take "
            "--bf16 and --dtype float32: the weights of forward and backward are bfloat16 then."
        )


def _check_nvme(choice: EngineChoice, config: Any) -> None:
    """Refuse what needs the optimizer's state in memory when it is on a disk between the steps."""
    sections = (choice.deepspeed or {}).get("zero_optimization", {})
    if "nvme" not in [sections.get(part, {}).get("device") for part in ("offload_optimizer", "offload_param")]:
        return
    for setting, value, instead in (
        ("save_strategy", "no", "--save-strategy no"), ("load_best_model_at_end", False, "--no-load-best-model-at-end"),
        ("optim", "adamw_torch", "--optim adamw_torch"),
    ):  # fmt: skip
        if values_of(config).get(setting, value) != value:
            raise Refusal(
                f"offload to nvme: checkpoints, and optimizers of whole matrices, need the state in memory. Take {instead}, or "
                "the device cpu."
            )


def engine_name(choice: EngineChoice) -> str:
    """As it's said to people: "ZeRO-2", "FSDP2", and "plain" for one device and for data parallelism."""
    return {"zero": f"ZeRO-{choice.zero_stage}", "fsdp": "FSDP2"}.get(choice.name, "plain")


def engine_label(choice: EngineChoice) -> str:
    """The engine, and what waits on the CPU: "ZeRO-2, optimizer on the CPU"."""
    return engine_name(choice) + (f", {choice.offload} on the CPU" if choice.offload != "none" else "")


def make_group_of_one() -> None:
    """The variables of a world of one rank, for an engine that needs a process group in any case."""
    if "RANK" in os.environ:
        return
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
    )


def start_plain(choice: EngineChoice, on_cpu: bool, backend: str | None, timeout: Any, common: dict[str, Any]) -> Any:
    """One device, or data parallelism."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    # Gradients lie in the buckets they travel in: one copy of them less.
    handlers = [_group(backend, timeout), DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    return Accelerator(cpu=on_cpu or None, kwargs_handlers=handlers if several else None, **common)


def start_zero(choice: EngineChoice, on_cpu: bool, backend: str | None, timeout: Any, common: dict[str, Any]) -> Any:
    """DeepSpeed."""
    import torch

    make_group_of_one()
    if on_cpu and torch.accelerator.is_available():
        raise Refusal("--use-cpu with ZeRO: DeepSpeed takes the GPU that is there. Put CUDA_VISIBLE_DEVICES='' before it all.")
    if on_cpu:
        _leave_communication_to_gloo()
    _quiet_deepspeed()
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    check_known_keys(choice.deepspeed or {})
    plugin = DeepSpeedPlugin(hf_ds_config=choice.deepspeed, zero3_init_flag=False)
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[_group(backend or "nccl", timeout)], **common)
    if os.environ.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false").lower() == "true" and accelerator.is_main_process:
        say("zero3_init_flag of the accelerate config: each rank makes the model whole on the CPU all the same.")
    # While transformers knows of stage 3 it makes models in shards, with other random weights than one process would.
    unset_hf_deepspeed_config()
    plugin.dschf = None
    accelerator._prepare_deepspeed = _with_fitting_buckets(accelerator._prepare_deepspeed, plugin)
    return accelerator


def check_known_keys(written: Mapping[str, Any]) -> None:
    """Refuse keys that DeepSpeed doesn't have: at the top it takes them in silence, below with a traceback."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    in_zero = {*fields, *(str(field.alias) for field in fields.values() if field.alias)}
    for place, keys, known in (("", written, KNOWN_KEYS), ("zero_optimization.", written["zero_optimization"], in_zero)):
        for key in keys:
            if key not in known:
                near = nearest(key, known)
                hint = f" Did you mean {near}?" if near else ""
                raise Refusal(f"DeepSpeed configuration: {place}{key} is not a key of DeepSpeed's.{hint}")


def start_fsdp(choice: EngineChoice, on_cpu: bool, backend: str | None, timeout: Any, common: dict[str, Any]) -> Any:
    """FSDP2."""
    make_group_of_one()
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

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
        # Accelerate (1.15, state.py) takes FSDP for accelerators only. torch shards over CPU ranks as well.
        accelerator.state.fsdp_plugin = plugin
        for state in (AcceleratorState, PartialState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
    if not choice.fsdp.wrapped_layers:
        accelerator._prepare_fsdp2 = _with_layers_of_the_model(accelerator._prepare_fsdp2, plugin)
    return accelerator


def check_backend(backend: str, on_cpu: bool) -> str | None:
    """The backend as torch knows it, None where Accelerate's own choice is right.

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


START: dict[str, Callable[..., Any]] = {"none": start_plain, "zero": start_zero, "fsdp": start_fsdp}


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


def _group(backend: str | None, timeout: Any) -> Any:
    from accelerate.utils import InitProcessGroupKwargs

    return InitProcessGroupKwargs(backend=backend, timeout=timeout)


def _with_fitting_buckets(prepare: Callable[..., Any], plugin: Any) -> Callable[..., Any]:
    """`accelerator.prepare` for DeepSpeed, once the size of the model is known."""

    def sized(*objects: Any) -> Any:
        models = [each for each in objects if hasattr(each, "parameters")]
        if models:
            count = sum(parameter.numel() for parameter in models[0].parameters())
            plugin.deepspeed_config.update(fit_buckets(plugin.deepspeed_config, count))
        return prepare(*objects)

    return sized


def _with_layers_of_the_model(prepare: Callable[..., Any], plugin: Any) -> Callable[..., Any]:
    """`accelerator.prepare` for FSDP2, with the classes of layers that are sharded one by one.

    Accelerate (1.15, fsdp2_prepare_model) shards the input embedding by itself, and fails where one of the model's own list
    (BERT's) holds it and has been sharded before.
    """

    def named(*objects: Any) -> Any:
        for model in (each for each in objects if hasattr(each, "_no_split_modules")):
            embedding = model.get_input_embeddings()
            holding = {type(module).__name__ for module in model.modules() if embedding in module.modules()}
            plugin.transformer_cls_names_to_wrap = sorted(set(model._no_split_modules or ()) - holding)
        return prepare(*objects)

    return named


def _leave_communication_to_gloo() -> None:
    """Without DeepSpeed's (0.19) own exchange between CPU ranks, which it compiles at the first start.

    That takes a compiler and half a minute, and a process that is killed meanwhile leaves torch's lock (torch.utils.file_baton)
    behind, for which every later run waits for ever.
    """
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None


def _quiet_deepspeed() -> None:
    """Warnings and errors only, without the lines about each file it compiles."""
    import logging

    # DeepSpeed (0.19) calls collectives by the names they had before torch 2.13.
    warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated.*", category=FutureWarning)
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    # Said of every optimizer that DeepSpeed doesn't know by name; those that are let through here are tested on its shards.
    logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())
