"""What a trained reranker must beat: BM25, which counts the words that a document shares with its query."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from toolkit.data.tokenize.ranking import QueryList, read_lists
from toolkit.metrics.retrieval import ranking_metrics, ranks_in_lists

if TYPE_CHECKING:
    from datasets import Dataset

COUNTED_LISTS = 20_000  # training lists in whose documents words are counted
_PARTS = re.compile(r"[a-z]+|[A-Z][a-z]+|[A-Z]+(?![a-z])|\d+")


def ranking_baselines(raw: Mapping[str, Dataset]) -> dict[str, float]:
    """nDCG@10 on the validation lists of orders that take no model.

    "any order" is what a random one has on average. "BM25 on words" is what a search engine does as it comes, "BM25 on parts
    of words" has identifiers split at underscores and capitals, as searches in code do. How rare a word is, is counted in the
    documents of the first 20,000 training lists. Nothing without a validation split, and for a stream.
    """
    if not all(hasattr(raw.get(name), "__len__") for name in ("train", "validation")):
        return {}
    held_out = list(read_lists(raw, "validation"))
    lists = (each for each, _ in zip(read_lists(raw, "train"), range(COUNTED_LISTS), strict=False))
    counted = list(dict.fromkeys(text for each in lists for text in each.documents))
    baselines = {"any order": float(np.mean([_expected_ndcg(each.labels) for each in held_out]))}
    for name, words in (("BM25 on words", plain_words), ("BM25 on parts of words", parts_of_words)):
        score = bm25(counted, words)
        baselines[name] = _ndcg(held_out, [score(each.query, text) for each in held_out for text in each.documents])
    return baselines


def bm25(counted: Sequence[str], words: Callable[[str], list[str]], k1: float = 1.2, b: float = 0.75) -> Callable[..., float]:
    """The score of (query, document), with Lucene's weights of words, as found in the documents `counted`.

    Sum over the query's words w of log(1 + (N - n + 0.5) / (n + 0.5)) tf / (tf + k1 (1 - b + b |d| / mean |d|)), n of N
    documents having w (Robertson and Zaragoza 2009, https://doi.org/10.1561/1500000019).
    """
    lengths, seen_in = 0, Counter[str]()
    for text in counted:
        found = words(text)
        lengths += len(found)
        seen_in.update(set(found))
    number, mean = len(counted), max(lengths / max(len(counted), 1), 1.0)

    def score(query: str, document: str) -> float:
        found = words(document)
        times, norm = Counter(found), k1 * (1 - b + b * len(found) / mean)
        rarity = {word: math.log(1 + (number - seen_in[word] + 0.5) / (seen_in[word] + 0.5)) for word in words(query)}
        return math.fsum(rarity[word] * times[word] / (times[word] + norm) for word in words(query) if word in times)

    return score


def plain_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def parts_of_words(text: str) -> list[str]:
    """`readHTTPHeader_2` is read, http, header, 2."""
    return [part.lower() for part in _PARTS.findall(text)]


def _ndcg(lists: Sequence[QueryList], scores: Sequence[float]) -> float:
    labels = np.concatenate([each.labels for each in lists])
    numbers = np.repeat(np.arange(len(lists)), [len(each.labels) for each in lists])
    return ranking_metrics(ranks_in_lists(np.asarray(scores), labels, numbers))["ndcg_at_10"]


def _expected_ndcg(labels: Sequence[float]) -> float:
    """At 10, of a random order: each document is as likely at each place."""
    gains = np.maximum(np.sort(np.asarray(labels, dtype=np.float64))[::-1], 0)
    discounts = 1 / np.log2(np.arange(2, len(gains) + 2)) * (np.arange(len(gains)) < 10)
    best = float(gains @ discounts)
    return float(gains.mean() * discounts.sum()) / best if best else 0.0
