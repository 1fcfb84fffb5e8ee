"""The kind of device for which kernels and sizes are chosen: that of a tensor, or another one for which a run is planned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

_PLANNED: ContextVar[str | None] = ContextVar("planned", default=None)


def chosen_type(device: torch.device) -> str:
    """The type of device ("cpu", "cuda", "mps") for whose sake something is chosen where tensors are on `device`."""
    return _PLANNED.get() or device.type


@contextlib.contextmanager
def planned_for(kind: str) -> Iterator[None]:
    """In this block, tensors of any device are computed as those of another kind would be: for fake tensors only."""
    before = _PLANNED.set(kind)
    try:
        yield
    finally:
        _PLANNED.reset(before)
