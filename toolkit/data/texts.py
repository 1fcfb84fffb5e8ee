"""Plain text of a split: to train a tokenizer on, and to count its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from toolkit.config import Refusal

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

DECODED_ROWS = 1000  # at a time: of all of them the tokens would be an object each
TOKENIZER_ROWS = 200_000  # rows of a stream that a tokenizer is trained on: more change it little


def texts_of(split: Dataset | IterableDataset) -> Iterator[str]:
    """The `text` of each row; of a stream, of the first 200,000 rows.

    Raises:
        Refusal: there is no such column, or a row of it is no text.
    """
    rows = split if hasattr(split, "__len__") else islice(split, TOKENIZER_ROWS)
    for number, row in enumerate(rows, start=1):
        text = row.get("text")
        if text is None and "input_ids" in row:
            raise Refusal(
                f"{row.get('origin') or f'row {number}'}: is token ids, and a tokenizer can't be made from them. Name the one "
                "that they were made with: --tokenizer"
            )
        if not isinstance(text, str):
            there = ", ".join(name for name in row if name != "origin")
            raise Refusal(
                f"{row.get('origin') or f'row {number}'}: pretraining reads the column text, and here it is "
                f"{'missing; the columns are ' + there if 'text' not in row else f'{text!r}'}. "
                "Rename a column with --rename-columns old=text, or correct the row."
            )
        yield text


def texts_of_tokens(documents: Iterable[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each document's tokens: what is left of it after truncation, splitting and dropping.

    Two pieces of a document that was split within a character are one text, in which that character is whole.
    """
    texts, tokens = list[str](), list[int]()  # those of the last text
    for document in documents:
        text = str(tokenizer.decode(document, skip_special_tokens=True))
        if texts and texts[-1].endswith(_BROKEN) and text.startswith(_BROKEN):
            tokens = [*tokens, *document]
            texts[-1] = str(tokenizer.decode(tokens, skip_special_tokens=True))
        else:
            texts.append(text)
            tokens = document
    return texts


_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no whole character are decoded to


def text_size(tokenized: Mapping[str, Dataset], tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """UTF-8 bytes and tokens of the validation split, and the size of the vocabulary: what bits per byte are counted with."""
    num_bytes = num_tokens = 0
    if "validation" in tokenized:
        for batch in tokenized["validation"].select_columns(["input_ids"]).iter(DECODED_ROWS):
            num_bytes += sum(len(text.encode()) for text in texts_of_tokens(batch["input_ids"], tokenizer))
            num_tokens += sum(map(len, batch["input_ids"]))
    return {"num_bytes": num_bytes, "num_tokens": num_tokens, "vocab_size": len(tokenizer)}
