"""How pairs, or single answers, are laid out for a model: the fastest exact way, with a message where it is not the fastest."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from toolkit.data.loading.collate_pairs import collate_pairs
from toolkit.distributed.ranks import say_once
from toolkit.losses.answer_logps import answer_token_logps
from toolkit.models.attention.interface import DOCUMENTS, FLEX
from toolkit.models.attention.packable import PROVEN, NotPackable, check_no_contamination, check_packable, first_exact
from toolkit.models.compat import attention_of
from toolkit.models.layers import uncompiled
from toolkit.models.shapes import highest_dropout
from toolkit.system.evaluation_mode import evaluation_mode
from toolkit.training.step import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def choose_pair_layout(model: PreTrainedModel, pair_layout: str = "auto") -> str:
    """The layout of `collate_pairs` for a model, with its adapter, that is not prepared yet.

    `shared` encodes a prompt once for both answers. That is not what each answer has alone under dropout, whose mask would
    be one for both; then `packed`, which has no padding either. `padded` is for models whose packed rows would not be exact.
    Prints why where it takes another one than `shared`.

    Raises:
        Refusal: `pair_layout` is one that would not be exact.
    """
    layout, problems = first_exact(("shared", "packed"), partial(_check, model), pair_layout, "--pair-layout")
    if problems:
        say_once(f"pairs are {layout}: {problems[0].what}")
    return layout


def choose_answer_layout(model: PreTrainedModel) -> str:
    """The layout of `collate_answers` for a model: `packed`, or `padded`, and why, where packed rows would not be exact."""
    layout, problems = first_exact(("packed",), partial(_check, model), "auto", "")
    if problems:
        say_once(f"answers are padded: {problems[0].what}")
    return layout


def _check(model: PreTrainedModel, layout: str) -> None:
    """Raise NotPackable, with the reason, where a layout would not be exact."""
    attention, model_type = attention_of(model.config), model.config.model_type
    if attention == "flash_attention_2" and layout == "shared":
        raise NotPackable(f"attention {attention!r}", "supports no prompts that are shared")
    if attention not in (DOCUMENTS, FLEX, "flash_attention_2"):
        check_packable(model.config)
        raise NotPackable(f"attention {attention!r}", "supports no documents in a row")
    if model_type not in PROVEN:
        with uncompiled(model):
            check_no_contamination(model)
    if layout == "packed":
        return
    rate = highest_dropout(model)
    if rate:
        raise NotPackable(f"with a dropout of {rate:g}", "a prompt has another mask for each of its answers")
    if model_type not in PROVEN and not _shares_exactly(model):
        raise NotPackable(f"model type {model_type!r}", "gives an answer another result behind a shared prompt")


def _shares_exactly(model: PreTrainedModel) -> bool:
    """Two small pairs through the model in both layouts: equal up to rounding."""
    vocabulary = model.config.get_text_config().vocab_size
    sizes = [(3, 4, 5), (6, 2, 1)]
    tokens = np.random.default_rng(0).integers(0, vocabulary, size=(len(sizes), 12))
    pairs = [
        {"input_ids": row[: p + c + r], "prompt_tokens": p, "chosen_tokens": c, "rejected_tokens": r, "pair": 0}
        for row, (p, c, r) in zip(tokens, sizes, strict=True)
    ]
    device = next(model.parameters()).device
    found = []
    with evaluation_mode(model), uncompiled(model):
        for layout in ("shared", "packed"):
            found.append(answer_token_logps(model, to_device(collate_pairs(pairs, layout=layout), device)))
    rounding = 0.1 if next(model.parameters()).dtype in (torch.bfloat16, torch.float16) else 1e-4
    return bool((found[0] - found[1]).abs().max() <= rounding * found[1].abs().max())
