"""Weights that are not trained: held in the half precision that a run computes in, or given an average of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit.distributed.engines import engine_of
from toolkit.models.adapter_files import is_adapted
from toolkit.system.allocator import give_back_memory

if TYPE_CHECKING:
    from accelerate import Accelerator


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def half_of(accelerator: Accelerator) -> torch.dtype | None:
    """The type that autocast has in a run, None in full precision."""
    return HALVES.get(accelerator.mixed_precision)


def place_frozen(accelerator: Accelerator, model: nn.Module, half: torch.dtype | None) -> nn.Module:
    """A model that is only evaluated, a teacher or a reference, on the run's device; sharded where the engine shards weights.

    `half`: what autocast computes it in, None for its own type. A whole model's linear layers are held in it.
    """
    model.eval().requires_grad_(False)
    engine = engine_of(accelerator)
    if half is not None and not engine.shards_weights(accelerator) and not is_adapted(model):
        hold_in_half(model, half)
        for parameter in model.parameters():  # the others are copied, or the file that they are mapped from stays in memory
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.clone()
    return engine.place_frozen(accelerator, model)


def hold_in_half(model: nn.Module, half: torch.dtype) -> None:
    """Frozen float32 weights of linear layers in the type that autocast would cast them to in each forward pass: the same bits.

    Weights that anything else reads stay as they are, such as those of a head that is tied to the embedding.
    """
    linear = {layer.weight for layer in model.modules() if type(layer) is nn.Linear and layer.weight.dtype == torch.float32}
    others = {p for layer in model.modules() if type(layer) is not nn.Linear for p in layer.parameters(recurse=False)}
    for weight in linear - others:
        if not weight.requires_grad:
            weight.data = weight.data.to(half)
    give_back_memory()


@torch.no_grad()
def put_into(model: nn.Module, means: Mapping[str, torch.Tensor]) -> None:
    """Give a model averages of weights, by name, where its own have another type; else these are the averages themselves."""
    own = dict(model.named_parameters())
    for name, mean in means.items():
        if own[name].dtype != mean.dtype:
            own[name].copy_(mean)
