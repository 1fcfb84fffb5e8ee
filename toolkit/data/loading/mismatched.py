"""Answers put behind prompts that they don't belong to: what KTO estimates its divergence on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from toolkit.config import Refusal
from toolkit.data.loading.columns import column
from toolkit.data.loading.order import epoch_order

if TYPE_CHECKING:
    from datasets import Dataset


def mismatch_answers(tokenized: Mapping[str, Dataset], max_length: int) -> dict[str, Dataset]:
    """The splits of `tokenize_for_unpaired` with an answer of another prompt named in each row.

    `mismatched_row` is the row of the same split whose answer it is, `mismatched_tokens` how many tokens of it there is
    room for behind this row's prompt within `max_length`. Which row it is, is a function of the split alone (its prompts
    and their number): one for each row, the same in each epoch, for every seed, batch size and number of ranks. So the
    reference's log-probabilities of it can be computed once, a resume changes nothing, and evaluation is exact.

    TRL and the authors of KTO (arXiv:2402.01306, section 4.1) shift the answers within a micro-batch, so that matched and
    mismatched answers of a micro-batch are the same, and an answer may meet its own prompt where two rows have one.

    Raises:
        Refusal: a split with a single prompt.
    """
    return {name: _with_mismatched(split, name, max_length) for name, split in tokenized.items()}


def rows_of_other_prompts(prompt_keys: np.ndarray) -> np.ndarray | None:
    """For each row another one with another prompt, int64 `[rows]`; None where all have the same.

    In an order that is mixed by a hash it is the nearest one before, the order being a circle. So where no two rows share a
    prompt each answer is taken once.
    """
    order = epoch_order(len(prompt_keys), seed=0, epoch=0)
    keys = prompt_keys[order]
    begins = keys != np.roll(keys, 1)  # of each run of one prompt
    if not begins.any():
        return None
    first = int(np.argmax(begins))
    order, begins = np.roll(order, -first), np.roll(begins, -first)
    starts = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    found = np.empty_like(order)
    found[order] = order[starts - 1]
    return found


def _with_mismatched(split: Dataset, name: str, max_length: int) -> Dataset:
    rows = rows_of_other_prompts(column(split, "prompt_key"))
    if rows is None:
        raise Refusal(
            f"The {name} split has a single prompt, and KTO compares with answers that belong to others. Take more rows, or "
            "--loss-type apo_zero_unpaired, which needs none."
        )
    room = max_length - column(split, "prompt_tokens")
    tokens = np.minimum(column(split, "completion_tokens")[rows], room)
    return split.add_column("mismatched_row", rows).add_column("mismatched_tokens", tokens.astype(np.int64))
