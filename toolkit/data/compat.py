"""A name of datasets that is not public, the fingerprint of rows; tests/data/test_compat.py fails when it moves (5.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset


def fingerprint_of(rows: object) -> str:
    """What datasets knows rows by, in the names of its cache files; nothing where they are another kind of rows."""
    return getattr(rows, "_fingerprint", "")


def set_fingerprint(rows: Dataset, fingerprint: str) -> None:
    """Name rows by their content: the fingerprint that datasets gives those of a file has its time of modification in it."""
    rows._fingerprint = fingerprint
