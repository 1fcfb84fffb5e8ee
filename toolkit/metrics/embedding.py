"""Metrics of embeddings over a whole split: retrieval among all its documents, or correlation with the scores of pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from toolkit.data.loading.batch import MicroBatch
from toolkit.metrics.metric import Metrics
from toolkit.metrics.retrieval import pearson, ranking_metrics, ranks_in_corpus, spearman

Embed = Callable[[nn.Module, MicroBatch], torch.Tensor]


def retrieval_metrics(
    embed: Embed, most_texts: int, matryoshka_dims: Sequence[int] = (), loss_of: Callable[..., float] | None = None
) -> Metrics:
    """How well anchors find their positives among all documents of the split, each distinct text once.

    A document answers an anchor when some row has the two as anchor and positive: equal texts are one. They are compared by
    cosine. `recall_at_k`, `ndcg_at_k`, `mrr`, `map` (`toolkit.metrics.retrieval`), for each of `matryoshka_dims` also of
    embeddings cut to it, such as `recall_at_10_dim_64`; and `loss`, by `loss_of(vectors, keys, is_there)`.

    Args:
        embed: embeddings `[texts, d]` of (model, micro-batch of `collate_text_groups`).
        most_texts: the most texts that a row of the split has.
    """

    def finalize(rows: dict[str, np.ndarray]) -> dict[str, float]:
        keys, is_there = rows["keys"], rows["is_there"] > 0
        loss = {"loss": loss_of(rows["vectors"], keys, is_there)} if loss_of else {}
        return loss | _of_each_size(lambda vectors: _retrieval(vectors, keys, is_there), rows["vectors"], matryoshka_dims)

    return Metrics(update=None, finalize=finalize, gather=_rows_of(embed, most_texts))


def similarity_metrics(
    embed: Embed, matryoshka_dims: Sequence[int] = (), loss_of: Callable[..., float] | None = None
) -> Metrics:
    """Correlation of cosines with the scores of pairs: `spearman`, `pearson`, for each of `matryoshka_dims` also of embeddings
    cut to it, such as `spearman_dim_64`; and `loss`, by `loss_of(vectors, scores)`."""
    of_texts = _rows_of(embed, 2)

    def gather(model: nn.Module, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        return {**of_texts(model, micro_batch), "scores": micro_batch["score"][micro_batch["role"] == 0]}

    def finalize(rows: dict[str, np.ndarray]) -> dict[str, float]:
        scores = rows["scores"].astype(np.float64)
        loss = {"loss": loss_of(rows["vectors"], rows["scores"])} if loss_of else {}
        return loss | _of_each_size(lambda vectors: _similarity(vectors, scores), rows["vectors"], matryoshka_dims)

    return Metrics(update=None, finalize=finalize, gather=gather)


def _of_each_size(
    measure: Callable[[np.ndarray], dict[str, float]], vectors: np.ndarray, sizes: Sequence[int]
) -> dict[str, float]:
    result = measure(vectors)
    for size in sorted(sizes):
        result |= {f"{name}_dim_{size}": value for name, value in measure(vectors[..., :size]).items()}
    return result


def _similarity(vectors: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    units = _unit(vectors)
    cosines = (units[:, 0] * units[:, 1]).sum(-1)
    return {"spearman": spearman(cosines, scores), "pearson": pearson(cosines, scores)}


def _rows_of(embed: Embed, most_texts: int) -> Callable[[nn.Module, MicroBatch], dict[str, torch.Tensor]]:
    """For each example `vectors` `[most_texts, d]`, `keys` and `is_there` `[most_texts]`; zeros where it has fewer texts."""

    def gather(model: nn.Module, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        vectors = embed(model, micro_batch)
        place = (micro_batch["example"], micro_batch["role"])
        shape = (int(micro_batch["example"].max()) + 1, most_texts)
        return {
            "vectors": vectors.new_zeros(*shape, vectors.shape[-1]).index_put_(place, vectors),
            "keys": micro_batch["text_key"].new_zeros(shape).index_put_(place, micro_batch["text_key"]),
            "is_there": torch.zeros(shape, device=vectors.device).index_put_(place, vectors.new_ones(len(vectors)).float()),
        }

    return gather


def _retrieval(vectors: np.ndarray, keys: np.ndarray, is_there: np.ndarray) -> dict[str, float]:
    """Anchors are texts 0, positives texts 1, the rest hard negatives, which are documents of the corpus too."""
    _, first_anchor, anchor_of = np.unique(keys[:, 0], return_index=True, return_inverse=True)
    is_document = is_there.copy()
    is_document[:, 0] = False
    document_keys, first_document = np.unique(keys[is_document], return_index=True)
    relevant = np.stack([anchor_of, np.searchsorted(document_keys, keys[:, 1])], 1)
    anchors, documents = _unit(vectors[first_anchor, 0]), _unit(vectors[is_document][first_document])
    return ranking_metrics(ranks_in_corpus(anchors, documents, np.unique(relevant, axis=0)))


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Of length 1, float64; zeros stay."""
    precise = vectors.astype(np.float64)
    return precise / np.maximum(np.linalg.norm(precise, axis=-1, keepdims=True), 1e-12)
