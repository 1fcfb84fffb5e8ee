"""Locks between processes that say when they wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from toolkit.system.console import say

SILENT_SECONDS = 3.0  # of waiting, before it is said


@contextlib.contextmanager
def waiting_lock(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file, which falls with its process; after a few seconds of waiting for another's say so, once.

    Args:
        what: what the other process is doing, such as "prepares data".
    """
    from filelock import FileLock, Timeout

    lock = FileLock(str(path))
    try:
        lock.acquire(timeout=SILENT_SECONDS)
    except Timeout:
        say(f"waiting for another process, which {what} (it holds {path})", error=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
