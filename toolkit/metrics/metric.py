"""What a metric is: sums over micro-batches and a finalizer, or small rows of all examples and a finalizer."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import SupportsFloat

import numpy as np
import torch
from torch import nn

from toolkit.data.loading.batch import MicroBatch

Observe = Callable[[nn.Module, MicroBatch], dict[str, torch.Tensor]]
Finalize = Callable[[dict[str, np.ndarray]], dict[str, float]]


@dataclass(frozen=True)
class Metrics:
    """How to evaluate a model. Exactly one of `update` and `gather` observes the micro-batches.

    `update(model, micro_batch)`: sums over the micro-batch, each a tensor of fixed shape, float64 or integer, such as a
    confusion matrix `[classes, classes]`. They are added over micro-batches and ranks, so that no metric depends on how
    the examples were cut.

    `gather(model, micro_batch)`: small rows, one for each example (first dimension), for a metric that needs all
    predictions at once. They are collected in the order of the examples' indices.

    `finalize(observed)`: metrics by name, "loss" always among them, from the sums or from all rows, as arrays.
    """

    update: Observe | None
    finalize: Finalize
    gather: Observe | None = None

    def __post_init__(self) -> None:
        if (self.update is None) == (self.gather is None):
            raise ValueError("Metrics observe by update or by gather: give one of the two.")

    def __repr__(self) -> str:
        observe = self.update or self.gather
        return f"Metrics({'update' if self.update else 'gather'}: {getattr(observe, '__qualname__', type(observe).__name__)})"


def precise_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum in float64, as a 0-d tensor on the same device (float32 on MPS, which has nothing wider)."""
    return values.sum(dtype=torch.float32 if values.device.type == "mps" else torch.float64)


def ratio(part: SupportsFloat, whole: SupportsFloat) -> float:
    """part / whole; not a number where there was nothing to count."""
    return float(part) / float(whole) if float(whole) else math.nan
