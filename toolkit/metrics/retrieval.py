"""Metrics of rankings: recall@k, precision@k, MRR, MAP and nDCG@k of retrieval and reranking, and Spearman's correlation.

All of them are made from one table, the ranks of relevant documents, which is found exactly: for lists of candidates by sorting
them, for a whole corpus by blocks of queries, so that no more than a block of scores is ever held.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

MOST_SCORES = 2**24  # that are held at once, 128 MiB


@dataclass(frozen=True)
class Ranks:
    """Where relevant documents rank: `query`, `rank` (1 is the top) and `gain` (above 0), `[relevant pairs]`; `num_queries`.

    A query without a relevant document has no entry, and counts as 0 in every mean, as trec_eval has it.
    """

    query: np.ndarray
    rank: np.ndarray
    gain: np.ndarray
    num_queries: int


def ranks_in_lists(scores: np.ndarray, gains: np.ndarray, queries: np.ndarray) -> Ranks:
    """Ranks of relevant candidates, each within the list of its query, by falling score.

    Of equal scores the less relevant comes first: a model that gives candidates equal scores gains nothing by it, and the
    order in which candidates were read has no part in the result.

    Args:
        scores, gains, queries: of each candidate, `[candidates]`; gains are grades, relevant above 0; queries are any numbers.
    """
    numbers, query = np.unique(queries, return_inverse=True)
    order = np.lexsort((gains, -np.asarray(scores, dtype=np.float64), query))
    sizes = np.bincount(query, minlength=len(numbers))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 1
    is_relevant = np.asarray(gains) > 0
    return Ranks(query[is_relevant], rank[is_relevant], np.asarray(gains, dtype=np.float64)[is_relevant], len(numbers))


def ranks_in_corpus(queries: np.ndarray, documents: np.ndarray, relevant: np.ndarray, block: int | None = None) -> Ranks:
    """Ranks of relevant documents among all documents, by falling dot product in float64; ties as in `ranks_in_lists`.

    Args:
        queries, documents: embeddings `[queries, d]` and `[documents, d]`.
        relevant: numbers of a query and of a document that answers it, `[relevant pairs, 2]`, no pair twice.
        block: queries whose scores are held at once. Default: as many as 128 MiB hold. It changes no rank.
    """
    block = block or max(1, MOST_SCORES // max(len(documents), 1))
    relevant = relevant[np.argsort(relevant[:, 0], kind="stable")]
    keys = torch.from_numpy(np.asarray(documents, dtype=np.float64)).T
    ranks = np.empty(len(relevant), dtype=np.int64)
    for start in range(0, len(queries), block):
        scores = torch.from_numpy(np.asarray(queries[start : start + block], dtype=np.float64)) @ keys
        first, end = np.searchsorted(relevant[:, 0], (start, start + len(scores)))
        rows, columns = torch.from_numpy(relevant[first:end] - [start, 0]).T
        own = scores[rows, columns]
        scores[rows, columns] = -torch.inf  # what is left are the irrelevant ones
        for at in range(0, len(rows), block):  # a query may have many relevant documents
            part = slice(at, at + block)
            ranks[first:end][part] = (scores[rows[part]] >= own[part, None]).sum(1).numpy()
        ranks[first:end] += _places(rows.numpy(), own.numpy())
    return Ranks(relevant[:, 0], ranks, np.ones(len(relevant)), len(queries))


def ranking_metrics(ranks: Ranks, at: Sequence[int] = (1, 10), names: Sequence[str] = ("recall", "ndcg")) -> dict[str, float]:
    """Means over queries: `mrr`, `map`, and of `names` (recall, precision, ndcg) one for each cutoff, such as `recall_at_10`.

    - `mrr`: 1 / rank of the first relevant document (trec_eval's recip_rank).
    - `map`: mean over relevant documents of the precision at their ranks.
    - `recall_at_k`: share of the relevant documents that are among the first k; `precision_at_k`: share of k that is relevant.
    - `ndcg_at_k`: sum of gain / log2(rank + 1) over the first k, divided by the sum of the best order (Järvelin and Kekäläinen
      2002, with the gain itself, as trec_eval has it).
    """
    order = np.lexsort((ranks.rank, ranks.query))
    query, rank, gain, total = ranks.query[order], ranks.rank[order], ranks.gain[order], ranks.num_queries
    count = np.bincount(query, minlength=total)
    nth = _nth(query)  # among the relevant documents of its query, from 1

    def mean(values: np.ndarray) -> float:
        """Of sums for each query; 0 where it has no relevant document."""
        return float(np.bincount(query, values, minlength=total).sum() / total) if total else math.nan

    ideal = gain[np.lexsort((-gain, query))]  # in the order of `nth`
    result = {"mrr": mean((nth == 1) / rank), "map": mean(nth / rank / count[query])}
    for k in at:
        is_in = rank <= k
        best = np.bincount(query, ideal / np.log2(nth + 1) * (nth <= k), minlength=total)
        values = {
            "recall": is_in / count[query],
            "precision": is_in / k,
            "ndcg": gain / np.log2(rank + 1) * is_in / np.where(best > 0, best, 1)[query],
        }
        result |= {f"{name}_at_{k}": mean(values[name]) for name in names}
    return result


def pearson(predictions: np.ndarray, references: np.ndarray) -> float:
    """Correlation; not a number where one of them is constant."""
    if not len(predictions):
        return math.nan
    p, r = deviations(predictions), deviations(references)
    lengths = math.sqrt(float(p @ p)) * math.sqrt(float(r @ r))
    return float(p @ r) / lengths if lengths else math.nan


def deviations(values: np.ndarray) -> np.ndarray:
    """From the mean, float64: exactly 0 for what is constant, and all digits where the mean is large next to the spread.

    Sums of squares over micro-batches would lose them: half of the digits that the mean has more than the spread, twice.
    """
    from_the_first = values.astype(np.float64) - np.float64(values[0])
    return from_the_first - from_the_first.mean()


def spearman(predictions: np.ndarray, references: np.ndarray) -> float:
    """Spearman's rank correlation, equal values sharing their mean rank; not a number where one of them is constant."""
    return pearson(_mean_ranks(predictions), _mean_ranks(references))


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _nth(query: np.ndarray) -> np.ndarray:
    """1, 2, 3 ... within each run of one query."""
    starts = np.flatnonzero(np.diff(query, prepend=-1))
    return np.arange(len(query)) - np.repeat(starts, np.diff(starts, append=len(query))) + 1


def _places(rows: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """1, 2, 3 ... among the relevant documents of each query, by falling score; `rows` do not fall."""
    order = np.lexsort((-scores, rows))
    places = np.empty(len(rows), dtype=np.int64)
    places[order] = _nth(rows[order])
    return places
