"""What loading found out about a model, for those who continue with it: kept next to the model, not on it."""

from __future__ import annotations

import dataclasses
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Loaded:
    """`adapter`: the directory of the adapter that the settings named, whose base was loaded. `new_modules`: full names of the
    modules with new, random weights, which an adapter's training takes along. `initial_adapter`: the first A and B where they
    were taken out of the frozen weights (PiSSA, OLoRA).
    """

    seed: int = 42
    revision: str | None = None
    adapter: str | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    new_modules: tuple[str, ...] = ()
    initial_adapter: dict[str, torch.Tensor] = field(default_factory=dict)


_LOADED: weakref.WeakKeyDictionary[nn.Module, Loaded] = weakref.WeakKeyDictionary()


def loaded(model: nn.Module) -> Loaded:
    """What is known of a model that `load_model` or `add_adapter` made; of any other, that nothing is new in it."""
    return _LOADED.get(model, Loaded())


def note_loaded(model: nn.Module, known: Loaded, **more: Any) -> None:
    """Keep what is known of a model as long as it lives."""
    _LOADED[model] = dataclasses.replace(known, **more)
