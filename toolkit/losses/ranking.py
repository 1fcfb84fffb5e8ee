"""Losses of a cross-encoder: how the scores of a query's documents, or of a question's choices, must lie by their labels.

An example is a query with its list of documents, so a list is never cut, and every loss is a sum over lists. What it is divided
by is known from the labels before any forward pass: the documents, the comparisons (pairs of documents of one list whose labels
differ) or the lists of the global batch. So parts add up for any split of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from toolkit.data.loading.batch import MicroBatch, model_inputs, precise
from toolkit.metrics.metric import Metrics, precise_sum, ratio
from toolkit.metrics.retrieval import ranking_metrics, ranks_in_lists


def ranking_loss(
    model: nn.Module,
    micro_batch: MicroBatch,
    totals: Mapping[str, float],
    *,
    ranking_loss: str = "lambda",
    positive_weight: float = 1.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the mean loss over the global batch.

    Args:
        micro_batch: that of `collate_lists`.
        totals: of the global batch, "documents" for bce, "comparisons" for ranknet, margin_mse and lambda, "examples", which
            are lists, for listnet.
        ranking_loss: bce, ranknet, margin_mse, listnet or lambda; each has a function here.
        positive_weight: of bce, how often a relevant document counts.

    Returns the loss, 0-d, and `precision_at_1`: the part of the share of lists whose highest score is of a relevant document.
    """
    losses, unit = _LOSSES[ranking_loss]
    scores, labels, is_document = score_lists(model, micro_batch)
    more = {"positive_weight": positive_weight} if ranking_loss == "bce" else {}
    # a global batch in which nothing can be compared has the loss 0
    loss = losses(scores, labels, is_document, **more).sum() / (totals[unit] or 1.0)
    return loss, {"precision_at_1": _first_is_relevant(scores.detach(), labels, is_document).sum() / totals["examples"]}


