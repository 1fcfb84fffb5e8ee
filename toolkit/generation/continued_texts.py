"""Texts continued by a model that trains, dealt to the ranks: samples, and answers to held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from toolkit.data.tokenize.documents import build_encoder
from toolkit.data.tokenize.masks import turn_end_ids
from toolkit.distributed.engines import engine_of, unwrapped
from toolkit.distributed.ranks import from_all, largest
from toolkit.generation.distribution import SamplingSettings
from toolkit.generation.random_numbers import completion_key
from toolkit.generation.sampler import Completion, OnGroup, sample_groups
from toolkit.models.shapes import positions_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def continue_texts(
    accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *,
    max_new_tokens: int, temperature: float = 0.0, seed: int = 0, on_text: OnGroup | None = None,
) -> list[str]:  # fmt: skip
    """What the model writes behind each text, up to the end of its turn; the same list on every rank. A collective.

    A continuation is a function of the weights, the text, its place in the list and the seed. A text that leaves no room within
    the model's positions keeps its end; one without any token begins like a text behind another one's end.

    Args:
        max_new_tokens: the longest continuation; less where the model has no more positions.
        temperature: 0 is greedy decoding.
        on_text: called with the number, on its rank, and the completion of each text as soon as it is whole.
    """
    inner, encoder = unwrapped(model), build_encoder(tokenizer)
    longest = positions_of(inner.config) or 1 << 20
    max_new_tokens = min(max_new_tokens, longest - 1)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    mine = range(rank, len(texts), ranks)
    starts = [encoder.add_start(encoding.ids) for encoding in encoder.encode([texts[place] for place in mine])]
    ids = [start[-(longest - max_new_tokens) :] or [tokenizer.eos_token_id or 0] for start in starts]
    keys = np.array([[completion_key(seed, 0, place, 0)] for place in mine], dtype=np.uint64).reshape(len(mine), 1)
    settings = SamplingSettings(
        max_new_tokens=max_new_tokens, temperature=temperature, eos_token_ids=tuple(stop_ids(inner, tokenizer))
    )

    def written() -> list[str]:
        groups = sample_on_rank(accelerator, model, ids, keys, settings, tokenizer, on_text)
        return list(tokenizer.batch_decode([group[0].tokens for group in groups], skip_special_tokens=True))

    by_rank = from_all(accelerator, written)
    return [by_rank[place % ranks][place // ranks] for place in range(len(texts))]


def sample_on_rank(
    accelerator: Accelerator, model: nn.Module, prompts: Sequence[Sequence[int]], keys: np.ndarray, settings: SamplingSettings,
    tokenizer: PreTrainedTokenizerBase | None = None, on_group: OnGroup | None = None,
    limits: Sequence[int] | None = None,
) -> list[list[Completion]]:  # fmt: skip
    """`sample_groups` of this rank's prompts, with a model that Accelerate has prepared, in its precision.

    Where parameters are sharded, all ranks must call it.
    """
    together = (lambda more: bool(largest(accelerator, int(more)))) if engine_of(accelerator).shards else None
    with torch.no_grad(), accelerator.autocast():
        return sample_groups(unwrapped(model), prompts, keys, settings, tokenizer, together, on_group=on_group, limits=limits)


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a text: the template's ends of a turn, the tokenizer's end of text, and the model's own."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)  # encoders have none
    own = own if isinstance(own, list) else [own]
    return list(dict.fromkeys([*turn_end_ids(tokenizer), *(token for token in own if token is not None)]))
