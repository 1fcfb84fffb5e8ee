"""What rerankers, embeddings and models that choose must beat: BM25 and TF-IDF, which count the words that texts share."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from toolkit.data.tokenize.multiple_choice import Question, read_questions
from toolkit.data.tokenize.ranking import QueryList, read_lists
from toolkit.metrics.retrieval import ranking_metrics, ranks_in_corpus, ranks_in_lists

if TYPE_CHECKING:
    import torch
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


def bm25(counted: Sequence[str], words: Callable[[str], list[str]]) -> Callable[..., float]:
    """The score of (query, document), with Lucene's weights of words, as found in the documents `counted`.

    Sum over the query's words w of log(1 + (N - n + 0.5) / (n + 0.5)) tf / (tf + k1 (1 - b + b |d| / mean |d|)), n of N
    documents having w (Robertson and Zaragoza 2009, https://doi.org/10.1561/1500000019).
    """
    k1, b = 1.2, 0.75  # Lucene's
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
        vectors = tf_idf([*distinct_queries, *distinct], distinct, words).to_dense().numpy()
        found = ranks_in_corpus(vectors[: len(distinct_queries)], vectors[len(distinct_queries) :], np.array(sorted(pairs)))
        baselines[name] = ranking_metrics(found, (at,))[f"recall_at_{at}"]
    return baselines


def tf_idf(texts: Sequence[str], fitted_to: Sequence[str], words_of: Callable[[str], list[str]]) -> torch.Tensor:
    """Vectors of length 1, `[texts, words of fitted_to in their order]`, sparse."""
    import torch

    seen_in = Counter(word for text in fitted_to for word in set(words_of(text)))
    place = {word: number for number, word in enumerate(sorted(seen_in))}
    rarity = {word: 1 + math.log((1 + len(fitted_to)) / (1 + count)) for word, count in seen_in.items()}
    columns, starts, values = list[int](), [0], list[float]()
    for text in texts:
        counts = sorted(Counter(words_of(text)).items())
        known = {place[word]: (1 + math.log(times)) * rarity[word] for word, times in counts if word in place}
        length = math.sqrt(math.fsum(value * value for value in known.values()))
        columns += known
        values += [value / length for value in known.values()]
        starts.append(len(columns))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            torch.tensor(starts), torch.tensor(columns, dtype=torch.int64), torch.tensor(values, dtype=torch.float64),
            (len(texts), len(place)), check_invariants=True,
        )  # fmt: skip


def choice_baselines(raw: Mapping[str, Dataset]) -> dict[str, float]:
    """Accuracy on the validation questions of choosing without a model.

    The longest choice is that with the most characters. BM25 scores a choice as a query for its question; how rare a word is,
    is counted in the questions of the first 20,000 training rows. Of n choices that are equally good each is right with 1 / n.
    Nothing without a validation split, and for a stream.
    """
    if not all(hasattr(raw.get(name), "__len__") for name in ("train", "validation")):
        return {}
    held_out = list(read_questions(raw["validation"], "validation"))
    counted = list(dict.fromkeys(each.asked for each in islice(read_questions(raw["train"], "train"), COUNTED_LISTS)))
    found = {
        "chance": _accuracy(held_out, lambda question, choice: 0.0),
        "longest choice": _accuracy(held_out, lambda question, choice: len(choice)),
    }
    for name, words in (("BM25 on words", plain_words), ("BM25 on parts of words", parts_of_words)):
        score = bm25(counted, words)
        found[name] = _accuracy(held_out, lambda question, choice, score=score: score(choice, question))  # type: ignore[misc]
    return found


def _accuracy(questions: Sequence[Question], score: Callable[[str, str], float]) -> float:
    """Mean over questions of 1 / (choices with the highest score) where the right one is among these, else 0."""
    total = 0.0
    for asked, choices, right in questions:
        scores = [score(asked, choice) for choice in choices]
        total += (scores[right] == max(scores)) / scores.count(max(scores))
    return total / len(questions)
