"""Losses of whole examples against torch's own on the whole global batch."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from toolkit.losses.classification import classification_loss, multi_label_loss, regression_loss

FEATURES, CLASSES, EXAMPLES = 5, 4, 11
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)


class Scorer(nn.Module):
    """The shape of a transformers classifier: keyword arguments in, an object with logits out."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(FEATURES, outputs).double()

    def forward(self, features: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.linear(features))


def features() -> torch.Tensor:
    return torch.randn(EXAMPLES, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def classes() -> torch.Tensor:
    return torch.randint(0, CLASSES, (EXAMPLES,), generator=torch.Generator().manual_seed(2))


def several() -> torch.Tensor:
    return (torch.rand(EXAMPLES, CLASSES, generator=torch.Generator().manual_seed(3)) < 0.4).float()


def numbers() -> torch.Tensor:
    return torch.randn(EXAMPLES, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def split(size: int, **columns: torch.Tensor) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Micro-batches of `size` examples (the last one shorter) and the totals of all."""
    totals = {"examples": float(EXAMPLES), **({"weight": float(columns["weight"].sum())} if "weight" in columns else {})}
    return [{name: values[i : i + size] for name, values in columns.items()} for i in range(0, EXAMPLES, size)], totals


CASES: dict[str, tuple[int, Callable[[], torch.Tensor], Callable[..., Any], dict[str, float], nn.Module]] = {
    "one class": (CLASSES, classes, classification_loss, {}, nn.CrossEntropyLoss()),
    "one class, smoothed": (
        CLASSES, classes, classification_loss, {"label_smoothing_factor": 0.1}, nn.CrossEntropyLoss(label_smoothing=0.1)
    ),
    "one class, weighted": (CLASSES, classes, classification_loss, {}, nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)),
    "several classes": (CLASSES, several, multi_label_loss, {}, nn.BCEWithLogitsLoss()),
    "a number": (1, numbers, regression_loss, {}, nn.MSELoss()),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 4, 11])
@pytest.mark.parametrize("case", CASES)
def test_parts_of_micro_batches_add_up_to_the_loss_of_torch_on_the_whole_batch(case: str, size: int) -> None:
    """Loss and gradient in float64; micro-batches of 1, 3, 4 and 11 of 11 examples.

    Fails when: a micro-batch is divided by its own size, or by its own sum of weights.
    """
    outputs, labels, loss_fn, settings, reference = CASES[case]
    columns = {"features": features(), "labels": labels()}
    if "weighted" in case:
        columns["weight"] = CLASS_WEIGHTS[columns["labels"]].float()
    model, wanted_model = Scorer(outputs), Scorer(outputs)
    micro_batches, totals = split(size, **columns)
    losses = [loss_fn(model, micro_batch, totals, **settings)[0] for micro_batch in micro_batches]
    total = torch.stack(losses).sum()
    total.backward()
    logits = wanted_model(columns["features"]).logits.squeeze(-1)
    wanted = reference(logits, columns["labels"].double() if columns["labels"].is_floating_point() else columns["labels"])
    wanted.backward()
    assert total.item() == pytest.approx(wanted.item(), rel=1e-10)
    torch.testing.assert_close(model.linear.weight.grad, wanted_model.linear.weight.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("size", [1, 4, 11])
def test_accuracy_while_training_is_that_of_the_whole_batch(size: int) -> None:
    """One class: share of right classes. Several: share of examples with all classes right.

    Fails when: the mean of the micro-batch is taken instead of its part of the whole.
    """
    for outputs, labels, loss_fn in ((CLASSES, classes(), classification_loss), (CLASSES, several(), multi_label_loss)):
        model = Scorer(outputs)
        micro_batches, totals = split(size, features=features(), labels=labels)
        found = sum(loss_fn(model, micro_batch, totals)[1]["accuracy"].item() for micro_batch in micro_batches)
        logits = model(features()).logits
        right = 0
        for scores, label in zip(logits.tolist(), labels.tolist(), strict=True):
            if isinstance(label, list):
                right += all((score > 0) == (wanted == 1) for score, wanted in zip(scores, label, strict=True))
            else:
                right += max(range(CLASSES), key=scores.__getitem__) == label
        assert found == pytest.approx(right / EXAMPLES, rel=1e-6)


def test_smoothing_of_several_classes_draws_labels_toward_a_half() -> None:
    """Reference: torch's BCE on labels 0.05 and 0.95.

    Fails when: e is not halved.
    """
    model = Scorer(CLASSES)
    micro_batches, totals = split(11, features=features(), labels=several())
    loss, _ = multi_label_loss(model, micro_batches[0], totals, label_smoothing_factor=0.1)
    labels = torch.where(several() > 0, 0.95, 0.05).double()
    wanted = nn.functional.binary_cross_entropy(torch.sigmoid(model(features()).logits), labels)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_a_smoothed_and_weighted_example_counts_by_the_weight_of_its_class() -> None:
    """The documented difference from torch: its whole loss, smoothing included, takes that one weight.

    Fails when: the weight is applied to the first term only.
    """
    model, labels = Scorer(CLASSES), classes()
    weight = CLASS_WEIGHTS[labels]
    micro_batches, totals = split(3, features=features(), labels=labels, weight=weight)
    found = sum(classification_loss(model, m, totals, label_smoothing_factor=0.2)[0].item() for m in micro_batches)
    log_p = model(features()).logits.log_softmax(-1)
    each = [-0.8 * log_p[i, y].item() - 0.2 * log_p[i].mean().item() for i, y in enumerate(labels.tolist())]
    wanted = sum(w * x for w, x in zip(weight.tolist(), each, strict=True)) / sum(weight.tolist())
    assert found == pytest.approx(wanted, rel=1e-10)


def test_a_batch_of_weightless_examples_has_the_loss_zero() -> None:
    """Fails when: the sum is divided by a total weight of 0."""
    micro_batches, totals = split(11, features=features(), labels=classes(), weight=torch.zeros(EXAMPLES))
    assert classification_loss(Scorer(CLASSES), micro_batches[0], totals)[0].item() == 0.0
