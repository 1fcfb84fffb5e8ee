"""The kind of device for which kernels and sizes are chosen: that of a tensor, or another one for which a run is planned."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from toolkit.system.compat import bf16_units, multiplies_bf16

_planned: tuple[str, bool] | None = None  # no ContextVar, at which torch.compile (2.13) ends its graph: read in every layer


def chosen_type(device: torch.device) -> str:
    """The type of device ("cpu", "cuda", "mps") for whose sake something is chosen where tensors are on `device`."""
    return _planned[0] if _planned else device.type


def is_ampere(device: torch.device) -> bool:
    """Whether it is a GPU of CUDA's compute capability 8.0 (Ampere) or later, which some kernels need."""
    if _planned and device.type != "cuda":  # a plan has its tensors elsewhere
        return _planned[0] == "cuda" and _planned[1]
    return device.type == "cuda" and _capability(device) >= (8, 0)


def has_bf16_units(device: torch.device) -> bool:
    """Whether products in bfloat16 are computed by units for them, and not in float32."""
    kind = chosen_type(device)
    return bf16_units(kind) if kind == device.type else is_ampere(device)


def is_faster_in_bf16(device: torch.device) -> bool:
    """Whether it multiplies bfloat16 faster than float32."""
    kind = chosen_type(device)
    return multiplies_bf16(kind) if kind == device.type else is_ampere(device)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if torch.version.cuda is not None else (0, 0)


@contextlib.contextmanager
def planned_for(kind: str, ampere: bool = True) -> Iterator[None]:
    """In this block, tensors of any device are computed as those of another kind would be: for fake tensors only."""
    global _planned
    before, _planned = _planned, (kind, ampere)
    try:
        yield
    finally:
        _planned = before
