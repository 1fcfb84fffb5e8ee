"""Batches of rows read by several processes, with the results in order."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.data.tokenize.columns import Batch

if TYPE_CHECKING:
    from datasets import Dataset

Read = TypeVar("Read")


def read_in_order(
    rows: Dataset | Iterator[tuple[int, Batch]], read: Callable[[Batch, int], tuple[Any, Read]], size: int, processes: int,
    begin: int = 0,
) -> Iterator[tuple[Any, Read, int]]:  # fmt: skip
    """`(*read(batch, at), rows in the batch)` for every `size` rows of a dataset, where `at` is the number of the first one.

    An exception is raised where its batch would have come, the same one for any number of processes. They are forked: what
    `read` holds needs no copy. torch's DataLoader keeps the order, reads a few batches ahead, and notices a process that dies,
    this one too.

    Args:
        rows: a dataset, whose batches are taken where they are read; or the batches, each with its `at`.
        begin: the first row of the dataset that is read.
    """

    def work(task: Any) -> Any:
        at, batch = task if isinstance(task, tuple) else (task, rows[task : task + size])  # type: ignore[index]
        try:
            return *read(batch, at), len(next(iter(batch.values())))
        except Exception as error:  # as a result: a worker would change its message
            return error

    tasks: Any = rows if isinstance(rows, Iterator) else range(begin, len(rows), size)
    results = map(work, tasks)
    if (processes := min(processes, len(tasks) if isinstance(tasks, range) else processes)) > 1:
        import torch
        from torch.utils.data import DataLoader

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create")  # more than cores, if that was requested
            results = iter(DataLoader(
                _Itself(),  # type: ignore[arg-type]  # what is sent to a process is what it works on
                sampler=tasks, batch_size=None, collate_fn=work,
                num_workers=processes, multiprocessing_context="fork",
                worker_init_fn=_use_one_thread, generator=torch.Generator(),  # its own: the global random state must not move
            ))  # fmt: skip
    for result in results:
        if isinstance(result, Exception):
            raise result
        yield result


class _Itself:
    def __getitem__(self, task: Any) -> Any:
        return task


def _use_one_thread(worker: int) -> None:
    """In a process that tokenizes next to others; `build_accelerator` sets this variable for the process that starts them."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
