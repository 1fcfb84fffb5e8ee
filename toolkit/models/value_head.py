"""PPO's value head: one number for each token, read from the hidden states that the output head reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit.config import Refusal
from toolkit.models.adapter_files import without_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "value_head"  # of the model's module, and so the beginning of its parameter's name in checkpoints


def add_value_head(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself with a `value_head`, a trained linear layer from its last hidden states to one number, at first 0.

    After `add_adapter` and before the optimizer is made: checkpoints hold it, the model directory does not.
    `logps_and_values` reads it.

    Raises:
        Refusal: the model has no output head, whose input a value is read from.
    """
    output = without_adapter(model).get_output_embeddings()
    if output is None:
        raise Refusal(f"{type(without_adapter(model)).__name__} has no output head of its own: take another model for PPO.")
    trained = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    head = nn.Linear(output.weight.shape[-1], 1, bias=False, dtype=trained.dtype, device=trained.device)
    nn.init.zeros_(head.weight)
    setattr(model, NAME, head)
    return model


def value_head_of(model: nn.Module) -> nn.Linear:
    """The value head of a model without wrappers."""
    head = getattr(model, NAME, None)
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no value head: call add_value_head first")
    return head


def values_at(head: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """The values at some hidden states `[P, width]`, `[P]`, float32 or wider; computed in the head's own precision."""
    with torch.autocast(rows.device.type, enabled=False):
        values = head(rows.to(head.weight.dtype))[:, 0]
    return values.to(torch.promote_types(values.dtype, torch.float32))


def is_of_value_head(name: str) -> bool:
    """Whether a parameter of this name is the value head's."""
    return name.startswith(f"{NAME}.")
