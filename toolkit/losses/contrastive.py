"""Losses of embeddings that compare the texts of a whole global batch with each other: InfoNCE, CoSENT, cosine regression.

They take `Texts`, the embeddings of all texts of the global batch, and return the sum over some of its examples, so that a step
can compute them in blocks and share the blocks among ranks; `toolkit.training.contrastive` brings them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from toolkit.config import Refusal
from toolkit.metrics.embedding import Embed, retrieval_metrics, similarity_metrics
from toolkit.metrics.metric import Metrics

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
Values = tuple[torch.Tensor, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Texts:
    """The texts of a global batch, or of a split.

    anchors: embeddings `[examples, d]`, of any length. documents: `[documents, d]`; the first ones are the positives, in the
    order of the examples, the rest are hard negatives. anchor_keys `[examples]`, document_keys `[documents]`: numbers that are
    equal for equal texts. owners `[documents]`: the example that each document came with. scores `[examples]`: how similar
    anchor and positive are, where the rows have it.
    """

    anchors: torch.Tensor
    documents: torch.Tensor
    anchor_keys: torch.Tensor
    document_keys: torch.Tensor
    owners: torch.Tensor
    scores: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.anchors)


ContrastiveLoss = Callable[[Texts, slice], Values]


def info_nce(
    texts: Texts, rows: slice, *, temperature: float = 0.05, two_way: bool = False, false_negative_margin: float | None = None
) -> Values:
    """Sum over the examples in `rows` of -log softmax(cosines / temperature) of the positive among all documents.

    InfoNCE (arXiv:1807.03748), MultipleNegativesRanking in sentence-transformers, whose scale is 1 / temperature. The negatives
    of an anchor are the positives of all other examples and the hard negatives of all. Two-way: half of that, and half of the
    same from each positive to all anchors.

    What is no negative is left out: a document whose text is a positive of the anchor's text anywhere in the batch, or the
    anchor's text itself; and with `false_negative_margin` one of another example whose cosine is above that of the positive by
    more than the margin.

    Returns the sum, 0-d, and sums of `accuracy` (examples whose positive has the greatest cosine), `positive_cosine`, and
    `false_negatives` (documents left out).
    """
    count = len(texts)
    numbers = torch.arange(count, device=texts.anchors.device)
    own = numbers[rows]
    anchors, documents = (functional.normalize(each, dim=-1) for each in (texts.anchors, texts.documents))
    positives = (anchors[rows] * documents[:count][rows]).sum(-1)

    def one_way(cosines: torch.Tensor, is_left_out: torch.Tensor, is_own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if false_negative_margin is not None:
            is_left_out = is_left_out | ((cosines.detach() > positives.detach()[:, None] + false_negative_margin) & ~is_own)
        is_left_out[torch.arange(len(own), device=own.device), own] = False  # the positive itself
        scores = cosines.masked_fill(is_left_out, -torch.inf)
        return functional.cross_entropy(scores / temperature, own, reduction="sum"), is_left_out

    known = _Known(texts)
    cosines = anchors[rows] @ documents.T
    left_out = known.pairs(texts.anchor_keys[rows], texts.document_keys)
    loss, left_out = one_way(cosines, left_out, texts.owners == own[:, None])
    best = cosines.masked_fill(left_out, -torch.inf).argmax(-1)
    if two_way:
        left_out_anchors = known.pairs(texts.anchor_keys, texts.document_keys[:count][rows]).T
        loss_back, _ = one_way(documents[:count][rows] @ anchors.T, left_out_anchors, numbers == own[:, None])
        loss = (loss + loss_back) / 2
    return loss, {
        "accuracy": (best == own).sum(),
        "positive_cosine": positives.detach().sum(),
        "false_negatives": left_out.sum(),
    }


class _Known:
    """Which documents answer which anchors, by their texts, for all of a batch."""

    def __init__(self, texts: Texts) -> None:
        every_key = torch.cat([texts.anchor_keys, texts.document_keys])
        self.keys, numbers = torch.unique(every_key, return_inverse=True)
        anchors, documents = numbers[: len(texts)], numbers[len(texts) :][: len(texts)]
        self.known = torch.unique(anchors * len(self.keys) + documents)

    def pairs(self, anchor_keys: torch.Tensor, document_keys: torch.Tensor) -> torch.Tensor:
        """`[anchors, documents]`: whether a pair of texts is one of anchor and positive, or of twice the same text."""
        anchors, documents = (torch.searchsorted(self.keys, each.contiguous()) for each in (anchor_keys, document_keys))
        pairs = anchors[:, None] * len(self.keys) + documents
        found = self.known[torch.searchsorted(self.known, pairs).clamp(max=len(self.known) - 1)]
        return (found == pairs) | (anchors[:, None] == documents)


def cosent(texts: Texts, rows: slice, *, temperature: float = 0.05) -> Values:
    """CoSENT: log(1 + sum of exp((cos_j - cos_i) / temperature) over all couples of examples with score_i > score_j).

    It is one number for all examples together (Su Jianlin 2022, https://kexue.fm/archives/8847; CoSENTLoss in
    sentence-transformers), multiplied by their count, since a step divides by it. Only the rows from 0 on return it, the others
    return 0. Found by sorting, without the table of all couples: n log n.
    """
    cosines = _cosines(texts)
    if rows.start:
        return cosines.sum() * 0.0, {}
    assert texts.scores is not None
    scores, order = texts.scores.sort(stable=True)
    scaled = cosines[order] / temperature
    below = torch.cat([scaled.new_full((1,), -torch.inf), scaled.logcumsumexp(0)])  # of the k lowest scores, for each k
    lower = below[torch.searchsorted(scores, scores)]  # those whose score is below this one
    is_above = lower > -torch.inf
    couples = torch.cat([scaled.new_zeros(1), (lower - scaled)[is_above]])
    return couples.logsumexp(0) * len(texts), {}


def cosine_regression(texts: Texts, rows: slice) -> Values:
    """Sum over the examples in `rows` of (cosine - score) squared: CosineSimilarityLoss in sentence-transformers."""
    assert texts.scores is not None
    cosines = _cosines(texts)[rows]
    return (cosines - texts.scores[rows].to(cosines.dtype)).square().sum(), {}


def matryoshka(loss: ContrastiveLoss, dimensions: Sequence[int]) -> ContrastiveLoss:
    """The mean of a loss over embeddings cut to their first dimensions (arXiv:2205.13147), for each number of `dimensions`.

    Metrics are those of the largest one. sentence-transformers adds the losses; with a mean the learning rate stays.
    """

    def of_all(texts: Texts, rows: slice) -> Values:
        cut = [
            loss(replace(texts, anchors=texts.anchors[:, :size], documents=texts.documents[:, :size]), rows)
            for size in sorted(dimensions)
        ]
        return torch.stack([value for value, _ in cut]).mean(), cut[-1][1]

    return of_all


def embedding_task(
    splits: Mapping[str, Dataset | IterableDataset], embed: Embed, global_batch_size: int, width: int,
    examples_to_consume: int | None = None, *,
    loss_type: str = "auto", temperature: float = 0.05, two_way: bool = False, false_negative_margin: float | None = None,
    matryoshka_dims: Sequence[int] = (),
) -> tuple[ContrastiveLoss, Metrics]:  # fmt: skip
    """The loss for the rows of tokenized splits, and the metrics that are evaluated.

    An evaluated InfoNCE is the mean over batches of at most the global batch's size, in the order of the rows and as equal as
    they can be, so that it compares with that of training.

    Args:
        embed: embeddings `[texts, width]` of (model, micro-batch).
        examples_to_consume: of the training loader; None where nothing is trained.
        loss_type: info_nce, cosent or cosine; auto: cosent where rows have scores, else info_nce.

    Raises:
        Refusal: a loss without the scores that it needs, embeddings cut to more numbers than they have, global batches of one
            example, which has nothing to be compared with.
    """
    if examples_to_consume is not None and loss_type != "cosine":
        _check_batches(global_batch_size, examples_to_consume)
    if matryoshka_dims and max(matryoshka_dims) > width:
        raise Refusal(f"--matryoshka-dims {max(matryoshka_dims)}: this model's embeddings have {width} numbers. Take fewer.")
    held_out = splits.get("validation", splits.get("train"))
    assert held_out is not None
    has_scores = "score" in next(iter(held_out))
    kind = ("cosent" if has_scores else "info_nce") if loss_type == "auto" else loss_type
    if has_scores != (kind != "info_nce"):
        needed = "rows of sentence1, sentence2 and score" if kind != "info_nce" else "rows of anchor and positive"
        other = "cosent" if has_scores else "info_nce"
        raise Refusal(f"--embedding-loss {kind}: needs {needed}. Take --embedding-loss {other}, or other rows.")
    losses: dict[str, ContrastiveLoss] = {
        "info_nce": partial(
            info_nce, temperature=temperature, two_way=two_way, false_negative_margin=false_negative_margin
        ),
        "cosent": partial(cosent, temperature=temperature),
        "cosine": cosine_regression,
    }  # fmt: skip
    loss = matryoshka(losses[kind], matryoshka_dims) if matryoshka_dims else losses[kind]
    if has_scores:
        return loss, similarity_metrics(embed, matryoshka_dims, partial(_loss_of_scored, loss))
    evaluated = splits["validation"].select_columns(["text_tokens"]) if "validation" in splits else ()
    most_texts = max((len(row["text_tokens"]) for row in evaluated), default=2)
    of_batches = partial(_loss_of_batches, loss, global_batch_size)
    return loss, retrieval_metrics(embed, most_texts, matryoshka_dims, loss_of=of_batches)


def _check_batches(global_batch_size: int, examples_to_consume: int) -> None:
    kind = "a contrastive loss"
    if global_batch_size < 2:
        raise Refusal(f"--global-batch-size {global_batch_size}: {kind} compares examples with each other. Take 64 or more.")
    if examples_to_consume % global_batch_size == 1:
        whole = examples_to_consume // global_batch_size
        other = f"--max-steps {whole}, which leaves it out, or " if whole else ""
        raise Refusal(
            f"the last of {examples_to_consume:,} examples would be a global batch of its own (--global-batch-size "
            f"{global_batch_size}), and {kind} compares examples with each other. Take {other}another --global-batch-size."
        )


def _loss_of_scored(loss: ContrastiveLoss, vectors: np.ndarray, scores: np.ndarray) -> float:
    """Of all pairs of a split at once."""
    numbers = torch.arange(len(vectors))
    anchors, documents = torch.from_numpy(vectors).unbind(1)
    texts = Texts(anchors, documents, numbers, numbers, numbers, torch.from_numpy(scores))
    return float(loss(texts, slice(0, len(numbers)))[0]) / len(numbers)


def _loss_of_batches(
    loss: ContrastiveLoss, size: int, vectors: np.ndarray, keys: np.ndarray, is_there: np.ndarray
) -> float:
    total = 0.0
    for batch in np.array_split(np.arange(len(vectors)), -(-len(vectors) // size)):
        negatives, roles = np.nonzero(is_there[batch][:, 2:])
        places = np.concatenate([np.stack([np.arange(len(batch)), np.ones(len(batch), int)]), [negatives, roles + 2]], 1)
        part, numbers = torch.from_numpy(vectors[batch]), torch.from_numpy(keys[batch])
        texts = Texts(part[:, 0], part[tuple(places)], numbers[:, 0], numbers[tuple(places)], torch.from_numpy(places[0]))
        total += float(loss(texts, slice(0, len(batch)))[0])
    return total / len(vectors)


def _cosines(texts: Texts) -> torch.Tensor:
    return functional.cosine_similarity(texts.anchors, texts.documents[: len(texts)], dim=-1)
