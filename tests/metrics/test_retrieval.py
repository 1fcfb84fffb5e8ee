"""Metrics of rankings are those of trec_eval, for candidate lists and for a whole corpus."""

import math

import numpy as np
import pytest

from toolkit.metrics.retrieval import Ranks, ranking_metrics, ranks_in_corpus, ranks_in_lists, spearman

NAMES = ("recall", "precision", "ndcg")


def trec_eval(scores: np.ndarray, gains: np.ndarray, queries: np.ndarray, at: tuple[int, ...]) -> dict[str, float]:
    """The oracle, pytrec_eval, averaged over queries."""
    pytrec_eval = pytest.importorskip("pytrec_eval")
    judged: dict[str, dict[str, int]] = {}
    found: dict[str, dict[str, float]] = {}
    for number, (score, gain, query) in enumerate(zip(scores, gains, queries, strict=True)):
        judged.setdefault(f"q{query}", {})[f"d{number}"] = int(gain)
        found.setdefault(f"q{query}", {})[f"d{number}"] = float(score)
    cuts = ",".join(map(str, at))
    theirs = {"recip_rank": "mrr", "map": "map"}
    theirs |= {f"{each}_{k}": f"{ours}_at_{k}" for each, ours in (("recall", "recall"), ("P", "precision"), ("ndcg_cut", "ndcg")) for k in at}  # fmt: skip
    measures = {"recip_rank", "map", f"recall.{cuts}", f"P.{cuts}", f"ndcg_cut.{cuts}"}
    results = pytrec_eval.RelevanceEvaluator(judged, measures).evaluate(found).values()
    return {ours: float(np.mean([result[each] for result in results])) for each, ours in theirs.items()}


def candidates(queries: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ragged lists with grades 0 to 3, scores without ties, interleaved; some queries have nothing relevant."""
    generator = np.random.default_rng(seed)
    owner = np.repeat(np.arange(queries), generator.integers(1, 30, queries))
    gains = generator.integers(0, 4, len(owner)) * (generator.random(len(owner)) < 0.4)
    mixed = generator.permutation(len(owner))
    # trec_eval reads scores as float32
    return generator.permutation(len(owner)).astype(np.float32)[mixed] / 7, gains[mixed], owner[mixed]


@pytest.mark.parametrize("queries", [1, 7, 97])
def test_metrics_of_candidate_lists_are_those_of_trec_eval(queries: int) -> None:
    """To 1e-12, with graded relevance, lists of 1 to 29 candidates and cutoffs beyond a list's end.

    Fails when: log2(rank + 1) of the nDCG is log2(rank), or a query without a relevant candidate is left out of the mean.
    """
    scores, gains, owner = candidates(queries, seed=queries)
    ours = ranking_metrics(ranks_in_lists(scores, gains, owner), at=(1, 3, 10, 100), names=NAMES)
    assert ours == pytest.approx(trec_eval(scores, gains, owner, (1, 3, 10, 100)), abs=1e-12)


@pytest.mark.parametrize("block", [None, 1, 3, 8])
def test_metrics_over_a_corpus_are_those_of_trec_eval_for_any_block(block: int | None) -> None:
    """97 queries, 61 documents, up to 5 relevant ones each.

    Fails when: the other relevant documents of a query are counted as irrelevant ones above it as well.
    """
    generator = np.random.default_rng(3)
    queries, documents = generator.normal(size=(97, 8)), generator.normal(size=(61, 8))
    relevant = np.unique(np.stack([generator.integers(0, 97, 200), generator.integers(0, 61, 200)], 1), axis=0)
    generator.shuffle(relevant)
    gains = np.zeros((97, 61), dtype=np.int64)
    gains[tuple(relevant.T)] = 1
    scores = (queries @ documents.T).astype(np.float32)
    owner = np.repeat(np.arange(97), 61)
    ours = ranking_metrics(ranks_in_corpus(queries, documents, relevant, block=block), at=(1, 5, 10), names=NAMES)
    assert ours == pytest.approx(trec_eval(scores.ravel(), gains.ravel(), owner, (1, 5, 10)), abs=1e-12)


def test_equal_scores_give_nothing_and_do_not_depend_on_the_order() -> None:
    """Where all scores are equal a relevant document is last, whatever came first.

    Fails when: ties are broken by the order of the rows (lexsort without the gains; > in place of >=).
    """
    for gains in ([1, 0, 0, 0], [0, 0, 0, 1]):
        ranks = ranks_in_lists(np.zeros(4), np.array(gains), np.zeros(4, dtype=int))
        assert ranks.rank.tolist() == [4]
    same = np.ones((4, 2))
    assert ranks_in_corpus(same[:1], same, np.array([[0, 0], [0, 2]])).rank.tolist() == [3, 4]


def test_queries_without_relevant_documents_count_as_zero() -> None:
    """One query found at the top and one with nothing to find: 0.5.

    Fails when: the mean is over the queries of the table.
    """
    half = ranking_metrics(Ranks(np.array([1]), np.array([1]), np.array([1.0]), 2))
    assert set(half.values()) == {0.5}
    assert math.isnan(ranking_metrics(Ranks(*(np.zeros(0, dtype=int),) * 3, 0))["mrr"])


@pytest.mark.parametrize("count", [2, 7, 97])
def test_spearman_is_that_of_scipy_with_ties(count: int) -> None:
    """To 1e-12, where half of the values are tied; not a number for a constant, as in scipy.

    Fails when: ties take the first rank and not the mean one.
    """
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(count)
    for _ in range(5):
        a, b = generator.normal(size=count), generator.integers(0, max(2, count // 2), count) / 5
        if len(set(b)) > 1:
            assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)
    assert math.isnan(spearman(np.ones(count), generator.normal(size=count)))
