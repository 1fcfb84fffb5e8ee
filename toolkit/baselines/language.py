"""What a language model must beat: compressors and n-gram models of the same splits.

Nothing to compare with (an empty dict) without a validation split, and for a stream.
"""

from __future__ import annotations

import gzip
import lzma
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from toolkit.baselines.ngrams import ngram_bits_per_byte
from toolkit.data.loading.collate import IGNORED
from toolkit.data.loading.columns import column
from toolkit.data.loading.token_masks import special_ids
from toolkit.data.texts import texts_of_tokens

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from toolkit.data.loading.loaders import EvalLoader

NGRAM_TOKENS = 4_000_000  # training tokens that n-grams are counted on: a few seconds
HELD_OUT_TOKENS = 1_000_000  # of validation that baselines are taken of: xz takes a second for a megabyte
BATCH_ROWS = 1000  # read at a time
Splits = Mapping[str, "Dataset"]


def text_baselines(tokenized: Splits, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """Bits per byte, on the text of the first million validation tokens, of gzip and xz and of n-gram models.

    The n-grams are counted on the first 4 million training tokens. Nothing for a stream.
    """
    if "validation" not in tokenized or not all(hasattr(tokenized[name], "__len__") for name in ("train", "validation")):
        return {}
    validation = _first_documents(tokenized["validation"], HELD_OUT_TOKENS)
    vocab_size, texts = len(tokenizer), texts_of_tokens(list(validation["input_ids"]), tokenizer)
    num_bytes = sum(len(text.encode()) for text in texts)
    baselines = compression_baselines(texts)
    if vocab_size**3 < 2**63:
        train, held_out = _tokens(tokenized["train"]), _tokens(validation)
        for name, order in (("bigram", 2), ("trigram", 3)):
            baselines[name] = ngram_bits_per_byte(train, held_out, num_bytes, vocab_size, order)
    return baselines


def answer_baselines(tokenized: Splits, vocab_size: int) -> dict[str, float]:
    """Mean loss in nats of n-grams over the supervised tokens of the validation split, counted on those of the training split.

    They know which tokens answers are made of and which follow each other, and nothing of the question. Nothing for a stream.
    """
    if "validation" not in tokenized or not all(hasattr(tokenized[name], "__len__") for name in ("train", "validation")):
        return {}
    train, held_out = _supervised_tokens(tokenized["train"]), _supervised_tokens(tokenized["validation"])
    orders = {"unigram": 1, "bigram": 2}
    # "per byte" of as many bytes as tokens is per token
    bits = {name: ngram_bits_per_byte(train, held_out, len(held_out), vocab_size, order) for name, order in orders.items()}
    return {name: value * math.log(2) for name, value in bits.items()}


def masked_token_baselines(
    tokenized: Splits, evaluation: EvalLoader | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """Mean loss in nats, over the tokens that evaluations hide, of a unigram model of the training tokens.

    It knows how often each token is, and nothing of its neighbors. Special tokens, which are never hidden, are not counted.
    Nothing for a stream.
    """
    if evaluation is None or not hasattr(tokenized["train"], "__len__"):
        return {}
    train = _tokens(tokenized["train"])
    whole = replace(evaluation, rank=0, world_size=1, workers=0)
    labels = np.concatenate([batch.micro_batches[0]["labels"].numpy().ravel() for batch in whole])
    hidden = labels[labels != IGNORED]
    counted = train[~np.isin(train, special_ids(tokenizer))]
    return {"unigram": ngram_bits_per_byte(counted, hidden, len(hidden), len(tokenizer), 1) * math.log(2)}


def compression_baselines(texts: Sequence[str]) -> dict[str, float]:
    """Bits per byte of gzip and xz at their strongest settings, each over the concatenation of the texts.

    A compressor sees no training text, but it adapts to what it has read of these ones.
    """
    data = "".join(texts).encode()
    compressed = {"gzip": gzip.compress(data, 9), "xz": lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)}
    return {name: 8 * len(content) / len(data) for name, content in compressed.items()}


def _supervised_tokens(split: Dataset) -> np.ndarray:
    """The first tokens of a split whose labels count."""
    found, count = list[np.ndarray](), 0
    for batch in split.select_columns(["labels" if "labels" in split.column_names else "input_ids"]).iter(BATCH_ROWS):
        rows = next(iter(batch.values()))
        labels = np.concatenate([np.zeros(0, np.int64), *(row[1:] for row in rows)])
        found.append(labels[labels != IGNORED])
        if (count := count + len(found[-1])) >= NGRAM_TOKENS:
            break
    return np.concatenate(found)[:NGRAM_TOKENS].astype(np.int64)


def _tokens(split: Dataset) -> np.ndarray:
    """The first tokens of a split, documents one behind the other."""
    rows = _first_documents(split, NGRAM_TOKENS).select_columns(["input_ids"])
    return np.concatenate([np.concatenate(batch["input_ids"]) for batch in rows.iter(BATCH_ROWS)])[:NGRAM_TOKENS]


def _first_documents(split: Dataset, tokens: int) -> Dataset:
    """The first documents that together have this number of tokens."""
    enough = np.searchsorted(np.cumsum(column(split, "length")), tokens) + 1
    return split.select(range(min(len(split), int(enough))))
