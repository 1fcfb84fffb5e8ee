"""What a task's rows become: the parts that tokenizing, inspecting and evaluating need, one `Format` a task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.config import DataConfig
from toolkit.data.report import Piece, example_pieces
from toolkit.data.tokenize.columns import Batch, Plan
from toolkit.data.tokenize.documents import Cut, Documents, Encoder

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

Splits = Mapping[str, "Dataset | IterableDataset"]


class FormatRows(Protocol):
    """How the rows of a format become documents."""

    def read(self, batch: Batch, origins: list[str]) -> tuple[Documents, Counter[str]]:
        """Whole documents, and counts of what is unusual about them."""

    def cut(self, documents: Documents) -> tuple[Documents, Cut]:
        """Bring over-long documents within the longest length."""


def show_document(row: dict[str, Any], plan: Plan, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Piece]]:
    """A tokenized row as text, in pieces that are supervised or not."""
    labels = row["labels"] if plan.is_masked else None
    return "", example_pieces(row["input_ids"], labels, lambda ids: str(tokenizer.decode(ids)))


@dataclass(frozen=True)
class Format:
    """How the rows of a task become tokenized rows.

    plan(splits, config): how each split is read, and notes for the report; a split without one is left out. Refuses columns and
        settings that can't be trained with.
    rows(plan, encoder, config): what reads batches of rows; its encoder has the tokenizer.
    columns(plan, tokenizer): what a tokenized row holds next to `input_ids`, `length`, `supervised_tokens` and `origin`, with
        Arrow types. `labels` are those of the documents, all others `Documents.columns`.
    describe(plan, tokenizer): the plan in words.
    show(row, plan, tokenizer): a tokenized row in pieces of text, and a remark next to its origin.
    part_names: names of these pieces, where each is shown by itself.
    class_names(plan): under which examples are counted, as the remarks `class NAME` of the rows; none where there are none.
    settings: those that decide what a tokenized row holds, next to the lengths.
    numbered: the column in which the examples of all splits are numbered.
    supervises_tokens: whether labels are tokens of the row, so that they are counted and a row without one is refused.
    ends_texts: whether the end of a text is learned, so that the tokenizer must have one.
    gather(splits): where several rows make one example, splits in which they are one row.
    unsplit: why --overlong split is refused, where it is.
    overlong: what becomes of over-long rows, in the words of --overlong, where that setting does not apply.
    max_length, length_flag: the longest row, where another setting than --max-length sets it, and that one's flag.
    """

    task: str
    plan: Callable[[Splits, DataConfig], tuple[dict[str, Plan], list[str]]]
    rows: Callable[[Plan, Encoder, DataConfig], FormatRows]
    columns: Callable[[Plan, PreTrainedTokenizerBase], dict[str, pa.DataType]]
    describe: Callable[[Plan, PreTrainedTokenizerBase], str]
    show: Callable[[dict[str, Any], Plan, PreTrainedTokenizerBase], tuple[str, list[Piece]]] = show_document
    part_names: tuple[str, ...] = ()
    class_names: Callable[[Plan], tuple[str, ...]] = lambda plan: ()
    settings: tuple[Any, ...] = ()
    numbered: str | None = None
    supervises_tokens: bool = True
    ends_texts: bool = True
    gather: Callable[[Splits], Splits] = lambda splits: splits
    unsplit: str = ""
    overlong: str | None = None
    max_length: int | None = None
    length_flag: str = "--max-length"

    def longest(self, config: DataConfig) -> int:
        """Most tokens of a row."""
        return self.max_length or config.max_length