def ranking_list_metrics(*, ranking_loss: str = "lambda", positive_weight: float = 1.0) -> Metrics:
    """Exact means over the lists of a split: `loss`, as in training, `mrr`, `map`, and `recall` and `ndcg` at 1 and 10.

    They are those of `toolkit.metrics.retrieval`; documents with a label above 0 are relevant, and the label is the gain.
    """
    losses, unit = _LOSSES[ranking_loss]
    more = {"positive_weight": positive_weight} if ranking_loss == "bce" else {}

    def update(model: nn.Module, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        scores, labels, is_document = score_lists(model, micro_batch)
        lists = torch.arange(len(scores), device=scores.device)[:, None].expand_as(scores)
        of_documents = (values[is_document].double().cpu().numpy() for values in (scores, labels, lists))
        means = ranking_metrics(ranks_in_lists(*of_documents))
        units = {
            "documents": is_document.sum(), "comparisons": _is_better(labels, is_document).sum(), "examples": len(scores)
        }  # fmt: skip
        sums = {name: torch.tensor(value * len(scores), dtype=torch.float64) for name, value in means.items()}
        return {
            "loss": precise_sum(losses(scores, labels, is_document, **more)).cpu(),
            "loss_total": torch.as_tensor(units[unit]).double().cpu(),
            "lists": torch.tensor(float(len(scores)), dtype=torch.float64),
            **sums,
        }

    def finalize(sums: dict[str, np.ndarray]) -> dict[str, float]:
        of_lists = {name: ratio(value, sums["lists"]) for name, value in sums.items() if name not in _NOT_MEANS}
        return {"loss": ratio(sums["loss"], sums["loss_total"]), **of_lists}

    return Metrics(update=update, finalize=finalize)


def score_lists(model: Callable[..., Any], micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores and labels `[lists, most documents]`, 0 where a list has no more, and where it has; float32 or wider.

    A score is the one number that a model with a classification head of one label gives for the query with the document.
    """
    inputs = model_inputs(micro_batch)
    if torch.distributed.is_initialized():  # where models are wrapped, and ranks must have as many forward passes
        scores = model(**inputs).logits.squeeze(-1)
    else:
        scores = _scores_by_length(model, inputs, micro_batch["by_length"], micro_batch["groups"])
    scores, counts, most = precise(scores), micro_batch["documents"], micro_batch["most_documents"]
    is_document = torch.arange(most, device=scores.device)[None] < counts[:, None]

    def in_lists(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(is_document.shape).masked_scatter(is_document, values)

    return in_lists(scores), in_lists(micro_batch["labels"].to(scores.dtype)), is_document


def _scores_by_length(
    model: Callable[..., Any], inputs: dict[str, torch.Tensor], by_length: torch.Tensor, groups: list[tuple[int, int]]
) -> torch.Tensor:
    """Scores `[documents]`, of documents of like length at a time: a list has short and long ones, and padding takes time."""
    sizes = [size for size, _ in groups]
    scores = [
        model(**{name: values[rows, :longest] for name, values in inputs.items()}).logits.squeeze(-1)
        for rows, (_, longest) in zip(by_length.split(sizes), groups, strict=True)
    ]
    return torch.cat(scores)[by_length.argsort()]


def bce_losses(
    scores: torch.Tensor, labels: torch.Tensor, is_document: torch.Tensor, positive_weight: float = 1.0
) -> torch.Tensor:
    """Pointwise, `[lists]`: the sum over documents of - w y log σ(s) - (1 - y) log(1 - σ(s)), labels y from 0 to 1."""
    weight = scores.new_tensor(positive_weight)
    each = functional.binary_cross_entropy_with_logits(scores, labels, pos_weight=weight, reduction="none")
    return (each * is_document).sum(-1)


def ranknet_losses(scores: torch.Tensor, labels: torch.Tensor, is_document: torch.Tensor) -> torch.Tensor:
    """Pairwise, `[lists]`: the sum of -log2 σ(s_i - s_j) over comparisons, y_i > y_j (Burges et al. 2005, in bits).

    https://icml.cc/Conferences/2005/proceedings/papers/012_LearningToRank_BurgesEtAl.pdf
    """
    return _sum_of_comparisons(_bits_of_order(scores), labels, is_document)


def margin_mse_losses(scores: torch.Tensor, labels: torch.Tensor, is_document: torch.Tensor) -> torch.Tensor:
    """Pairwise, `[lists]`: the sum of ((s_i - s_j) - (y_i - y_j))² over comparisons, y_i > y_j.

    Labels are the scores of a teacher, such as a larger cross-encoder, or grades (Hofstätter et al., arXiv:2010.02666).
    """
    return _sum_of_comparisons((_differences(scores) - _differences(labels)).square(), labels, is_document)


def listnet_losses(scores: torch.Tensor, labels: torch.Tensor, is_document: torch.Tensor) -> torch.Tensor:
    """Listwise, `[lists]`: the cross-entropy of the softmax of a list's scores to that of its labels (Cao et al. 2007)."""
    absent = ~is_document
    wanted = labels.masked_fill(absent, -math.inf).softmax(-1)
    logs = scores.masked_fill(absent, -math.inf).log_softmax(-1).masked_fill(absent, 0.0)
    return -(wanted * logs).sum(-1)


def lambda_losses(scores: torch.Tensor, labels: torch.Tensor, is_document: torch.Tensor, mu: float = 10.0) -> torch.Tensor:
    """Listwise, `[lists]`: RankNet's comparisons, each weighted by what it is worth in nDCG, without gradient.

    The weight is NDCG-Loss2++ of the LambdaLoss framework (Wang et al., CIKM 2018, https://doi.org/10.1145/3269206.3271784,
    section 5.2): (μ |1/D(|r_i - r_j|) - 1/D(|r_i - r_j| + 1)| + |1/D(r_i) - 1/D(r_j)|) |G_i - G_j|, the second part of which
    is LambdaRank's. r are ranks by the scores, D(r) = log2(1 + r), G = (2^y - 1) / the best DCG of the list, labels below 0
    counting as 0.
    """
    with torch.no_grad():
        order = scores.masked_fill(~is_document, -math.inf).argsort(dim=-1, descending=True, stable=True)
        places = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
        ranks = torch.empty_like(scores).scatter(-1, order, places.expand_as(scores))
        gains = (2 ** labels.clamp(min=0) - 1) * is_document
        best = (gains.sort(-1, descending=True).values / torch.log2(1 + places)).sum(-1, keepdim=True)
        gains = gains / best.clamp(min=1e-10)
        distance = _differences(ranks).abs().clamp(min=1)  # of a document to itself nothing is compared
        discount = 1 / torch.log2(1 + ranks)
        smooth = (1 / torch.log2(1 + distance) - 1 / torch.log2(2 + distance)).abs()
        weights = (mu * smooth + _differences(discount).abs()) * _differences(gains).abs()
    return _sum_of_comparisons(weights * _bits_of_order(scores), labels, is_document)


_LOSSES: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "bce": (bce_losses, "documents"),
    "ranknet": (ranknet_losses, "comparisons"),
    "margin_mse": (margin_mse_losses, "comparisons"),
    "listnet": (listnet_losses, "examples"),
    "lambda": (lambda_losses, "comparisons"),
}
_NOT_MEANS = ("loss", "loss_total", "lists")


def _differences(values: torch.Tensor) -> torch.Tensor:
    """v_i - v_j, `[lists, documents, documents]`."""
    return values[:, :, None] - values[:, None, :]


def _bits_of_order(scores: torch.Tensor) -> torch.Tensor:
    """-log2 of the probability that i is before j."""
    return functional.softplus(-_differences(scores)) / math.log(2)


def _is_better(labels: torch.Tensor, is_document: torch.Tensor) -> torch.Tensor:
    """Whether document i has a greater label than document j."""
    return (_differences(labels) > 0) & is_document[:, :, None] & is_document[:, None, :]


def _sum_of_comparisons(values: torch.Tensor, labels: torch.Tensor, is_document: torch.Tensor) -> torch.Tensor:
    return values.masked_fill(~_is_better(labels, is_document), 0.0).sum((-2, -1))


def _first_is_relevant(scores: torch.Tensor, labels: torch.Tensor, is_document: torch.Tensor) -> torch.Tensor:
    """`[lists]`, 1 where the highest score is of a relevant document, else 0; of equal scores the least relevant counts."""
    scores = scores.masked_fill(~is_document, -math.inf)
    is_first = scores == scores.max(-1, keepdim=True).values
    return (labels.masked_fill(~is_first, math.inf).amin(-1) > 0).to(scores.dtype)


def multiple_choice_loss(
    model: nn.Module, micro_batch: MicroBatch, totals: Mapping[str, float]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the mean of -log softmax(scores)[right] over the questions of the global batch.

    Args:
        model: one of transformers' classes for multiple choice.
        micro_batch: that of `collate_lists`, with the label 1 for the right choice of each question and 0 for the others.
        totals: of the global batch, "examples", which are questions.

    Returns the loss, 0-d, and `accuracy`: the part of the share of questions whose right choice has the highest score.
    """
    losses, is_right = _losses_and_hits(model, micro_batch)
    return losses.sum() / totals["examples"], {"accuracy": is_right.detach().sum() / totals["examples"]}


def _update(model: nn.Module, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
    losses, is_right = _losses_and_hits(model, micro_batch)
    return {"loss": precise_sum(losses), "right": precise_sum(is_right), "questions": precise_sum(torch.ones_like(losses))}


def _finalize(sums: dict[str, np.ndarray]) -> dict[str, float]:
    return {"loss": ratio(sums["loss"], sums["questions"]), "accuracy": ratio(sums["right"], sums["questions"])}


multiple_choice_metrics = Metrics(update=_update, finalize=_finalize)
"""Exact over the questions of a split: `loss`, as in training, and `accuracy`."""


def _losses_and_hits(model: nn.Module, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """`[questions]`: the loss of each, and 1 where the right choice is above all others; a tie is wrong."""
    scores, labels, is_choice = score_lists(one_choice_a_row(model), micro_batch)
    is_right = labels == 1
    logs = scores.masked_fill(~is_choice, -math.inf).log_softmax(-1)
    others = scores.masked_fill(~is_choice | is_right, -math.inf).amax(-1)
    of_right = scores.masked_fill(~is_right, 0.0).sum(-1)
    return -logs.masked_fill(~is_right, 0.0).sum(-1), (of_right > others).to(scores.dtype)


def one_choice_a_row(model: nn.Module) -> Callable[..., Any]:
    """The model as one that scores rows: it takes `[questions, choices, length]`, and questions need not have equally many."""
    return lambda **inputs: model(**{name: values[:, None] for name, values in inputs.items()})
