"""Losses of classes: of whole examples (one class, several, or a number), of words, and of the places where an answer is.

Each is a part of a mean over the global batch. That of whole examples is over `totals["examples"]`, or where the rows carry a
`weight` (that of the example's class) over `totals["weight"]`, which is torch's `CrossEntropyLoss(weight, reduction="mean")` on
all of it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from toolkit.data.loading.batch import MicroBatch
from toolkit.metrics.classification import classification_metrics, example_logits
from toolkit.metrics.metric import Metrics
from toolkit.metrics.question_answering import span_logits, span_losses
from toolkit.metrics.spans import IGNORED

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


def classification_loss(
    model: nn.Module, micro_batch: MicroBatch, totals: Mapping[str, float], *, label_smoothing_factor: float = 0.0
) -> Loss:
    """Cross-entropy of one class: model's logits `[batch, classes]`, `labels` `[batch]` whole numbers.

    Label smoothing is torch's: (1 - e) * -log p[y] + e * mean over classes of -log p. With weights, an example's whole loss
    takes the weight of its class; torch weighs each class in the second term by that class's own weight, so the two differ
    when both settings are used.

    Returns the loss, 0-d, and the share of right predictions (unweighted), both parts of a mean over the global batch.
    """
    logits, labels = example_logits(model, micro_batch), micro_batch["labels"]
    losses = functional.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing_factor)
    return _part_of_mean(losses, micro_batch, totals), _share(logits.argmax(-1) == labels, totals)


def multi_label_loss(
    model: nn.Module, micro_batch: MicroBatch, totals: Mapping[str, float], *, label_smoothing_factor: float = 0.0
) -> Loss:
    """Binary cross-entropy of each class, mean over classes: logits and `labels` `[batch, classes]`, labels 0 or 1.

    Label smoothing draws the labels toward a half: y * (1 - e) + e / 2.

    Returns the loss and the share of examples with all classes right.
    """
    logits, labels = example_logits(model, micro_batch), micro_batch["labels"]
    wanted = labels.to(logits.dtype) * (1 - label_smoothing_factor) + label_smoothing_factor / 2
    losses = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(-1)
    return _part_of_mean(losses, micro_batch, totals), _share(((logits > 0) == (labels > 0.5)).all(-1), totals)


def regression_loss(model: nn.Module, micro_batch: MicroBatch, totals: Mapping[str, float]) -> Loss:
    """Squared error of one number: logits `[batch, 1]`, `labels` `[batch]`. Returns the loss and no metric."""
    predictions = example_logits(model, micro_batch).squeeze(-1)
    losses = (predictions - micro_batch["labels"].to(predictions.dtype)).square()
    return _part_of_mean(losses, micro_batch, totals), {}


def _part_of_mean(losses: torch.Tensor, micro_batch: MicroBatch, totals: Mapping[str, float]) -> torch.Tensor:
    if "weight" in micro_batch:
        weight = micro_batch["weight"].to(losses.dtype)
        return (losses * weight).sum() / (totals["weight"] or 1.0)  # a batch of classes of weight 0 only has the loss 0
    return losses.sum() / totals["examples"]


def _share(right: torch.Tensor, totals: Mapping[str, float]) -> dict[str, torch.Tensor]:
    return {"accuracy": right.sum() / totals["examples"]}


def classification_task(
    problem_type: str,
    num_labels: int | None,
    metrics: Sequence[str] | str = (),
    label_smoothing_factor: float = 0.0,
    class_names: Sequence[str] = (),
) -> tuple[Callable[..., Loss], Metrics]:
    """The loss and the metrics of a kind of label: single_label, multi_label or regression, which has no smoothing.
    `class_names`, in the order of their numbers, name the metrics of single classes.

    Class weights have no part in it: they are in the rows, as their `weight`.
    """
    loss_fn: dict[str, Callable[..., Loss]] = {
        "single_label": partial(classification_loss, label_smoothing_factor=label_smoothing_factor),
        "multi_label": partial(multi_label_loss, label_smoothing_factor=label_smoothing_factor),
        "regression": regression_loss,
    }
    return loss_fn[problem_type], classification_metrics(metrics, num_labels, problem_type, class_names)


def token_classification_loss(
    model: nn.Module, micro_batch: MicroBatch, totals: Mapping[str, float], *, label_smoothing_factor: float = 0.0
) -> Loss:
    """This micro-batch's part of the mean over all supervised tokens of the global batch, `totals["tokens"]`.

    Cross-entropy of logits `[batch, length, classes]` and `labels` `[batch, length]`, -100 where a token has no tag (special
    tokens, padding, and the later sub-words of a word). A label is of the token that it is at. Label smoothing is torch's:
    (1 - e) * -log p[y] + e * mean over classes of -log p.

    Returns the loss, 0-d, and the share of supervised tokens whose tag is right. Without a supervised token the loss is a zero
    that still reaches every parameter.
    """
    logits, labels = example_logits(model, micro_batch), micro_batch["labels"]
    losses = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED, label_smoothing=label_smoothing_factor
    )
    right = (logits.argmax(-1) == labels).sum()
    tokens = max(float(totals["tokens"]), 1.0)
    return losses / tokens, {"accuracy": right / tokens}


def question_answering_loss(
    model: nn.Module, micro_batch: MicroBatch, totals: Mapping[str, float]
) -> Loss:
    """Mean over the global batch's windows of (cross-entropy of the start + that of the end) / 2.

    Each is over all tokens of the window, the question's too, and none of the padding. `start_positions` and `end_positions`
    `[windows]` are 0, the first token, where a window doesn't hold the whole answer.

    Returns the loss, 0-d, and the share of windows with both places right, both parts of a mean over the global batch.
    """
    start_logits, end_logits = span_logits(model, micro_batch)
    starts, ends = start_logits.argmax(-1), end_logits.argmax(-1)
    right = (starts == micro_batch["start_positions"]) & (ends == micro_batch["end_positions"])
    losses = span_losses(start_logits, end_logits, micro_batch)
    return losses.sum() / totals["examples"], {"accuracy": right.sum() / totals["examples"]}
