"""Batches of rows read by one process or several, in the order of the rows: the result is the same."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Read = TypeVar("Read")


def read_in_order(
    rows: Any, read: Callable[[dict[str, list[Any]], int], tuple[Any, Read]], size: int, processes: int
) -> Iterator[tuple[Any, Read, int]]:
    """`(*read(batch, at), rows in the batch)` for every `size` rows of a dataset, where `at` is the number of the first one.

    An exception is raised where its batch would have come, the same one for any number of processes. They are forked: what
    `read` holds needs no copy, and Python's hashes of texts and bytes, which differ between programs, are the same in all.
    """
    batches = _Batches(rows, read, size)
    processes = min(processes, len(batches))
    results = map(batches.__getitem__, range(len(batches))) if processes < 2 else _read_by(processes, batches)
    for result in results:
        if isinstance(result, Exception):
            raise result
        yield result


class _Batches:
    """The batches by number, each read when it is asked for. An exception is a result: a worker would change its message."""

    def __init__(self, rows: Any, read: Callable[..., Any], size: int) -> None:
        self.rows, self.read, self.size = rows, read, size

    def __len__(self) -> int:
        return -(-len(self.rows) // self.size)

    def __getitem__(self, number: int) -> Any:
        at = number * self.size
        batch = self.rows[at : at + self.size]
        try:
            return *self.read(batch, at), len(next(iter(batch.values())))
        except Exception as error:
            return error


def _read_by(processes: int, batches: _Batches) -> Iterator[Any]:
    """torch's DataLoader keeps the order, reads a few batches ahead, and notices a process that dies, this one too."""
    import torch
    from torch.utils.data import DataLoader

    with warnings.catch_warnings(), _one_thread_each():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more than cores, if that was asked for
        return iter(
            DataLoader(
                batches,  # type: ignore[arg-type]  # a sequence is all it needs of a dataset
                batch_size=None, collate_fn=_as_it_is, num_workers=processes, multiprocessing_context="fork",
                generator=torch.Generator(),  # making its iterator must not move the global random state
            )
        )  # fmt: skip


def _as_it_is(result: Any) -> Any:
    return result


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that are started meanwhile tokenize with one thread, and `tokenizers` prints no warning about the fork."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before
