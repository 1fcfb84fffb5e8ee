"""What an embedding model must beat: TF-IDF, in the same corpus of documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from toolkit.baselines.bm25 import parts_of_words, plain_words
from toolkit.metrics.retrieval import ranking_metrics, ranks_in_corpus

if TYPE_CHECKING:
    from datasets import Dataset


def retrieval_baselines(raw: Mapping[str, Dataset], at: int = 10) -> dict[str, float]:
    """Recall@`at` on the validation pairs of chance and of the cosine of TF-IDF vectors.

    "on words": runs of letters, digits and underscores, in lower case. "on parts of words": identifiers are split at
    underscores and capitals, as searches in code do. The weight of either is (1 + log of the count) * (1 + log of
    (1 + documents) / (1 + documents with the word)), fitted to the documents that are searched: scikit-learn's
    TfidfVectorizer with sublinear_tf. Nothing for a stream and for pairs with scores.
    """
    if not hasattr(raw.get("validation"), "__len__") or "positive" not in raw["validation"].column_names:
        return {}
    rows = raw["validation"]
    queries = list(rows["anchor" if "anchor" in rows.column_names else "query"])
    distinct_queries, distinct = (list(dict.fromkeys(map(str.strip, texts))) for texts in (queries, rows["positive"]))
    places, places_of_queries = ({text: i for i, text in enumerate(texts)} for texts in (distinct, distinct_queries))
    pairs = {
        (places_of_queries[query.strip()], places[positive.strip()])
        for query, positive in zip(queries, rows["positive"], strict=True)
    }
    baselines = {"chance": min(at / len(distinct), 1.0)}
    for name, words in (("TF-IDF on words", plain_words), ("TF-IDF on parts of words", parts_of_words)):
        vectors = tf_idf([*distinct_queries, *distinct], distinct, words)
        found = ranks_in_corpus(vectors[: len(distinct_queries)], vectors[len(distinct_queries) :], np.array(sorted(pairs)))
        baselines[name] = ranking_metrics(found, (at,))[f"recall_at_{at}"]
    return baselines


def tf_idf(texts: Sequence[str], fitted_to: Sequence[str], words_of: Callable[[str], list[str]] = plain_words) -> np.ndarray:
    """Vectors of length 1, `[texts, words of fitted_to]`."""
    counts = [Counter(words_of(text)) for text in texts]
    number_of: dict[str, int] = {}
    frequency: Counter[str] = Counter()
    for text in fitted_to:
        frequency.update(set(words_of(text)))
    for word in frequency:
        number_of[word] = len(number_of)
    rarity = {word: 1 + np.log((1 + len(fitted_to)) / (1 + count)) for word, count in frequency.items()}
    vectors = np.zeros((len(texts), len(number_of)))
    for row, words in enumerate(counts):
        for word, count in words.items():
            if word in number_of:
                vectors[row, number_of[word]] = (1 + np.log(count)) * rarity[word]
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
