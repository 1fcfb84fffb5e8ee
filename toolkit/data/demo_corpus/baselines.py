"""What a model must beat.

Of text, compressors and n-gram models in bits per UTF-8 byte; of labels, a classifier of words; of pairs, shared tokens.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

Labeled = tuple[Sequence[str], Sequence[int | str]]  # texts and their labels


def compression_baselines(texts: Sequence[str]) -> dict[str, float]:
    """Bits per byte of gzip, bz2 and xz at their strongest settings, each over the concatenation of the texts.

    A compressor sees no training text, but it adapts to what it has read of these ones.
    """
    data = "".join(texts).encode()
    compressors = {
        "gzip": lambda: gzip.compress(data, 9),
        "bz2": lambda: bz2.compress(data, 9),
        "xz": lambda: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
    }
    return {name: 8 * len(compress()) / len(data) for name, compress in compressors.items()}


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
        num_bytes: UTF-8 bytes of the text that `eval_ids` stands for.
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
    """Each window once for every distinct token that stands before it somewhere."""
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


def shared_tokens_accuracy(prompts: Sequence[Sequence[int]], pairs: Sequence[Sequence[Sequence[int]]]) -> float:
    """Share of pairs whose chosen answer has more in common with its prompt: the sum of log(N / n) over distinct tokens.

    N: of `prompts`, those that are counted over; n: those with the token (both one more, so that an unknown token counts too).
    `pairs`: token ids of prompt, chosen and rejected answer. A pair of like sums counts half.
    """
    chosen, rejected = (shared_tokens(prompts, [(pair[0], pair[side]) for pair in pairs]) for side in (1, 2))
    return float(np.mean([(a > b) + 0.5 * (a == b) for a, b in zip(chosen, rejected, strict=True)]))


def shared_tokens(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Sequence[int]]]) -> list[float]:
    """How much each answer has in common with its prompt, as above; `answers`: token ids of prompt and answer."""
    seen_in = Counter(token for prompt in prompts for token in set(prompt))
    return [
        math.fsum(math.log((len(prompts) + 1) / (seen_in[token] + 1)) for token in set(prompt) & set(answer))
        for prompt, answer in answers
    ]


def area_under_curve(scores: np.ndarray, positive: np.ndarray) -> float:
    """Share of couples of a positive and a negative in which the positive scores higher, ties counting half.

    From mean ranks (Mann and Whitney 1947). Not a number where one of the two kinds is missing.
    """
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return math.nan
    return float((ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def label_baselines(train: Labeled, held_out: Labeled) -> dict[str, float]:
    """Accuracy on held-out (texts, labels) of two classifiers without a neural network.

    "most frequent class" says what is most frequent in training, whatever the text; "words" is logistic regression on the
    words of the text, weighted by TF-IDF (scikit-learn), a strong baseline where topics differ in vocabulary.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    labels, frequency = np.unique(train[1], return_counts=True)
    baselines = {"most frequent class": float(np.mean(np.asarray(held_out[1]) == labels[frequency.argmax()]))}
    words = make_pipeline(TfidfVectorizer(sublinear_tf=True), LogisticRegression(C=10.0, max_iter=1000))
    with contextlib.suppress(ValueError):  # one class only, or no word of two letters in all texts: nothing to fit
        baselines["words"] = float(words.fit(*train).score(*held_out))
    return baselines
