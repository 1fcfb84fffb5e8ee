"""How pairs, or single answers, are laid out for a model: the fastest exact way, with a message where it is not the fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from toolkit.config import Refusal
from toolkit.data.loading.collate_pairs import collate_pairs
from toolkit.data.loading.layouts import LAYOUTS
from toolkit.distributed.ranks import say_once
from toolkit.losses.answer_logps import answer_token_logps
from toolkit.models.attention.interface import DOCUMENTS, FLEX
from toolkit.models.attention.packable import PROVEN, NotPackable, check_no_contamination, check_packable
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
    if pair_layout != "auto":
        problem = _problem(model, pair_layout)
        if problem is not None:
            raise Refusal(f"--pair-layout {pair_layout}: {problem}. Take --pair-layout auto.")
        return pair_layout
    problems = {}
    for layout in LAYOUTS:
        problems[layout] = _problem(model, layout)
        if problems[layout] is None:
            break
    if layout != "shared":
        say_once(f"pairs are {layout}: {problems['shared']}")
    return layout


def choose_answer_layout(model: PreTrainedModel) -> str:
    """The layout of `collate_answers` for a model: `packed`, or `padded`, and why, where packed rows would not be exact."""
    problem = _problem(model, "packed")
    if problem is not None:
        say_once(f"answers are padded: {problem}")
    return "packed" if problem is None else "padded"


def _problem(model: PreTrainedModel, layout: str) -> str | None:
    """Why a layout would not be exact, or None."""
    if layout == "padded":
        return None
    attention = attention_of(model.config)
    if attention == "flash_attention_2" and layout == "shared":
        return f"attention {attention!r} knows no prompts that are shared"
    if attention not in (DOCUMENTS, FLEX, "flash_attention_2"):
        try:
            check_packable(model.config, None)
        except NotPackable as refusal:
            return f"{refusal.who} {refusal.reason}"
        return f"attention {attention!r} knows no documents in a row"
    if model.config.model_type not in PROVEN:
        try:
            with uncompiled(model):
                check_no_contamination(model)
        except NotPackable as refusal:
            return f"{refusal.who} {refusal.reason}"
    if layout == "packed":
        return None
    rate = highest_dropout(model)
    if rate:
        return f"with a dropout of {rate:g} a prompt has another mask for each of its answers"
    if model.config.model_type not in PROVEN and not _shares_exactly(model):
        return f"model type {model.config.model_type!r} gives an answer another result behind a shared prompt"
    return None


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
