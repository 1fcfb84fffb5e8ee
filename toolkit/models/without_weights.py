"""Models without weights, of which `load_model` builds the shapes alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_WITHOUT: ContextVar[bool] = ContextVar("without", default=False)


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """In this block `load_model` returns models on torch's meta device: nothing is read but their configuration."""
    token = _WITHOUT.set(True)
    try:
        yield
    finally:
        _WITHOUT.reset(token)


def builds_without_weights() -> bool:
    return _WITHOUT.get()
