"""One embedding for each text, from an encoder's or a decoder's last hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from toolkit.config import ModelConfig, Refusal
from toolkit.distributed.engines import unwrapped
from toolkit.models.load import load_model
from toolkit.models.loaded import loaded, note_loaded

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def embed_texts(model: nn.Module, micro_batch: dict[str, Any], *, pooling: str = "mean") -> torch.Tensor:
    """Embeddings `[texts, hidden]` of padded texts, not normalized, in float32 (float64 stays).

    Args:
        micro_batch: `input_ids` and `attention_mask` `[texts, longest]`, padded on the right; what else is in it is not read.
        pooling: the mean over a text's tokens, or the state of its first (cls) or last one.
    """
    inputs = {name: micro_batch[name] for name in ("input_ids", "attention_mask")}
    states = model(**inputs, **({} if _is_encoder(model) else {"use_cache": False})).last_hidden_state
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    return _POOLED[pooling](states, micro_batch["attention_mask"])


def load_encoder(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model below its heads, as `load_model` loads it, without gradients for a `pooler`, which no embedding passes through.

    Ranks that wait for the gradient of each parameter would wait for it.

    Raises:
        Refusal: what `load_model` refuses, and an encoder-decoder.
    """
    model = load_model("AutoModel", config, tokenizer)
    if model.config.is_encoder_decoder:
        raise Refusal(f"--model {config.model}: an encoder-decoder, which has no one embedding. Name an encoder or a decoder.")
    pooler = getattr(model, "pooler", None)
    if pooler is not None:
        pooler.requires_grad_(False)
        note_loaded(model, replace(loaded(model), new_modules=tuple(
            name for name in loaded(model).new_modules if not name.startswith("pooler")
        )))  # fmt: skip
    return model


def _is_encoder(model: nn.Module) -> bool:
    """Whether its forward keeps no keys and values: a decoder's would, for texts that nobody continues."""
    return getattr(unwrapped(model).config, "use_cache", None) is None


def _mean(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask.to(states.dtype)[..., None]
    return (states * weights).sum(1) / weights.sum(1)


def _last(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]


_POOLED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": _mean, "cls": lambda states, mask: states[:, 0], "last": _last,
}  # fmt: skip
