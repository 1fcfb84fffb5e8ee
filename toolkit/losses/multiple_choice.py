"""Multiple choice: the cross-entropy over the choices of each question, of any number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from toolkit.data.loading.batch import MicroBatch
from toolkit.losses.ranking import score_lists
from toolkit.metrics.metric import Metrics, precise_sum, ratio


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
    scores, labels, is_choice = score_lists(_one_choice_a_row(model), micro_batch)
    is_right = labels == 1
    logs = scores.masked_fill(~is_choice, -math.inf).log_softmax(-1)
    others = scores.masked_fill(~is_choice | is_right, -math.inf).amax(-1)
    of_right = scores.masked_fill(~is_right, 0.0).sum(-1)
    return -logs.masked_fill(~is_right, 0.0).sum(-1), (of_right > others).to(scores.dtype)


def _one_choice_a_row(model: nn.Module) -> Callable[..., Any]:
    """The model as one that scores rows: it takes `[questions, choices, length]`, and questions need not have equally many."""
    return lambda **inputs: model(**{name: values[:, None] for name, values in inputs.items()})
