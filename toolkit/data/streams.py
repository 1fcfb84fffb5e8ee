"""Batches of a dataset that is read as a stream."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from toolkit.config import Refusal
from toolkit.data.batch import Batch
from toolkit.data.collate import IGNORED
from toolkit.data.order import cut_step, epoch_order, hash_numbers
from toolkit.data.packing import Packing
from toolkit.data.rows import MODEL_COLUMNS, Document, cut_document

STREAM_BUFFER = 1024  # documents of a stream that are mixed, and packed, together


@dataclass
class StreamLoader:
    """Batches of a streamed dataset. Every rank reads it alike and takes its own micro-batches.

    A window of documents is mixed (and packed) at a time. A position is reached by reading up to it again, so that a
    resumed run sees what it would have seen.
    """

    stream: Any
    collate: Callable[[list[Document]], dict[str, Any]]
    seed: int
    micro_batch_size: int
    global_batch_size: int
    examples_to_consume: int
    fingerprint: str
    pack: Callable[[np.ndarray], Packing] | None = None
    rank: int = 0
    world_size: int = 1
    epoch_size: int | None = None

    @property
    def num_steps(self) -> int:
        return math.ceil(self.examples_to_consume / self.global_batch_size)

    def batches(self, position: int = 0) -> Iterator[Batch]:
        """Yield the batch of each step from `position` (examples consumed) to the end of the run."""
        rows = self._rows()
        if position and len(list(islice(rows, position))) < position:
            raise Refusal(f"the stream ended before position {position}: it is not the data this run began with")
        while position < self.examples_to_consume:
            size = min(self.global_batch_size, self.examples_to_consume - position)
            taken = list(islice(rows, size))
            plan = cut_step([(0, i) for i in range(size)], position, self.micro_batch_size, self.rank, self.world_size)
            documents = [[document for _, i in piece for document in taken[i]] for piece, _ in plan.pieces]
            flat = [document for row in taken for document in row]
            yield Batch(
                micro_batches=[self.collate(piece) for piece in documents],
                totals=_stream_totals(flat, len(taken)),
                real=[real for _, real in plan.pieces],
                seeds=[hash_numbers(self.seed, 0, position + piece[0][1]) for piece, _ in plan.pieces],
                position=position,
                size=size,
                examples=[position + i for i in range(size)],
                indices=[[position + i for _, i in piece] for piece, _ in plan.pieces],
            )
            position += size

    def _rows(self) -> Iterator[list[Document]]:
        """Examples of the stream without end, each a list of documents: one, or those of a packed row."""
        window, number = [], 0
        for epoch in range(1 << 62):
            seen = False
            for document in self.stream:
                seen = True
                window.append({name: document[name] for name in MODEL_COLUMNS if name in document})
                if len(window) == STREAM_BUFFER:
                    yield from self._mix(window, number)
                    window, number = [], number + 1
            if not seen:
                raise Refusal(f"the stream has no rows (epoch {epoch})")

    def _mix(self, window: list[Document], number: int) -> Iterator[list[Document]]:
        order = epoch_order(len(window), self.seed, number)
        documents = [window[i] for i in order]
        if self.pack is None:
            yield from ([document] for document in documents)
            return
        packing = self.pack(np.array([len(document["input_ids"]) for document in documents]))
        for row in range(len(packing)):
            yield [cut_document(documents[document], start, end) for document, start, end in packing.row(row)]


def _stream_totals(documents: list[Document], examples: int) -> dict[str, float]:
    totals = {"examples": float(examples)}
    if documents and "supervised_tokens" in documents[0]:
        counted = [_supervised(document) for document in documents]
        totals["tokens"] = float(sum(counted))
    if documents and "weight" in documents[0]:
        totals["weight"] = float(sum(document["weight"] for document in documents))
    return totals


def _supervised(document: Document) -> int:
    if "labels" not in document:
        return len(document["input_ids"]) - 1
    return int((np.asarray(document["labels"])[1:] != IGNORED).sum())
