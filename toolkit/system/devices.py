"""The kind of device for which kernels and sizes are chosen: that of a tensor, or another one for which a run is planned."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar

import torch

_PLANNED: ContextVar[tuple[str, bool] | None] = ContextVar("planned", default=None)


def chosen_type(device: torch.device) -> str:
    """The type of device ("cpu", "cuda", "mps") for whose sake something is chosen where tensors are on `device`."""
    planned = _PLANNED.get()
    return planned[0] if planned else device.type


def is_ampere(device: torch.device) -> bool:
    """Whether it is a GPU of CUDA's compute capability 8.0 (Ampere) or later, which some kernels need."""
    planned = _PLANNED.get()
    if planned and device.type != "cuda":  # a plan has its tensors elsewhere
        return planned[0] == "cuda" and planned[1]
    return device.type == "cuda" and _capability(device) >= (8, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if torch.version.cuda is not None else (0, 0)


@contextlib.contextmanager
def planned_for(kind: str, ampere: bool = True) -> Iterator[None]:
    """In this block, tensors of any device are computed as those of another kind would be: for fake tensors only."""
    before = _PLANNED.set((kind, ampere))
    try:
        yield
    finally:
        _PLANNED.reset(before)
