"""Masked diffusion: documents as for supervised fine-tuning, their answers filled up with end tokens to one length.

A causal model learns where an answer ends by its last token. One that writes all tokens of an answer at once is given a length,
and has to mark how much of it is none of the answer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from toolkit.config import DataConfig, DiffusionConfig, Refusal
from toolkit.data.tokenize.columns import Batch, Plan
from toolkit.data.tokenize.documents import IGNORED, Cut, Documents, Encoder
from toolkit.data.tokenize.format import Format, FormatRows
from toolkit.data.tokenize.language import language_format


def diffusion_format(config: DataConfig) -> Format:
    """How rows are read for masked diffusion; `config` holds the settings of DiffusionConfig too."""
    if not isinstance(config, DiffusionConfig):
        raise TypeError("masked diffusion needs the settings of DiffusionConfig next to those of DataConfig")
    plain, answer_length = language_format("sft"), config.answer_length

    def rows(plan: Plan, encoder: Encoder, config: DataConfig) -> DiffusionRows:
        is_filled = plan.is_masked and plan.layout != "tokenized"
        mask, end = encoder.tokenizer.mask_token_id, encoder.end if is_filled else None
        return DiffusionRows(plain.rows(plan, encoder, config), mask, end, answer_length, config.max_length)

    return replace(plain, task="diffusion", rows=rows, settings=(answer_length,))


@dataclass(frozen=True)
class DiffusionRows:
    """Reads batches of rows as `rows` does; the last answer of each document then has `answer_length` tokens at least."""

    rows: FormatRows
    mask: int | None
    end: int | None  # the token that fills; None: nothing is filled
    answer_length: int
    max_length: int

    def read(self, batch: Batch, origins: list[str]) -> tuple[Documents, Counter[str]]:
        """Whole documents; one that holds the mask token is refused: it would be hidden, and never found."""
        documents, counts = self.rows.read(batch, origins)
        there = np.flatnonzero(documents.values == self.mask)
        if len(there):
            origin = documents.origins[int(np.searchsorted(documents.bounds, there[0], side="right")) - 1]
            raise Refusal(f"{origin}: holds the mask token, which marks a hidden one. Take it out, or remove the row.")
        return documents, counts

    def cut(self, documents: Documents) -> tuple[Documents, Cut]:
        """Bring over-long documents within `max_length`, and fill up the others, as far as that allows.

        One that was cut off has no end, and is not filled.
        """
        documents, cut = self.rows.cut(documents)
        if self.end is None:
            return documents, cut
        assert documents.labels is not None
        missing = np.zeros(len(documents), dtype=np.int64)
        for row, (start, end) in enumerate(pairwise(documents.bounds)):
            counts = documents.labels[start:end] != IGNORED
            if end - start < documents.whole[row] or not counts.any():
                continue
            final = int(np.flatnonzero(counts)[-1])  # of the last answer, which begins behind what is masked before it
            first = int(np.flatnonzero(~counts[:final]).max(initial=-1)) + 1
            missing[row] = max(0, min(self.answer_length - (final + 1 - first), self.max_length - (end - start)))
        places = np.repeat(documents.bounds[1:], missing)
        bounds = documents.bounds + np.concatenate([[0], np.cumsum(missing)])
        values, labels = (np.insert(flat, places, self.end).astype(np.int32) for flat in (documents.values, documents.labels))
        return replace(documents, values=values, labels=labels, bounds=bounds, whole=documents.whole + missing), cut
