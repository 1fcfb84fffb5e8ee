"""Metrics of numbers (regression): errors from sums over examples, and what needs all of them at once."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from toolkit.metrics.metric import precise_sum

Observed = Mapping[str, Any]  # sums; for what is in `OF_ALL` also all "predictions" and "references" `[examples]`


def number_sums(predictions: torch.Tensor, references: torch.Tensor, num_labels: int = 1) -> dict[str, torch.Tensor]:
    """Sums of errors of predictions and references `[examples]`, in float64."""
    wide = torch.float32 if predictions.device.type == "mps" else torch.float64
    errors = predictions.to(wide) - references.to(wide)
    count = torch.tensor(len(errors), device=errors.device)
    return {"n": count, "squared": precise_sum(errors.square()), "absolute": precise_sum(errors.abs())}


def _mean(name: str) -> Callable[[Observed], float]:
    return lambda sums: float(sums[name]) / float(sums["n"]) if sums["n"] else math.nan


def _deviations(values: np.ndarray) -> np.ndarray:
    """From the mean, float64: exactly 0 for what is constant, and all digits where the mean is large next to the spread.

    Sums of squares over micro-batches would lose them: half of the digits that the mean has more than the spread, twice.
    """
    from_the_first = values.astype(np.float64) - np.float64(values[0])
    return from_the_first - from_the_first.mean()


def r2(observed: Observed) -> float:
    """1 - squared errors / variance, with scikit-learn's conventions where the references are constant."""
    if observed["n"] < 2:
        return math.nan
    variance, squared = float(np.square(_deviations(observed["references"])).sum()), float(observed["squared"])
    return 1.0 - squared / variance if variance else float(squared == 0.0)


def pearson(observed: Observed) -> float:
    """Correlation of predictions and references; not a number where one of them is constant."""
    if not observed["n"]:
        return math.nan
    p, r = (_deviations(observed[name]) for name in ("predictions", "references"))
    lengths = math.sqrt(float(p @ p)) * math.sqrt(float(r @ r))
    return float(p @ r) / lengths if lengths else math.nan


NUMBER_METRICS: dict[str, Callable[[Observed], float]] = {
    "mse": _mean("squared"), "rmse": lambda sums: math.sqrt(_mean("squared")(sums)), "mae": _mean("absolute"),
    "r2": r2, "pearson": pearson,
}  # fmt: skip
OF_ALL = ("r2", "pearson")
