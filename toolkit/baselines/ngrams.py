"""N-gram models of tokens: interpolated modified Kneser-Ney smoothing."""

from collections.abc import Sequence

import numpy as np


def ngram_bits_per_byte(
    train_ids: Sequence[int] | np.ndarray, eval_ids: Sequence[int] | np.ndarray, num_bytes: int, vocab_size: int, order: int
) -> float:
    """Bits per byte that an n-gram model counted on `train_ids` spends on `eval_ids`.

    Interpolated modified Kneser-Ney smoothing (Chen and Goodman 1998, section 3), the strongest of the classical ones: three
    discounts for each order from the counts of counts, lower orders from the number of distinct contexts, and below the
    unigram a uniform distribution, so that no token is impossible. Documents are one stream here; with an end token between
    them, as in training, nothing needs to know where one starts. The first tokens of `eval_ids` have a shorter context.

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
        # the highest order counts occurrences, the ones below it the distinct tokens seen before
        counted = _windows(train, length, vocab_size) if length == order else _continuations(train, length, vocab_size)
        asked = _windows(held_out, length, vocab_size)
        probability[length - 1 :] = _interpolate(counted, asked, probability[length - 1 :], vocab_size)
    return float(-np.log2(probability).sum() / num_bytes)


def _windows(ids: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
    """Each window of `length` tokens as one number, the context in its high digits."""
    keys = np.zeros(max(len(ids) - length + 1, 0), np.int64)
    for step in range(length):
        keys = keys * vocab_size + ids[step : step + len(keys)]
    return keys


def _continuations(ids: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
    """Each window once for every distinct token that is before it somewhere."""
    return np.unique(_windows(ids, length + 1, vocab_size)) % vocab_size**length


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
