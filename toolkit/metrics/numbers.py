"""Figures about numbers (regression) from sums over examples."""

import math
from collections.abc import Callable

import numpy as np
import torch

from toolkit.metrics.metric import precise_sum

Sums = dict[str, np.ndarray]
CONSTANT = 1e-13  # a variance below this share of the mean square is rounding


def number_sums(predictions: torch.Tensor, references: torch.Tensor, num_labels: int = 1) -> dict[str, torch.Tensor]:
    """Moments of predictions and references `[examples]`, in float64.

    Raw moments lose digits where the mean is large beside the spread: six of fifteen for a ratio of 1,000.
    """
    wide = torch.float32 if predictions.device.type == "mps" else torch.float64
    p, r = predictions.to(wide), references.to(wide)
    moments = {"p": p, "r": r, "pp": p * p, "rr": r * r, "pr": p * r, "squared": (p - r) ** 2, "absolute": (p - r).abs()}
    return {"n": torch.tensor(len(r), device=r.device), **{name: precise_sum(values) for name, values in moments.items()}}


def _mean(name: str) -> Callable[[Sums], float]:
    return lambda sums: float(sums[name]) / float(sums["n"]) if sums["n"] else math.nan


def _covariance(sums: Sums, a: str, b: str) -> float:
    """n times the covariance; exactly 0 for what is constant but for rounding."""
    n = float(sums["n"])
    product = float(sums[a + b])
    value = product - float(sums[a]) * float(sums[b]) / n if n else 0.0
    return 0.0 if a == b and value <= CONSTANT * product else value


def r2(sums: Sums) -> float:
    """1 - squared errors / variance, with scikit-learn's conventions where the references are constant."""
    if sums["n"] < 2:
        return math.nan
    variance, squared = _covariance(sums, "r", "r"), float(sums["squared"])
    return 1.0 - squared / variance if variance else float(squared == 0.0)


def pearson(sums: Sums) -> float:
    """Correlation of predictions and references; not a number where one of them is constant."""
    variances = _covariance(sums, "p", "p") * _covariance(sums, "r", "r")
    return _covariance(sums, "p", "r") / math.sqrt(variances) if variances else math.nan


NUMBER_FIGURES: dict[str, Callable[[Sums], float]] = {
    "mse": _mean("squared"), "rmse": lambda sums: math.sqrt(_mean("squared")(sums)), "mae": _mean("absolute"),
    "r2": r2, "pearson": pearson,
}  # fmt: skip
