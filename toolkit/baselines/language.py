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

    They count which tokens are in answers and which follow each other, and ignore the question. Nothing for a stream.
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

    It counts how often each token is, and ignores its neighbors. Special tokens, which are never hidden, are not counted.
    Nothing for a stream.
    """
    if evaluation is None or not hasattr(tokenized["train"], "__len__"):
        return {}
    train = _tokens(tokenized["train"])
    whole = replace(evaluation, data_rank=0, num_data_ranks=1, workers=0)
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


def ngram_bits_per_byte(
    train_ids: Sequence[int] | np.ndarray, eval_ids: Sequence[int] | np.ndarray, num_bytes: int, vocab_size: int, order: int
) -> float:
    """Bits per byte that an n-gram model counted on `train_ids` spends on `eval_ids`.

    Interpolated modified Kneser-Ney smoothing (Chen and Goodman 1998, section 3), the strongest of the classical ones: three
    discounts for each order from the counts of counts, lower orders from the number of distinct contexts, and below the
    unigram a uniform distribution, so that no token is impossible. Documents are one stream here; with an end token between
    them, as in training, it does not matter where one starts. The first tokens of `eval_ids` have a shorter context.

    Args:
        train_ids, eval_ids: token ids in [0, vocab_size), documents one after the other.
        num_bytes: UTF-8 bytes of the text behind `eval_ids`.
        order: 1 for unigrams, 3 for trigrams; `vocab_size ** order` must fit into 63 bits.
    """
    train, held_out = np.asarray(train_ids, np.int64), np.asarray(eval_ids, np.int64)
    if vocab_size**order >= 2**63:
        raise ValueError(f"{order}-grams over {vocab_size} tokens don't fit into 63 bits")
    probability = np.full(len(held_out), 1 / vocab_size)
    for length in range(1, order + 1):
        asked, counted = _windows(held_out, length, vocab_size), _windows(train, length, vocab_size)
        if length < order:  # the highest order counts occurrences, the ones below it the distinct tokens seen before
            counted = np.unique(_windows(train, length + 1, vocab_size)) % vocab_size**length
        if not len(counted):  # fewer tokens than that are trained on
            break
        probability[length - 1 :] = _interpolate(counted, asked, probability[length - 1 :], vocab_size)
    return float(-np.log2(probability).sum() / num_bytes)


def _windows(ids: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
    """Each window of `length` tokens as one number, the context in its high digits."""
    keys = np.zeros(max(len(ids) - length + 1, 0), np.int64)
    for step in range(length):
        keys = keys * vocab_size + ids[step : step + len(keys)]
    return keys


def _interpolate(counted: np.ndarray, asked: np.ndarray, lower: np.ndarray, vocab_size: int) -> np.ndarray:
    """P(token | context) of the n-grams `asked`, from the n-grams `counted` and the lower order's probabilities."""
    ngrams, counts = np.unique(counted, return_counts=True)
    discounts = _discounts(counts)
    taken = discounts[np.minimum(counts, 3)]
    contexts, starts = np.unique(ngrams // vocab_size, return_index=True)
    total = np.add.reduceat(counts, starts)
    reserved = np.add.reduceat(taken, starts) / total  # what the discounts leave to the lower order

    place = np.minimum(np.searchsorted(ngrams, asked), len(ngrams) - 1)
    kept = np.where(ngrams[place] == asked, counts[place] - taken[place], 0.0)
    context = asked // vocab_size
    at = np.minimum(np.searchsorted(contexts, context), len(contexts) - 1)
    return np.where(contexts[at] == context, kept / total[at] + reserved[at] * lower, lower)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Discounts of n-grams seen 0, 1, 2, and 3 or more times (equation 17 of Chen and Goodman)."""
    once, twice, thrice, four = (max(int((counts == times).sum()), 1) for times in (1, 2, 3, 4))
    share = once / (once + 2 * twice)
    discounts = [0.0, 1 - 2 * share * twice / once, 2 - 3 * share * thrice / twice, 3 - 4 * share * four / thrice]
    return np.clip(discounts, [0, 0.1, 0.1, 0.1], [0, 1, 2, 3])
