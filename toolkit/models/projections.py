"""Trained projections from a student's hidden states to the width of its teacher's, for losses that compare the two."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "teacher_projections"  # of the model's module, and so the beginning of its parameters' names in checkpoints


def add_projections(model: PreTrainedModel, layers: Collection[int], width: int, seed: int) -> PreTrainedModel:
    """The model itself, whose `hidden_states` of some layers are projected to `width` wherever it is asked for them.

    A trained linear layer without bias for each of `layers`, counted as transformers' `hidden_states`: 0 are the embeddings.
    They are applied within the forward pass, where an engine that shards weights has them together. Before the optimizer is
    made: checkpoints hold them, the model directory does not. First weights are a function of the seed alone.
    """
    trained = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = nn.ModuleDict({str(layer): nn.Linear(_width_of(model), width, bias=False) for layer in sorted(layers)})
    setattr(model, NAME, made.to(trained.device, trained.dtype))
    model.register_forward_hook(_project)
    return model


def _width_of(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().hidden_size)


def _project(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if output.get("hidden_states") is not None:
        projections: nn.ModuleDict = getattr(model, NAME)
        states = list(output.hidden_states)
        for layer, projection in projections.items():
            states[int(layer)] = projection(states[int(layer)].to(projection.weight.dtype))
        output.hidden_states = tuple(states)
    return output


def is_of_projections(name: str) -> bool:
    """Whether a parameter of this name is a projection's."""
    return name.startswith(f"{NAME}.")
