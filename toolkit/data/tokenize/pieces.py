"""Batches of rows, read by several processes in order, and an Arrow file that is written piece by piece with a journal.

What a killed process wrote is found again: a line of the journal has what the work goes on from, and has the size of its piece
and CRC-32 of both. Pieces are kept up to the first that is not as it was written; the rest is cut off. At the end the file has
the bytes of one that was written in one go.
"""

from __future__ import annotations

import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.cache.arrow import BATCH_ROWS
from toolkit.data.tokenize.columns import Batch
from toolkit.data.worker_processes import started
from toolkit.system.children import death_with_this_process
from toolkit.system.console import say
from toolkit.system.json_lines import intact_records, parse_object, sealed_line

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

SYNC_SECONDS = 5.0  # of work that a power loss takes at most; a kill takes the piece that is being written
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream


class Pieces:
    """The pieces of one file, which is ended where its block does not fail. Read `kept` to its end, then `append`."""

    def __init__(self, path: Path, journal: Path, schema: pa.Schema) -> None:
        self._path, self.schema = path, schema
        self._file, self._journal = (
            os.fdopen(os.open(each, os.O_RDWR | os.O_CREAT, 0o666), "r+b") for each in (path, journal)
        )
        self._synced = time.monotonic()

    def kept(self) -> Iterator[tuple[dict[str, Any], pa.Table]]:
        """The notes and rows of the pieces that are whole; the next `append` goes behind them."""
        import pyarrow as pa

        head = self.schema.serialize().to_pybytes()
        size, lines = len(head), 0
        if self._file.read(size) == head:
            for number, line in enumerate(self._journal, 1):
                note = next(intact_records(filter(None, [parse_object(line.decode(errors="replace"))])), None)
                content = self._file.read(note["size"]) if note else b""
                if note is None or (len(content), zlib.crc32(content)) != (note["size"], note["crc"]):
                    if line.endswith(b"\n"):  # else it was being written when the process ended
                        say(f"{self._path}: piece {number} is damaged; it and those after it are tokenized again", error=True)
                    break
                yield note["note"], pa.Table.from_batches(list(_batches(content, self.schema)), self.schema)
                size, lines = size + len(content), lines + len(line)
        for file, length in ((self._file, size), (self._journal, lines)):
            file.truncate(length)
            file.seek(length)
        if size == len(head):
            self._file.seek(0)
            self._file.write(head)

    def append(self, rows: pa.Table, note: dict[str, Any]) -> None:
        content = b"".join(batch.serialize() for batch in rows.to_batches(max_chunksize=BATCH_ROWS))
        self._file.write(content)
        self._file.flush()
        line = sealed_line({"size": len(content), "crc": zlib.crc32(content), "note": note})
        self._journal.write(line.encode())
        self._journal.flush()
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file.fileno())
            os.fsync(self._journal.fileno())
            self._synced = time.monotonic()

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._file.write(_END)
        self._file.close()
        self._journal.close()


def _batches(content: bytes, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    reader = pa.BufferReader(content)
    while reader.tell() < len(content):
        yield pa.ipc.read_record_batch(pa.ipc.read_message(reader), schema)


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
    results: Iterator[Any] = map(work, tasks)
    if (processes := min(processes, len(tasks) if isinstance(tasks, range) else processes)) > 1:
        import torch
        from torch.utils.data import DataLoader

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create")  # more than cores, if that was requested
            results = started(DataLoader(
                _Itself(),  # type: ignore[arg-type]  # what is sent to a process is what it works on
                sampler=tasks, batch_size=None, collate_fn=work,
                num_workers=processes, multiprocessing_context="fork",
                worker_init_fn=partial(_begin_worker, death_with_this_process()),
                generator=torch.Generator(),  # its own: the global random state must not move
            ), "--preprocessing-num-workers")  # fmt: skip
    for result in results:
        if isinstance(result, Exception):
            raise result
        yield result


class _Itself:
    def __getitem__(self, task: Any) -> Any:
        return task


def _begin_worker(die_with_its_parent: Callable[[], None] | None, worker: int) -> None:
    """In a process that tokenizes next to others; `build_accelerator` sets this variable for the process that starts them.

    torch's own watch over the parent is not enough: a worker waits for ever to hand over a batch that nobody reads any more.
    """
    if die_with_its_parent:
        die_with_its_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
