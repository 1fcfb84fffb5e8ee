"""Metrics of whole examples: one class, several classes, or a number."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from toolkit.config import Refusal
from toolkit.config.conditions import USUAL_METRICS
from toolkit.data.loading.batch import MicroBatch, model_inputs, precise
from toolkit.metrics.classes import (
    CLASS_METRICS,
    LABEL_METRICS,
    class_sums,
    counts_of_classes,
    counts_of_labels,
    label_sums,
    named,
)
from toolkit.metrics.external import External, MetricName, flat_metrics, load_metric, names_of, title_of
from toolkit.metrics.metric import Metrics, precise_sum, ratio
from toolkit.metrics.retrieval import deviations, pearson


def example_logits(model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
    """The model's logits `[batch, classes]`, of token classification `[batch, length, classes]`, in float32 (float64 stays)."""
    return precise(model(**model_inputs(micro_batch)).logits)


Observed = Mapping[str, Any]  # sums; for what is in `OF_ALL` also all "predictions" and "references" `[examples]`


def number_sums(predictions: torch.Tensor, references: torch.Tensor, num_labels: int = 1) -> dict[str, torch.Tensor]:
    """Sums of errors of predictions and references `[examples]`, in float64."""
    wide = torch.float32 if predictions.device.type == "mps" else torch.float64
    errors = predictions.to(wide) - references.to(wide)
    count = torch.tensor(len(errors), device=errors.device)
    return {"n": count, "squared": precise_sum(errors.square()), "absolute": precise_sum(errors.abs())}


def _mean(name: str) -> Callable[[Observed], float]:
    return lambda sums: float(sums[name]) / float(sums["n"]) if sums["n"] else math.nan


def r2(observed: Observed) -> float:
    """1 - squared errors / variance, with scikit-learn's conventions where the references are constant."""
    if observed["n"] < 2:
        return math.nan
    variance, squared = float(np.square(deviations(observed["references"])).sum()), float(observed["squared"])
    return 1.0 - squared / variance if variance else float(squared == 0.0)


NUMBER_METRICS: dict[str, Callable[[Observed], float]] = {
    "mse": _mean("squared"), "rmse": lambda sums: math.sqrt(_mean("squared")(sums)), "mae": _mean("absolute"),
    "r2": r2, "pearson": lambda observed: pearson(observed["predictions"], observed["references"]),
}  # fmt: skip
OF_ALL = ("r2", "pearson")


@dataclass(frozen=True)
class _Problem:
    """What an evaluation needs of a kind of label."""

    losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # logits, labels -> [batch]
    predict: Callable[[torch.Tensor], torch.Tensor]  # logits -> predictions
    sums: Callable[[torch.Tensor, torch.Tensor, int], dict[str, torch.Tensor]]  # predictions, references, classes
    read: Callable[[dict[str, np.ndarray]], Any]  # sums -> what the metrics are made from
    metrics: Mapping[str, Callable[[Any], float | list[float]]]
    trial: Callable[[int], tuple[list[Any], list[Any]]]  # two predictions and their references, for a new metric
    of_all: tuple[str, ...] = ()  # metrics that need all predictions and references at once, not sums


_PROBLEMS: dict[str, _Problem] = {
    "single_label": _Problem(
        losses=lambda logits, labels: functional.cross_entropy(logits, labels, reduction="none"),
        predict=lambda logits: logits.argmax(-1),
        sums=class_sums, read=counts_of_classes, metrics=CLASS_METRICS,
        trial=lambda classes: ([0, classes - 1], [0, classes - 1]),
    ),
    "multi_label": _Problem(
        losses=lambda logits, labels: (
            functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(-1)
        ),
        predict=lambda logits: (logits > 0).long(),
        sums=label_sums, read=counts_of_labels, metrics=LABEL_METRICS,
        trial=lambda classes: ([[0] * classes, [1] * classes],) * 2,
    ),
    "regression": _Problem(
        losses=lambda logits, labels: (logits.squeeze(-1) - labels.to(logits.dtype)).square(),
        predict=lambda logits: logits.squeeze(-1),
        sums=number_sums, read=lambda sums: sums, metrics=NUMBER_METRICS,
        trial=lambda classes: ([0.0, 1.0], [0.0, 1.0]), of_all=OF_ALL,
    ),
}  # fmt: skip


