"""One embedding for each text, from an encoder's or a decoder's last hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from toolkit.config import ModelConfig, Refusal
from toolkit.data.loading.batch import MicroBatch, precise
from toolkit.distributed.engines import unwrapped
from toolkit.models.attention.interface import DOCUMENTS, FLEX
from toolkit.models.attention.packable import NotPackable, check_packable
from toolkit.models.compat import attention_of
from toolkit.models.load import load_model
from toolkit.models.loaded import loaded, note_loaded

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def embed_texts(model: nn.Module, micro_batch: MicroBatch, *, pooling: str = "mean") -> torch.Tensor:
    """Embeddings `[texts, hidden]` of padded texts, not normalized, in float32 (float64 stays).

    Args:
        micro_batch: in either layout of `collate_text_groups`; what else is in it than a model's inputs is not read.
        pooling: the mean over a text's tokens, or the state of its first (cls) or last one.
    """
    inputs = {name: micro_batch[name] for name in _INPUTS if name in micro_batch}
    states = precise(model(**inputs, **({} if _is_encoder(model) else {"use_cache": False})).last_hidden_state)
    if "cu_seq_lens_q" in micro_batch:
        return _POOLED_IN_A_ROW[pooling](states[0], micro_batch["cu_seq_lens_q"].long())
    return _POOLED[pooling](states, micro_batch["attention_mask"])


def choose_text_layout(model: PreTrainedModel) -> str:
    """The layout of `collate_text_groups` for a model that `load_encoder` loaded, with its adapter, not prepared yet.

    `packed` where its attention keeps the texts of a row apart exactly, else `padded`.
    """
    try:
        check_packable(model.config)
    except NotPackable:
        return "padded"
    return "packed" if attention_of(model.config) in (DOCUMENTS, FLEX) else "padded"


def load_encoder(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model below its heads, as `load_model` loads it, without gradients for a `pooler`, which no embedding passes through.

    Ranks that wait for the gradient of each parameter would wait for it.

    Raises:
        Refusal: what `load_model` refuses, and an encoder-decoder.
    """
    model = load_model("AutoModel", config, tokenizer, packed=None)
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


_POOLED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": _mean, "cls": lambda states, mask: states[:, 0],
    "last": lambda states, mask: states[torch.arange(len(states), device=states.device), mask.sum(1) - 1],
}  # fmt: skip


_POOLED_IN_A_ROW: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": lambda states, bounds: torch.segment_reduce(states, "mean", offsets=bounds, axis=0),
    "cls": lambda states, bounds: states[bounds[:-1]],
    "last": lambda states, bounds: states[bounds[1:] - 1],
}
_INPUTS = (
    "input_ids", "attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
)  # fmt: skip
