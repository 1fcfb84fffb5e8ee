"""Trained layers next to a model's own, in its checkpoints and not in its model directory: a value head, and projections.

PPO's value head makes one number of each token, from the hidden states that the output head reads. Projections bring a
student's hidden states to the width of its teacher's, for losses that compare the two.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.config import Refusal
from toolkit.data.loading.batch import precise
from toolkit.models.adapter_files import without_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Names of modules of the model, with which the names of their parameters in checkpoints begin.
VALUE_HEAD, PROJECTIONS = "value_head", "teacher_projections"


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
    setattr(model, VALUE_HEAD, head)
    return model


def value_head_of(model: nn.Module) -> nn.Linear:
    """The value head of a model without wrappers."""
    head = getattr(model, VALUE_HEAD, None)
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no value head: call add_value_head first")
    return head


def values_at(head: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """The values at some hidden states `[P, width]`, `[P]`, float32 or wider; computed in the head's own precision."""
    with torch.autocast(rows.device.type, enabled=False):
        return precise(head(rows.to(head.weight.dtype))[:, 0])


def add_projections(model: PreTrainedModel, layers: Collection[int], width: int, seed: int) -> PreTrainedModel:
    """The model itself, whose `hidden_states` of some layers are projected to `width` wherever it returns them.

    A trained linear layer without bias for each of `layers`, counted as transformers' `hidden_states`: 0 are the embeddings.
    They are applied within the forward pass, where an engine that shards weights has them together. Before the optimizer is
    made: checkpoints hold them, the model directory does not. First weights are a function of the seed alone.
    """
    trained = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    own = int(model.config.get_text_config().hidden_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = nn.ModuleDict({str(layer): nn.Linear(own, width, bias=False) for layer in sorted(layers)})
    setattr(model, PROJECTIONS, made.to(trained.device, trained.dtype))
    model.register_forward_hook(_project)
    return model


def _project(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if output.get("hidden_states") is not None:
        projections: nn.ModuleDict = getattr(model, PROJECTIONS)
        states = list(output.hidden_states)
        for layer, projection in projections.items():
            states[int(layer)] = projection(states[int(layer)].to(projection.weight.dtype))
        output.hidden_states = tuple(states)
    return output


def is_of_added_head(name: str) -> bool:
    """Whether a parameter of this name is that of a value head or a projection."""
    return name.startswith((f"{VALUE_HEAD}.", f"{PROJECTIONS}."))
