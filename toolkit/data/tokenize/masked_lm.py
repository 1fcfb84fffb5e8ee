"""Masked language modeling: rows of text or token ids to documents, each between its encoder's special tokens.

Which tokens are hidden is drawn while training: `toolkit/data/loading/token_masks.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import DataConfig, MaskedLMConfig, Refusal
from toolkit.data.loading.order import generator_of
from toolkit.data.loading.token_masks import build_masks, special_ids
from toolkit.data.report import Piece, example_pieces
from toolkit.data.tokenize.columns import Batch, Plan, check_texts, columns_of, is_wrapped, wrong_columns
from toolkit.data.tokenize.documents import Cut, Documents, Encoder, cut_documents, join_documents
from toolkit.data.tokenize.format import Format, Splits
from toolkit.data.tokenize.language import tokenized_rows

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase


def masked_lm_format(config: DataConfig) -> Format:
    """How texts are read for masked language modeling; `config` holds the settings of MaskedLMConfig too.

    A tokenized row has `word_starts` where whole words are hidden: whether each token begins a word.
    """
    import pyarrow as pa

    if not isinstance(config, MaskedLMConfig):
        raise TypeError("masked language modeling needs the settings of MaskedLMConfig next to those of DataConfig")
    masks = config

    def rows(plan: Plan, encoder: Encoder, config: DataConfig) -> FramedTexts:
        if masks.whole_word_mask:
            _check_words(plan, encoder)
        overlong = None if is_wrapped(config) else config.overlong
        return FramedTexts(
            plan.layout, encoder, np.array(special_ids(encoder.tokenizer)), masks.whole_word_mask, config.max_length, overlong
        )

    def columns(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> dict[str, pa.DataType]:
        return {"word_starts": pa.list_(pa.bool_())} if masks.whole_word_mask else {}

    def show(row: dict[str, Any], plan: Plan, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Piece]]:
        hidden = build_masks(tokenizer, masks)(row, generator_of(0), 0.0)["labels"].tolist()
        return "with tokens to predict marked", example_pieces(
            list(row["input_ids"]), hidden, lambda ids: str(tokenizer.decode(ids))
        )

    return Format(
        "masked_lm", _plan, rows, columns, _describe, show, settings=(masks.whole_word_mask,), ends_texts=False,
    )  # fmt: skip


def _plan(splits: Splits, config: DataConfig) -> tuple[dict[str, Plan], list[str]]:
    """Plans by the columns `text` or `input_ids`."""
    plans = {}
    for name, split in splits.items():
        present = columns_of(split, name)
        layout = "tokenized" if "input_ids" in present else "text"
        if layout == "text" and "text" not in present:
            raise Refusal(wrong_columns(present, name, "text; or input_ids", (("text",),)))
        texts = ("input_ids", "attention_mask") if layout == "tokenized" else ("text",)
        plans[name] = Plan(layout, "all", tuple(column for column in (*texts, "origin") if column in present))
    return plans, []


def _describe(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> str:
    return "token ids, some of which are hidden" if plan.layout == "tokenized" else "text, of which some tokens are hidden"


def _check_words(plan: Plan, encoder: Encoder) -> None:
    if plan.layout == "tokenized":
        raise Refusal("--whole-word-mask: rows of input_ids don't have where words begin. Give a column text, or leave it out.")
    two_words = next(encoder.encode(["one two"], positions=True))
    if len(set(two_words.word_ids)) < 2:
        raise Refusal("--whole-word-mask: the tokenizer cuts text into tokens without looking for words. Leave it out.")


@dataclass(frozen=True)
class FramedTexts:
    """Reads batches of rows: all that it needs next to them."""

    layout: str
    encoder: Encoder
    special: np.ndarray  # ids
    has_words: bool
    max_length: int
    overlong: str | None  # None: nothing is cut, packing does that

    def read(self, batch: Batch, origins: list[str]) -> tuple[Documents, Counter[str]]:
        """Whole documents."""
        columns: dict[str, list[Any]] = {}
        if self.layout == "tokenized":
            ids = tokenized_rows(batch, origins)
        else:
            check_texts(batch["text"], "text", origins)
            before, after = self.encoder.prefix, self.encoder.suffix
            encodings = list(self.encoder.encode(batch["text"], positions=self.has_words))
            ids = [[*before, *encoding.ids, *after] for encoding in encodings]
            if self.has_words:
                columns["word_starts"] = [
                    [*([False] * len(before)), *_starts(encoding.word_ids), *([False] * len(after))] for encoding in encodings
                ]
        for row, origin in zip(ids, origins, strict=True):
            if row and np.isin(row, self.special).all():
                raise Refusal(f"{origin}: holds special and unknown tokens only: there is nothing to hide. Remove the row.")
        return join_documents(ids, None, origins, columns), Counter()

    def cut(self, documents: Documents) -> tuple[Documents, Cut]:
        """Bring over-long documents within `max_length`; each part that is kept is between the special tokens again."""
        is_over = documents.lengths > self.max_length
        if self.overlong is None or not is_over.any():
            return documents, Cut()
        if self.overlong in ("drop", "refuse"):
            return cut_documents(documents, self.max_length, self.overlong)
        parts = [(row, place) for row in range(len(documents)) for place in self._parts(documents, row)]
        rows = [row for row, _ in parts]
        ids = [documents.values[documents.bounds[row] + place].tolist() for row, place in parts]
        columns = {
            name: [np.asarray(values[row])[place].tolist() for row, place in parts]
            for name, values in documents.columns.items()
        }  # fmt: skip
        joined = join_documents(ids, None, [documents.origins[row] for row in rows], columns)
        lost = int((documents.lengths[is_over] - self.max_length).sum()) if self.overlong == "truncate" else 0
        return replace(joined, whole=documents.whole[rows]), Cut(overlong=int(is_over.sum()), tokens=lost)

    def _parts(self, documents: Documents, row: int) -> list[np.ndarray]:
        """Places of the tokens of each part of a document that is kept."""
        length = int(documents.lengths[row])
        if length <= self.max_length:
            return [np.arange(length)]
        ids = documents.values[documents.bounds[row] : documents.bounds[row + 1]].tolist()
        before, after = self.encoder.prefix, self.encoder.suffix
        first = len(before) if ids[: len(before)] == before else 0
        end = length - len(after) if ids[length - len(after) :] == after else length
        room = self.max_length - first - (length - end)
        if room < 1:
            raise Refusal(f"--max-length {self.max_length}: leaves no place between the special tokens. Raise it.")
        starts = range(first, end, room) if self.overlong == "split" else [first]
        return [
            np.concatenate([np.arange(first), np.arange(start, min(start + room, end)), np.arange(end, length)])
            for start in starts
        ]


def _starts(word_ids: list[int | None]) -> list[bool]:
    """Whether each token is the first of its word."""
    return [i == 0 or word != word_ids[i - 1] for i, word in enumerate(word_ids)]
