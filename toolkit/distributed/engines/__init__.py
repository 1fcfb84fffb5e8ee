"""What trains a model over several devices: plain data parallelism, DeepSpeed ZeRO, or FSDP2.

`choice` decides which one, `plain`, `zero` and `fsdp` are how each does a step and where it keeps what, `pieces` brings a
sharded tensor together and takes it apart. Nothing here imports a heavy library until an engine is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from toolkit.distributed.engines.engine import Engine


def engine_of(accelerator: Accelerator) -> Engine:
    """The engine of a prepared model."""
    kind = str(accelerator.distributed_type.value)
    if kind == "DEEPSPEED":
        from toolkit.distributed.engines.zero import ENGINE
    elif kind == "FSDP":
        from toolkit.distributed.engines.fsdp import ENGINE
    else:
        from toolkit.distributed.engines.plain import ENGINE
    return ENGINE


def settled_kind() -> str | None:
    """Accelerate's name of how this process's Accelerator is distributed, such as FSDP; None before it is made."""
    from toolkit.distributed.compat import process_state

    return getattr(process_state().get("distributed_type"), "value", None)


def element_count(parameter: nn.Parameter) -> int:
    """Numbers in a whole parameter: ZeRO-3 leaves an empty tensor where it was."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def unwrapped(model: nn.Module) -> Any:
    """The model inside DDP's, DeepSpeed's or torch.compile's wrapper: transformers' or peft's class.

    Accelerate's own unwrap_model (1.15) imports DeepSpeed to look for it: three seconds in every run where it is installed.
    """
    from toolkit.distributed.compat import is_compiled_whole, original_of

    while True:
        if type(model).__name__ in ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine"):
            model = model.module  # type: ignore[assignment]
        elif is_compiled_whole(model):
            model = original_of(model)
        else:
            return model
