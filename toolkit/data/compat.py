"""Names of datasets that are not public: the fingerprint of rows, and what a stream reads its rows from, with its state.

Seen in datasets 5.2; tests/data/test_compat.py and tests/data/sources/test_file_streams.py fail when they move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from datasets.iterable_dataset import ExamplesIterable

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["ExamplesIterable", "fingerprint_of", "set_fingerprint"]


def fingerprint_of(rows: object) -> str:
    """What datasets identifies rows by, in the names of its cache files; nothing where they are another kind of rows."""
    return getattr(rows, "_fingerprint", "")


def set_fingerprint(rows: Dataset, fingerprint: str) -> None:
    """Name rows by their content: the fingerprint that datasets gives those of a file has its time of modification in it."""
    rows._fingerprint = fingerprint
