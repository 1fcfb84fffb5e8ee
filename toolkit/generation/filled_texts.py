"""Texts that a masked-diffusion model writes: behind a prompt, or in the gaps that a text marks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from toolkit.config import Refusal
from toolkit.data.tokenize.documents import build_encoder
from toolkit.distributed.engines import engine_of, unwrapped
from toolkit.distributed.ranks import from_all
from toolkit.generation.continued_texts import stop_ids
from toolkit.generation.denoising import DenoisingSettings, denoise
from toolkit.generation.random_numbers import completion_key
from toolkit.models.diffusion import diffusion_of
from toolkit.models.shapes import positions_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TEXTS_AT_ONCE = 16  # in one forward pass


def fill_texts(
    accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *,
    max_new_tokens: int, steps: int | None = None, block_length: int = 32, temperature: float = 0.0, seed: int = 0,
) -> list[str]:  # fmt: skip
    """`fill_text` of each text, dealt to the ranks; the same list on every rank. A collective.

    What is written is a function of the weights, the text, its place in the list and the seed.
    """
    inner, rank, ranks = unwrapped(model), accelerator.process_index, accelerator.num_processes
    shards = engine_of(accelerator).shards  # then all ranks take part in each forward pass
    mine = list(range(len(texts)) if shards else range(rank, len(texts), ranks))

    def written() -> list[str]:
        with accelerator.autocast():
            return [
                text
                for start in range(0, len(mine), TEXTS_AT_ONCE)
                for text in _filled(
                    inner, tokenizer, [texts[place] for place in mine[start : start + TEXTS_AT_ONCE]],
                    [completion_key(seed, 0, place, 0) for place in mine[start : start + TEXTS_AT_ONCE]], max_new_tokens, steps,
                    block_length, temperature,
                )
            ]  # fmt: skip

    by_rank = from_all(accelerator, written)
    return by_rank[0] if shards else [by_rank[place % ranks][place // ranks] for place in range(len(texts))]


def fill_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, *, max_new_tokens: int, steps: int | None = None,
    block_length: int = 32, temperature: float = 0.0, seed: int = 0,
) -> str:  # fmt: skip
    """What the model writes behind a text, up to its end; or the whole text with its gaps filled, where it has mask tokens.

    A mask token with a number behind it, as `<|mask|>*16`, is that number of tokens.

    Raises:
        Refusal: no room within the model's positions; a gap of no tokens, or one at a text's very beginning that the model
            can't predict.
    """
    key = completion_key(seed, 0, 0, 0)
    return _filled(model, tokenizer, [text], [key], max_new_tokens, steps, block_length, temperature)[0]


def _filled(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], seeds: list[int], max_new_tokens: int,
    steps: int | None, block_length: int, temperature: float,
) -> list[str]:  # fmt: skip
    diffusion, encoder = diffusion_of(model), build_encoder(tokenizer)
    assert diffusion is not None
    longest = positions_of(model.config) or 1 << 30
    mask, name = diffusion.mask_token_id, str(tokenizer.convert_ids_to_tokens(diffusion.mask_token_id))
    repeated = re.compile(re.escape(name) + r"\*(\d{1,6})")
    rows, firsts = [], list[int | None]()
    none = next((found[0] for text in texts for found in repeated.finditer(text) if not int(found[1])), None)
    if none is not None:
        raise Refusal(f"{none}: means no token. Give the number of tokens that are missing there, from 1.")
    for encoding in encoder.encode([repeated.sub(lambda found: name * int(found[1]), text) for text in texts]):
        ids = encoder.add_start(encoding.ids)
        if mask in ids:
            firsts.append(None)
            rows.append(ids)
        else:
            ids = ids or [tokenizer.eos_token_id or 0]
            firsts.append(len(ids))
            rows.append([*ids, *[mask] * min(max_new_tokens, longest - len(ids))])
        if len(rows[-1]) > longest or mask not in rows[-1]:
            raise Refusal(f"The text has {len(rows[-1]):,} tokens, and the model {longest:,} positions: shorten it.")
        if diffusion.shift_logits and rows[-1][0] == mask:
            raise Refusal(f"The text begins with {name}, and this model predicts from the token before: begin with a word.")
    ends = tuple(stop_ids(model, tokenizer))
    settings = DenoisingSettings(steps, block_length, temperature, ends)
    filled = denoise(model, rows, seeds, diffusion, settings if None not in firsts else settings._replace(end_token_ids=()))
    return [
        str(tokenizer.decode(ids, skip_special_tokens=True)) if first is None else _decoded(tokenizer, ids[first:], ends)
        for ids, first in zip(filled, firsts, strict=True)
    ]


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int], ends: tuple[int, ...]) -> str:
    end = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return str(tokenizer.decode(ids[:end], skip_special_tokens=True))
