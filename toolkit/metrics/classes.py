"""Metrics of classes from counts: one class an example (a confusion matrix), or several (counts for each class).

Definitions are scikit-learn's, with its defaults, so that metrics can be compared: a macro average is over the classes that
occur, as a reference or as a prediction; a precision or recall of nothing is 0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

Metric = Callable[["Counts"], float | list[float]]


def class_sums(predictions: torch.Tensor, references: torch.Tensor, num_labels: int) -> dict[str, torch.Tensor]:
    """The confusion matrix `[classes, classes]`, references by predictions, of classes `[examples]`."""
    cells = references.long() * num_labels + predictions.long()
    counts = torch.zeros(num_labels * num_labels, dtype=torch.int64, device=cells.device)
    return {"confusion": counts.index_add_(0, cells, torch.ones_like(cells)).view(num_labels, num_labels)}


def label_sums(predictions: torch.Tensor, references: torch.Tensor, num_labels: int) -> dict[str, torch.Tensor]:
    """Of 0/1 `[examples, classes]`: true positives, predictions and references `[classes]`, and examples wholly right."""
    predictions, references = predictions.long(), references.long()
    return {
        "hits": (predictions * references).sum(0),
        "predicted": predictions.sum(0),
        "actual": references.sum(0),
        "exact": (predictions == references).all(-1).sum(),
        "examples": torch.tensor(len(references), device=references.device),
    }


@dataclass(frozen=True)
class Counts:
    """`hits`, `predicted`, `actual`: integers `[classes]`; `exact`: examples wholly right; `occurring`: classes to average."""

    hits: np.ndarray
    predicted: np.ndarray
    actual: np.ndarray
    exact: int
    examples: int
    occurring: np.ndarray


def counts_of_classes(sums: dict[str, np.ndarray]) -> Counts:
    confusion = np.asarray(sums["confusion"]).astype(np.int64)
    predicted, actual, hits = confusion.sum(0), confusion.sum(1), np.diag(confusion)
    return Counts(hits, predicted, actual, int(hits.sum()), int(confusion.sum()), predicted + actual > 0)


def counts_of_labels(sums: dict[str, np.ndarray]) -> Counts:
    hits, predicted, actual = (np.asarray(sums[name]).astype(np.int64) for name in ("hits", "predicted", "actual"))
    return Counts(hits, predicted, actual, int(sums["exact"]), int(sums["examples"]), np.ones(len(hits), dtype=bool))


def accuracy(counts: Counts) -> float:
    """Share of examples that are wholly right."""
    return counts.exact / counts.examples if counts.examples else math.nan


def balanced_accuracy(counts: Counts) -> float:
    """Mean recall over the classes that have examples."""
    there = counts.actual > 0
    return float(np.mean(counts.hits[there] / counts.actual[there])) if there.any() else math.nan


def matthews_correlation(counts: Counts) -> float:
    """Gorodkin's R_K (2004) for any number of classes; 0 where references or predictions are all of one class."""
    examples, predicted, actual = counts.examples, counts.predicted, counts.actual
    covariance = counts.exact * examples - int(predicted @ actual)
    variances = (examples**2 - int(predicted @ predicted)) * (examples**2 - int(actual @ actual))
    return covariance / math.sqrt(variances) if variances else 0.0


def _divided(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros(np.shape(part)), where=np.asarray(whole) > 0)


Score = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # of hits, predicted and actual examples of each class


def _scores(score: Score, counts: Counts) -> np.ndarray:
    return score(counts.hits, counts.predicted, counts.actual)


def _averages(name: str, score: Score) -> dict[str, Metric]:
    """The plain name is the macro average; `_binary` is the score of class 1 of two."""

    def macro(counts: Counts) -> float:
        return float(_scores(score, counts)[counts.occurring].mean()) if counts.occurring.any() else math.nan

    def micro(counts: Counts) -> float:
        return float(score(counts.hits.sum(), counts.predicted.sum(), counts.actual.sum()))

    def weighted(counts: Counts) -> float:
        return float(_divided(_scores(score, counts) @ counts.actual, counts.actual.sum()))

    def binary(counts: Counts) -> float:
        return float(_scores(score, counts)[1])

    def per_class(counts: Counts) -> list[float]:
        return [float(value) for value in _scores(score, counts)]

    return {
        name: macro, f"{name}_macro": macro, f"{name}_micro": micro, f"{name}_weighted": weighted,
        f"{name}_binary": binary, f"{name}_per_class": per_class,
    }  # fmt: skip


def named(name: str, value: float | list[float], classes: Sequence[str] = ()) -> dict[str, float]:
    """A metric under its name; of `f1_per_class` each as `f1_class_business`, without white space, which ends a name on a
    progress line; the class's number where no name is known, or two names would become one."""
    if not isinstance(value, list):
        return {name: value}
    titles = ["_".join(each.split()) for each in classes]
    if len(set(titles)) != len(value):
        titles = [str(number) for number in range(len(value))]
    return {f"{name.removesuffix('_per_class')}_class_{title}": each for title, each in zip(titles, value, strict=True)}


_SHARED: dict[str, Metric] = {
    "accuracy": accuracy,
    **_averages("precision", lambda hits, predicted, actual: _divided(hits, predicted)),
    **_averages("recall", lambda hits, predicted, actual: _divided(hits, actual)),
    **_averages("f1", lambda hits, predicted, actual: _divided(2 * hits, predicted + actual)),
}  # fmt: skip
CLASS_METRICS: dict[str, Metric] = {
    **_SHARED, "balanced_accuracy": balanced_accuracy, "matthews_correlation": matthews_correlation,
}  # fmt: skip
LABEL_METRICS: dict[str, Metric] = {name: metric for name, metric in _SHARED.items() if not name.endswith("_binary")}


def area_under_curve(scores: np.ndarray, positive: np.ndarray) -> float:
    """Share of couples of a positive and a negative in which the positive scores higher, ties counting half.

    From mean ranks (Mann and Whitney 1947). Not a number where one of the two kinds is missing.
    """
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return math.nan
    return float((ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))
