"""A second model that is only evaluated: a teacher, a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit.distributed.engines import engine_of
from toolkit.models.adapter_files import is_adapted

if TYPE_CHECKING:
    from accelerate import Accelerator


def half_of(accelerator: Accelerator) -> torch.dtype | None:
    """The type that autocast has in a run, None in full precision."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)


def place_frozen(accelerator: Accelerator, model: nn.Module, half: torch.dtype | None) -> nn.Module:
    """The model, frozen, in evaluation mode, on the run's device; sharded where the engine shards weights.

    `half`: what autocast computes it in, None for its own type. Where the model is whole, the float32 weights of its linear
    layers are held in that type: autocast would cast them to the same numbers in each forward pass.
    """
    model.eval().requires_grad_(False)
    engine = engine_of(accelerator)
    if half is not None and not engine.shards_weights(accelerator) and not is_adapted(model):
        _hold_in_half(model, half)
    return engine.place_frozen(accelerator, model)


def _hold_in_half(model: nn.Module, half: torch.dtype) -> None:
    linear = {layer.weight for layer in model.modules() if type(layer) is nn.Linear and layer.weight.dtype == torch.float32}
    others = {p for layer in model.modules() if type(layer) is not nn.Linear for p in layer.parameters(recurse=False)}
    for parameter in model.parameters():  # the others are copied, or the file that they are mapped from stays in memory
        parameter.data = parameter.data.to(half) if parameter in linear - others else parameter.data.clone()