def classification_metrics(
    names: Sequence[MetricName] | MetricName, num_labels: int | None, problem_type: str = "single_label",
    class_names: Sequence[str] = (),
) -> Metrics:  # fmt: skip
    """Metrics by name for examples with labels; "loss" is always among them. Without a name the usual ones
    (`USUAL_METRICS`): accuracy and F1, of numbers mse, mae and r2.

    Built in, as sums: for one class `accuracy`, `balanced_accuracy`, `matthews_correlation` and `precision`, `recall`, `f1`
    (macro averages; also `f1_micro`, `f1_weighted`, `f1_binary` and `f1_per_class`: `f1_class_business`, if `class_names` are
    given in the order of their numbers, else `f1_class_0`); for several classes the same without `balanced_accuracy`,
    `matthews_correlation` and `_binary`; for numbers `mse`, `rmse`, `mae`, `r2`, `pearson`.
    `r2` and `pearson` are of all predictions at once: sums would lose their digits where the mean is large.
    Any other name is a module of `evaluate`, by name or path; a module or combination, or a function
    `f(predictions, references) -> dict` may be given in place of a name. These get all predictions at once too: then
    they are gathered, one small row an example.

    The loss is the training loss without label smoothing, weighted where the rows are.

    Raises:
        Refusal: an unknown metric, or one that is for another kind of label.
    """
    assert num_labels is not None  # as transformers types it; a model with a head of classes has a number
    problem, names = _PROBLEMS[problem_type], names_of(names) or USUAL_METRICS[problem_type]
    built_in = [name for name in names if isinstance(name, str) and name in problem.metrics]
    for name in built_in:
        if name.endswith("_binary") and num_labels != 2:
            raise Refusal(f"--metrics {name}: for two classes, and here are {num_labels}. Type {name.removesuffix('_binary')}.")
    external = [(title_of(name), _external(name, num_labels, problem_type)) for name in names if name not in built_in]

    def rows(model: nn.Module, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        logits, labels = example_logits(model, micro_batch), micro_batch["labels"]
        losses = problem.losses(logits, labels)
        weight = micro_batch["weight"].to(losses.dtype) if "weight" in micro_batch else torch.ones_like(losses)
        return {"loss": losses * weight, "weight": weight, "predictions": problem.predict(logits), "references": labels}

    def summed(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        counted = problem.sums(rows["predictions"], rows["references"], num_labels)
        return {"loss": precise_sum(rows["loss"]), "weight": precise_sum(rows["weight"]), **counted}

    def from_sums(sums: dict[str, Any]) -> dict[str, float]:
        result, read = {"loss": ratio(sums["loss"], sums["weight"])}, problem.read(sums)
        for name in built_in:
            result |= named(name, problem.metrics[name](read), class_names)
        return result

    def from_rows(observed: dict[str, np.ndarray]) -> dict[str, float]:
        tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in observed.items()}
        sums = {name: value.numpy() for name, value in summed(tensors).items()}
        rows_too = {name: observed[name] for name in ("predictions", "references") if problem.of_all}
        result = from_sums(sums | rows_too)
        for title, compute in external:
            result.update(flat_metrics(title, compute(observed["predictions"], observed["references"]), result))
        return result

    if external or set(problem.of_all).intersection(built_in):
        return Metrics(update=None, finalize=from_rows, gather=rows)
    return Metrics(update=lambda model, micro_batch: summed(rows(model, micro_batch)), finalize=from_sums)


def _external(name: MetricName, num_labels: int, problem_type: str) -> External:
    problem = _PROBLEMS[problem_type]
    elsewhere = [kind for kind, other in _PROBLEMS.items() if isinstance(name, str) and name in other.metrics]
    if elsewhere:
        raise Refusal(
            f"--metrics {name}: for --problem-type {' and '.join(elsewhere)}, and this is {problem_type}. "
            f"Type one of: {', '.join(problem.metrics)}."
        )
    return load_metric(name, problem.metrics, problem.trial(num_labels))
