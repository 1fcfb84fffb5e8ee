"""Names that are not public. Of datasets: the fingerprint of rows, and what a stream reads its rows from, with its state.
Of Python: the folder of multiprocessing's sockets.

Seen in datasets 5.2 and Python 3.11; test_compat.py, test_worker_processes.py and sources/test_file_streams.py in tests/data
fail when they move.
"""

from __future__ import annotations

import atexit
import functools
import os
from typing import TYPE_CHECKING

from datasets.iterable_dataset import ExamplesIterable

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["ExamplesIterable", "fingerprint_of", "folder_of_sockets", "set_fingerprint"]


def fingerprint_of(rows: object) -> str:
    """What datasets identifies rows by, in the names of its cache files; nothing where they are another kind of rows."""
    return getattr(rows, "_fingerprint", "")


def set_fingerprint(rows: Dataset, fingerprint: str) -> None:
    """Name rows by their content: the fingerprint that datasets gives those of a file has its time of modification in it."""
    rows._fingerprint = fingerprint


@functools.cache
def folder_of_sockets() -> str:
    """The folder in TMPDIR that processes started from now on share for the sockets by which they hand over tensors.

    It is made by the first call, and removed by this process at its end; without one each process would make its own.
    """
    from multiprocessing.util import get_temp_dir

    folder = str(get_temp_dir())
    atexit.register(os.makedirs, folder, exist_ok=True)  # multiprocessing, which removes it, needs it then
    return folder
