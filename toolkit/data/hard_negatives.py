"""Hard negatives: for each anchor the documents that a model takes for its answer, and that are not."""

from __future__ import annotations

import numpy as np
import torch

MOST_SCORES = 2**24  # that are held at once, 128 MiB


def hard_negatives(
    anchors: np.ndarray, documents: np.ndarray, positives: np.ndarray, count: int, *, margin: float = 0.0, skip: int = 0,
    block: int | None = None,
) -> list[list[int]]:  # fmt: skip
    """For each anchor the numbers of up to `count` documents, those of the greatest cosine first.

    An anchor's positives are never taken, nor what is nearer to it than its least similar positive less `margin`: that may be
    an answer which nobody has marked. Of the rest the nearest `skip` are passed over.

    Args:
        anchors, documents: embeddings `[anchors, d]` and `[documents, d]`, of any length.
        positives: numbers of an anchor and of a document that answers it, `[pairs, 2]`.
        block: anchors whose scores are held at once; it changes no result.
    """
    block = block or max(1, MOST_SCORES // max(len(documents), 1))
    positives = positives[np.argsort(positives[:, 0], kind="stable")]
    both = (torch.from_numpy(np.asarray(each, dtype=np.float64)) for each in (anchors, documents))
    units = [torch.nn.functional.normalize(each, dim=-1) for each in both]
    found: list[list[int]] = []
    for start in range(0, len(anchors), block):
        scores = units[0][start : start + block] @ units[1].T
        first, end = np.searchsorted(positives[:, 0], (start, start + len(scores)))
        rows, columns = torch.from_numpy(positives[first:end] - [start, 0]).T
        least = torch.full((len(scores),), torch.inf, dtype=torch.float64)
        least = least.scatter_reduce(0, rows, scores[rows, columns], "amin")
        scores[scores > least[:, None] - margin] = -torch.inf
        scores[rows, columns] = -torch.inf
        values, nearest = scores.topk(min(count + skip, len(documents)), dim=1)
        for row, value in zip(nearest[:, skip:].tolist(), values[:, skip:].tolist(), strict=True):
            found.append([document for document, score in zip(row, value, strict=True) if score > -np.inf])
    return found
