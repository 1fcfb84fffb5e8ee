"""Plain text of a split: to train a tokenizer on, to count its bytes, and what a model of it must beat."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from toolkit.config import Refusal
from toolkit.data.baselines import compression_baselines, ngram_bits_per_byte

TOKENIZER_ROWS = 200_000  # rows of a stream that a tokenizer is trained on: more change it little
NGRAM_TOKENS = 4_000_000  # training tokens that n-grams are counted on: a few seconds


def texts_of(split: Any) -> Iterator[str]:
    """The `text` of each row; of a stream, of the first 200,000 rows.

    Raises:
        Refusal: there is no such column, or a row of it is no text.
    """
    rows = split if hasattr(split, "__len__") else islice(split, TOKENIZER_ROWS)
    for number, row in enumerate(rows, start=1):
        text = row.get("text")
        if not isinstance(text, str):
            there = ", ".join(name for name in row if name != "origin")
            raise Refusal(
                f"{row.get('origin') or f'row {number}'}: pretraining reads the column text, and here it is "
                f"{'missing; the columns are ' + there if 'text' not in row else f'{text!r}'}. "
                "Rename a column with --rename-columns old=text, or correct the row."
            )
        yield text


def count_bytes(split: Any) -> int:
    """UTF-8 bytes of the texts of a split."""
    return sum(len(text.encode()) for text in texts_of(split))


def text_baselines(raw: Any, tokenised: Any, vocab_size: int) -> dict[str, float]:
    """Bits per byte, on the validation texts, of gzip and xz and of n-gram models.

    The n-grams are counted on the first 4 million training tokens (not at all on a stream). `raw` and `tokenised` are the
    splits before and after `tokenize_for_lm`.
    """
    texts = list(texts_of(raw["validation"]))
    num_bytes = sum(len(text.encode()) for text in texts)
    baselines = {name: bits for name, bits in compression_baselines(texts).items() if name != "bz2"}
    if hasattr(tokenised["train"], "__len__") and vocab_size**3 < 2**63:
        train, held_out = _tokens(tokenised["train"]), _tokens(tokenised["validation"])
        for name, order in (("bigram", 2), ("trigram", 3)):
            baselines[name] = ngram_bits_per_byte(train, held_out, num_bytes, vocab_size, order)
    return baselines


def _tokens(split: Any) -> np.ndarray:
    """The first tokens of a split, documents one behind the other."""
    enough = np.searchsorted(np.cumsum(np.asarray(split["length"][:])), NGRAM_TOKENS) + 1
    rows = split.select(range(min(len(split), int(enough)))).with_format("numpy", columns=["input_ids"])
    return np.concatenate([np.asarray(ids) for ids in rows["input_ids"][:]])[:NGRAM_TOKENS]
