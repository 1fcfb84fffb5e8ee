"""Batches of a dataset that is read as a stream."""

import copy
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from toolkit.config import Refusal
from toolkit.data.loading.batch import Batch, Document, MicroBatch
from toolkit.data.loading.order import batch_of, cut_step, epoch_order, generator_of
from toolkit.data.loading.packing import NOT_COLLATED, Augment, Packing, cut_document
from toolkit.data.loading.step_size import check_step
from toolkit.data.sources.stream_state import state_of

STREAM_BUFFER = 1024  # documents of a stream that are mixed, and packed, together


@dataclass
class StreamLoader:
    """Batches of a streamed dataset. Every rank reads it alike and takes its own micro-batches.

    A window of documents is mixed (and packed) at a time. A resume continues from the source's own state at the beginning of
    the window, where the source has one; else it reads again up to its position. Either way the examples on the way there
    must be those that were consumed before, by their digest: a source that gives others is refused.
    """

    stream: Any
    collate: Callable[[list[Document]], MicroBatch]
    seed: int
    micro_batch_size: int
    global_batch_size: int
    examples_to_consume: int
    fingerprint: str
    pack: Callable[[np.ndarray], Packing] | None = None
    data_rank: int = 0
    num_data_ranks: int = 1
    epoch_size: int | None = None
    commits: dict[str, str] = dataclasses.field(default_factory=dict)  # of datasets of the Hub
    augment: Augment | None = None
    pin_memory: bool = False

    def __post_init__(self) -> None:
        self._mark = _Mark()
        self._goal: dict[str, Any] = {}
        self._resumed: tuple[int, Iterator[list[Document]]] | None = None

    def further(self, position: int, count: int) -> Batch | None:
        """As `TrainLoader.further`: refused, because a stream is read once and in order."""
        raise Refusal("--streaming: a step that takes more examples than its batch needs data that can be read anywhere.")

    def state(self) -> dict[str, Any]:
        """Where in the source the next example comes from, and a digest of those consumed; JSON."""
        return dataclasses.asdict(self._mark)

    def restore(self, state: dict[str, Any], position: int, examples_to_consume: int | None = None) -> None:
        """Go on, with the next call of `batches`, after the examples that this state counts; refuses a source that changed.

        `examples_to_consume`: of the run that is continued; None: as this loader was built.
        """
        self.examples_to_consume = examples_to_consume or self.examples_to_consume
        self._goal = state
        self._resumed = (position, self._rows_from(position))

    @property
    def num_steps(self) -> int:
        return math.ceil(self.examples_to_consume / self.global_batch_size)

    def __len__(self) -> int:
        """Steps of the whole run, all epochs: what iterating gives."""
        return self.num_steps

    def __repr__(self) -> str:
        return f"StreamLoader({len(self):,} steps of {self.global_batch_size:,} examples)"

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the whole run; a `Run` begins at its own position."""
        return self.batches()

    def batches(self, position: int = 0) -> Iterator[Batch]:
        """Yield the batch of each step from `position` (examples consumed) to the end of the run."""
        resumed, self._resumed = self._resumed, None
        rows = resumed[1] if resumed and resumed[0] == position else self._rows_from(position)
        while position < self.examples_to_consume:
            size = min(self.global_batch_size, self.examples_to_consume - position)
            taken = [self._augmented(row, place) for place, row in enumerate(islice(rows, size), position)]
            places = [(0, place) for place in range(position, position + size)]  # an example's number is its position
            plan = cut_step(places, position, self.micro_batch_size, self.data_rank, self.num_data_ranks)
            pieces = [[document for _, place in piece for document in taken[place - position]] for piece, _ in plan.pieces]
            totals = _stream_totals([document for row in taken for document in row], size)
            batch = batch_of(plan, [self.collate(piece) for piece in pieces], totals, self.seed)
            yield batch.pin_memory() if self.pin_memory else batch
            position += size

    def _augmented(self, row: list[Document], position: int) -> list[Document]:
        """An example of a stream has no number but its position, which is that of every pass."""
        if self.augment is None:
            return row
        numbers, progress = generator_of(self.seed, "augment", 0, position), position / self.examples_to_consume
        return [self.augment(document, numbers, progress) for document in row]

    def longest_micro_batch(self) -> None:
        """Not known of a stream."""
        return None

    def _rows_from(self, position: int) -> Iterator[list[Document]]:
        """Examples from a position on: one list of documents each, those of a packed row or a single one."""
        goal = self._goal
        resumable = bool(goal.get("source")) and hasattr(self.stream, "load_state_dict")
        stream = self.stream
        if resumable:
            stream = copy.deepcopy(self.stream)  # the epochs after this one begin at the beginning
            stream.load_state_dict(goal["source"])
        before = goal.get("before", "")
        self._mark = _Mark(goal["window"], goal["source"], goal["epoch"], 0, before, before) if resumable else _Mark()
        rows = self._rows(stream)
        for _ in range(goal["consumed"] if resumable else position):
            next(rows)
        if goal and (self._mark.window, self._mark.consumed, self._mark.digest) != (
            goal["window"], goal["consumed"], goal["digest"],
        ):  # fmt: skip
            raise Refusal(
                f"--resume: the stream gave other examples up to position {position} than when the run was begun: its source "
                "changed, or is in another order each time. Begin a new run in another --output-dir."
            )
        return rows

    def _rows(self, stream: Any) -> Iterator[list[Document]]:
        """Examples of the stream without end. The mark is moved before an example is given out."""
        window: list[Document] = []
        mark, begun = self._mark, self._mark
        for epoch in range(mark.epoch, 1 << 62):
            seen, is_whole, documents, tokens = epoch == begun.epoch and bool(begun.source), stream is self.stream, 0, 0
            for document in stream:
                seen, documents, tokens = True, documents + 1, tokens + len(document["input_ids"])
                window.append({name: value for name, value in document.items() if name not in NOT_COLLATED})
                if len(window) == STREAM_BUFFER:
                    source = state_of(stream)
                    for row in self._mix(window, mark.window):
                        mark = self._mark = mark.after(row)
                        yield row
                    window, mark = [], _Mark(mark.window + 1, source, epoch, 0, mark.digest, mark.digest)
            if not seen:
                raise Refusal(f"the stream has no rows (epoch {epoch})")
            if is_whole:  # of packed rows there are no more than documents; each rank reads all of a step
                size = min(self.global_batch_size, self.examples_to_consume)
                check_step(size, documents, tokens / documents, self.data_rank, 1)
            stream = self.stream

    def _mix(self, window: list[Document], number: int) -> Iterator[list[Document]]:
        order = epoch_order(len(window), self.seed, number)
        documents = [window[i] for i in order]
        if self.pack is None:
            yield from ([document] for document in documents)
            return
        packing = self.pack(np.array([len(document["input_ids"]) for document in documents]))
        for row in range(len(packing)):
            yield [cut_document(documents[document], start, end) for document, start, end in packing.row(row)]


@dataclass(frozen=True)
class _Mark:
    """A place in a stream: a window, and what was consumed of it."""

    window: int = 0
    source: dict[str, Any] | None = None  # the source's own state at the window's beginning
    epoch: int = 0  # there, too
    consumed: int = 0  # examples of the window
    digest: str = ""  # of all examples from the stream's beginning on
    before: str = ""  # the same at the window's beginning

    def after(self, row: list[Document]) -> "_Mark":
        digest = hashlib.blake2b(self.digest.encode(), digest_size=16)
        for document in row:
            digest.update(np.asarray(document["input_ids"], dtype=np.int64).tobytes())
        return dataclasses.replace(self, consumed=self.consumed + 1, digest=digest.hexdigest())


def _stream_totals(documents: list[Document], examples: int) -> dict[str, float]:
    """Sums over a global batch. Supervised tokens were counted where a document was tokenized, cut or augmented: what its first
    token is to a tag is not what it is to a language model."""
    totals = {"examples": float(examples)}
    if documents and "supervised_tokens" in documents[0]:
        totals["tokens"] = float(sum(document["supervised_tokens"] for document in documents))
    if documents and "weight" in documents[0]:
        totals["weight"] = float(sum(document["weight"] for document in documents))
    for name in ("documents", "comparisons"):  # of lists
        if documents and name in documents[0]:
            totals[name] = float(sum(document[name] for document in documents))
    return totals
