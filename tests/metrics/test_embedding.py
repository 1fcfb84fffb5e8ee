"""Metrics of embeddings over a split: those of a plain ranking of all pairs, for any batch size."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset

from toolkit.data.loading.collate_groups import collate_text_groups
from toolkit.data.loading.loaders import EvalLoader
from toolkit.data.loading.packing import PlainRows
from toolkit.metrics.embedding import retrieval_metrics, similarity_metrics
from toolkit.training.evaluation import eval_with_gather


def split(count: int, scored: bool = False) -> tuple[Dataset, np.ndarray]:
    """Rows of 2 to 4 texts, each one token, some of which are the same; and a vector for each token."""
    generator = np.random.default_rng(count)
    tables = [generator.choice(60, 2 if scored else 2 + generator.integers(0, 3), replace=False) for _ in range(count)]
    rows: dict[str, list[Any]] = {
        "input_ids": [texts.tolist() for texts in tables], "text_tokens": [[1] * len(texts) for texts in tables],
        "text_keys": [texts.tolist() for texts in tables], "length": [len(texts) for texts in tables],
    }  # fmt: skip
    if scored:
        rows["score"] = [float(generator.integers(0, 6)) / 5 for _ in tables]
    return Dataset.from_dict(rows), generator.normal(size=(60, 8)).astype(np.float32)


def found(rows: Dataset, vectors: np.ndarray, batch_size: int, metrics_of: Any) -> dict[str, float]:
    table = torch.from_numpy(vectors)
    metrics = metrics_of(lambda model, micro_batch: table[micro_batch["input_ids"][:, 0]])
    loader = EvalLoader(PlainRows(rows), collate_text_groups, batch_size)
    return eval_with_gather(Accelerator(cpu=True), torch.nn.Identity(), loader, metrics, prefix="")


@pytest.mark.parametrize("count", [1, 7, 97])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_retrieval_is_that_of_trec_eval_among_all_distinct_documents(count: int, batch_size: int) -> None:
    """Equal texts are one document and one query; a query has all positives of its text; also cut to 4 numbers.

    Fails when: hard negatives are no documents of the corpus; an anchor's other positives count as wrong.
    """
    pytrec_eval = pytest.importorskip("pytrec_eval")
    rows, vectors = split(count)
    keys = rows["text_keys"][:]
    metrics = found(rows, vectors, batch_size, lambda embed: retrieval_metrics(embed, max(map(len, keys)), (4,)))
    for size, ending in ((8, ""), (4, "_dim_4")):
        units = vectors[:, :size].astype(np.float64)
        units /= np.linalg.norm(units, axis=1, keepdims=True)
        corpus = sorted({key for row in keys for key in row[1:]})
        judged: dict[str, dict[str, int]] = {}
        for anchor, positive, *_ in keys:
            judged.setdefault(str(anchor), {})[str(positive)] = 1
        ranked = {query: {str(d): float(np.float32(units[int(query)] @ units[d])) for d in corpus} for query in judged}
        theirs = pytrec_eval.RelevanceEvaluator(judged, {"recip_rank", "map", "recall.1,10", "ndcg_cut.1,10"}).evaluate(ranked)
        names = {"mrr": "recip_rank", "map": "map", "recall_at_1": "recall_1", "recall_at_10": "recall_10", "ndcg_at_1": "ndcg_cut_1",
                 "ndcg_at_10": "ndcg_cut_10"}  # fmt: skip
        for ours, its in names.items():
            assert metrics[ours + ending] == pytest.approx(np.mean([each[its] for each in theirs.values()]), abs=1e-12), ours


@pytest.mark.parametrize("count", [2, 7, 97])
def test_similarity_is_the_correlation_of_scipy(count: int) -> None:
    """To 1e-9, for batch sizes 1, 3 and 8, of whole embeddings and of cut ones.

    Fails when: cosines are of vectors that are not of length 1; a cut keeps the last numbers.
    """
    stats = pytest.importorskip("scipy.stats")
    rows, vectors = split(count, scored=True)
    for size, ending in ((8, ""), (3, "_dim_3")):
        cut = vectors[:, :size].astype(np.float64)
        units = cut / np.linalg.norm(cut, axis=1, keepdims=True)
        cosines = np.array([units[a] @ units[b] for a, b in rows["text_keys"]])
        for batch_size in (1, 3, 8):
            metrics = found(rows, vectors, batch_size, partial(similarity_metrics, matryoshka_dims=[3]))
            rank, line = stats.spearmanr(cosines, rows["score"][:]).statistic, stats.pearsonr(cosines, rows["score"][:]).statistic
            assert metrics[f"spearman{ending}"] == pytest.approx(rank, abs=1e-9, nan_ok=True)
            assert metrics[f"pearson{ending}"] == pytest.approx(line, abs=1e-6, nan_ok=True)
