"""Examples of a tokenized dataset: a document each, or a packed row of pieces of documents.

Packing is an index over the dataset: it lists which documents share a row, and no token is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from toolkit.cache.arrow import check_uncut, mapped_files
from toolkit.data.loading.batch import Document
from toolkit.data.loading.collate import IGNORED
from toolkit.data.loading.columns import Columns, column

if TYPE_CHECKING:
    from datasets import Dataset

Augment = Callable[[Document, np.random.Generator, float], Document]
OF_TOKENS = ("input_ids", "labels", "word_starts")  # columns with one entry a token
CUT_PIECES = 1000  # pieces of documents whose labels are read at a time
NOT_COLLATED = ("length", "origin", "prompt_key", "target")  # columns of a tokenized row that no micro-batch is made from


@dataclass(frozen=True)
class Packing:
    """Rows of at most `capacity` tokens, each a run of pieces of documents, in arrays that hold millions of them.

    Piece `p` is tokens `starts[p]` to `ends[p]` of document `documents[p]`; row `r` is the pieces `row_bounds[r]` to
    `row_bounds[r + 1]`. All arrays are int64.
    """

    documents: np.ndarray  # [pieces]
    starts: np.ndarray  # [pieces]
    ends: np.ndarray  # [pieces]
    row_bounds: np.ndarray  # [rows + 1]
    capacity: int

    def __len__(self) -> int:
        return len(self.row_bounds) - 1

    def row(self, index: int) -> list[tuple[int, int, int]]:
        """The pieces of a row as (document, start, end)."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        pieces = slice(self.row_bounds[index], self.row_bounds[index + 1])
        return list(zip(self.documents[pieces].tolist(), self.starts[pieces].tolist(), self.ends[pieces].tolist(), strict=True))

    @property
    def fill(self) -> float:
        """Share of the rows' capacity that holds tokens, 0 to 1."""
        return float((self.ends - self.starts).sum()) / (len(self) * self.capacity) if len(self) else 1.0


def pack_best_fit(lengths: np.ndarray, capacity: int) -> Packing:
    """Pack whole documents by best-fit-decreasing: longest first, each into the fullest row that still has room.

    The rows are those of the plain algorithm (equal lengths in the order of the documents, equally full rows by their
    number), found by counting: documents of one length and rows with one amount of room are handled together.

    Args:
        lengths: tokens of each document, `[documents]`, each 1 to `capacity`.
        capacity: tokens a row holds.

    Raises:
        ValueError: a document that is empty or longer than a row.
    """
    lengths = _checked(lengths, capacity)
    if len(lengths) and lengths.max() > capacity:
        worst = int(lengths.argmax())
        raise ValueError(f"document {worst} has {lengths[worst]} tokens, more than the {capacity} of a row")
    order = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    row_of = np.empty(len(lengths), dtype=np.int64)  # in the order of `order`
    roomy = _RowsByRoom(capacity)
    placed = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = placed + count
        while placed < end:
            room, rows = roomy.take_fullest(length, end - placed)
            # A row that took one document of this length is now the fullest: it takes the next ones too, while they fit.
            per_row = room // length
            rows_used = rows[: -(-(end - placed) // per_row)]
            here = min(end - placed, len(rows_used) * per_row)
            row_of[placed : placed + here] = np.repeat(rows_used, per_row)[:here]
            last_row_takes = here - (len(rows_used) - 1) * per_row
            roomy.put_back(room - per_row * length, rows_used[:-1])
            roomy.put_back(room - last_row_takes * length, rows_used[-1:])
            placed += here
    by_row = np.argsort(row_of, kind="stable")
    documents = order[by_row]
    bounds = np.searchsorted(row_of[by_row], np.arange(roomy.opened + 1))
    return Packing(documents, np.zeros_like(documents), lengths[documents], bounds, capacity)


def pack_wrapped(lengths: np.ndarray, capacity: int, *, overlap: bool = False) -> Packing:
    """Put the documents one behind the other and cut every `capacity` tokens; only the last row is short.

    A document that is cut continues in the next row as a document of its own: it does not see its beginning, and its first
    token there is not predicted. With `overlap`, for evaluation, a row that continues with a document begins with the last
    token before the cut: every token but a document's first is predicted once. Raises ValueError for an empty document.
    """
    if overlap:
        plain = pack_wrapped(lengths, max(capacity - 1, 1))
        return Packing(plain.documents, np.maximum(plain.starts - 1, 0), plain.ends, plain.row_bounds, capacity)
    lengths = _checked(lengths, capacity)
    document_ends = np.cumsum(lengths)
    total = int(document_ends[-1]) if len(lengths) else 0
    row_ends = np.append(np.arange(capacity, total, capacity), total) if total else np.empty(0, dtype=np.int64)
    piece_ends = np.union1d(document_ends, row_ends)
    piece_starts = np.concatenate([[0], piece_ends[:-1]]) if total else piece_ends
    documents = np.searchsorted(document_ends, piece_starts, side="right")
    offsets = (document_ends - lengths)[documents]
    bounds = np.concatenate([[0], np.searchsorted(piece_ends, row_ends, side="right")])
    return Packing(documents, piece_starts - offsets, piece_ends - offsets, bounds, capacity)


def _checked(lengths: np.ndarray, capacity: int) -> np.ndarray:
    lengths = np.asarray(lengths, dtype=np.int64)
    if capacity < 1:
        raise ValueError(f"a row must hold at least 1 token, not {capacity}")
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"document {int(lengths.argmin())} has no tokens")
    return lengths


class _RowsByRoom:
    """Open rows, by how many tokens each still has room for; a set of the amounts is kept in the bits of one integer."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.opened = capacity, 0
        self.rows: dict[int, list[np.ndarray]] = {}
        self.rooms = 0

    def take_fullest(self, length: int, wanted: int) -> tuple[int, np.ndarray]:
        """The room of the fullest rows that can hold `length`, and at most `wanted` of them, lowest number first.

        They are gone from here until they are put back. Opens new rows where none has room.
        """
        fitting = self.rooms >> length
        if not fitting:
            needed = -(-wanted // (self.capacity // length))
            self.opened += needed
            return self.capacity, np.arange(self.opened - needed, self.opened)
        room = length + (fitting & -fitting).bit_length() - 1
        pieces = self.rows[room]
        rows = pieces[0] if len(pieces) == 1 else np.sort(np.concatenate(pieces))
        needed = -(-wanted // (room // length))
        if len(rows) > needed:
            self.rows[room] = [rows[needed:]]
        else:
            del self.rows[room]
            self.rooms ^= 1 << room
        return room, rows[:needed]

    def put_back(self, room: int, rows: np.ndarray) -> None:
        if room and len(rows):
            self.rows.setdefault(room, []).append(rows)
            self.rooms |= 1 << room


class Rows(Protocol):
    """What a loader needs of a dataset: how many examples, the documents of some of them, and their sums."""

    def __len__(self) -> int: ...
    def documents(self, examples: list[int]) -> list[Document]: ...
    def origins(self, example: int) -> list[str]: ...

    lengths: np.ndarray
    units: dict[str, np.ndarray]


class PlainRows:
    """One document an example."""

    def __init__(self, dataset: Dataset) -> None:
        columns = [name for name in dataset.column_names if name not in NOT_COLLATED]
        self.dataset, self._columns = dataset.with_format("numpy", columns=columns), Columns(dataset, columns)
        self._files = mapped_files(dataset)
        self._origin = dataset.with_format(None).select_columns(["origin"]) if "origin" in dataset.column_names else None
        self.lengths = column(dataset, "length")
        self.units = _units(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def documents(self, examples: list[int]) -> list[Document]:
        check_uncut(self._files)
        columns = self._columns.read(examples)
        documents = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return self._with_mismatched(documents) if "mismatched_row" in columns else documents

    def _with_mismatched(self, documents: list[Document]) -> list[Document]:
        """Each with `mismatched`: the tokens of an answer that belongs to another prompt."""
        others = self._columns.read([int(document["mismatched_row"]) for document in documents])
        answers = [ids[start:] for ids, start in zip(others["input_ids"], others["prompt_tokens"], strict=True)]
        return [
            {**document, "mismatched": answer[: document["mismatched_tokens"]]}
            for document, answer in zip(documents, answers, strict=True)
        ]

    def origins(self, example: int) -> list[str]:
        """Where the example comes from, as file and row, where the source has it."""
        return [str(self._origin[example]["origin"])] if self._origin else []


class PackedRows:
    """One packed row an example: pieces of documents, listed by an index over the tokenized dataset."""

    def __init__(self, dataset: Dataset, packing: Packing) -> None:
        self.plain, self.packing = PlainRows(dataset), packing
        self.lengths = np.add.reduceat(packing.ends - packing.starts, packing.row_bounds[:-1])
        tokens = np.add.reduceat(self._piece_tokens(), packing.row_bounds[:-1])
        self.units = {"examples": np.ones(len(packing)), "tokens": tokens}

    def __len__(self) -> int:
        return len(self.packing)

    def documents(self, examples: list[int]) -> list[Document]:
        pieces = [piece for example in examples for piece in self.packing.row(example)]
        whole = self.plain.documents([document for document, _, _ in pieces])
        return [cut_document(document, start, end) for document, (_, start, end) in zip(whole, pieces, strict=True)]

    def origins(self, example: int) -> list[str]:
        """Where the documents of the row come from, as file and row, where the source has it."""
        return [origin for document, _, _ in self.packing.row(example) for origin in self.plain.origins(document)]

    def _piece_tokens(self) -> np.ndarray:
        """Supervised tokens of each piece; of a cut document, those after the first token of the piece."""
        packing = self.packing
        tokens = self.plain.units["tokens"][packing.documents].copy()
        cut = np.flatnonzero(packing.ends - packing.starts != self.plain.lengths[packing.documents])
        if "labels" not in self.plain.dataset.column_names:
            tokens[cut] = packing.ends[cut] - packing.starts[cut] - 1
            return tokens
        for some in np.array_split(cut, len(cut) // CUT_PIECES + 1):
            documents = self.plain.documents(packing.documents[some].tolist()) if len(some) else []
            for i, document in zip(some.tolist(), documents, strict=True):
                tokens[i] = (document["labels"][packing.starts[i] + 1 : packing.ends[i]] != IGNORED).sum()
        return tokens


def cut_document(document: Document, start: int, end: int) -> Document:
    """The tokens from `start` to `end` of a document, and what goes with them."""
    if start == 0 and end == len(document["input_ids"]):
        return document
    cut = {name: value[start:end] if name in OF_TOKENS else value for name, value in document.items()}
    if "supervised_tokens" in cut:
        cut["supervised_tokens"] = count_supervised(cut)
    return cut


def count_supervised(document: Document) -> int:
    """Supervised tokens of a document, without its first one: nothing comes before that to predict it from."""
    if "labels" not in document:
        return len(document["input_ids"]) - 1
    return int((np.asarray(document["labels"])[1:] != IGNORED).sum())


def _units(dataset: Dataset) -> dict[str, np.ndarray]:
    units = {"examples": np.ones(len(dataset))}
    if "supervised_tokens" in dataset.column_names:
        units["tokens"] = column(dataset, "supervised_tokens").astype(np.float64)
    if "weight" in dataset.column_names:
        units["weight"] = column(dataset, "weight").astype(np.float64)
    if "chosen_tokens" in dataset.column_names:
        units["pairs"] = units["examples"]
        units["chosen_tokens"] = column(dataset, "chosen_tokens").astype(np.float64)
    if "desirable" in dataset.column_names:
        units["desirable"] = column(dataset, "desirable").astype(np.float64)
        units["undesirable"] = 1.0 - units["desirable"]
    for name in ("documents", "comparisons"):
        if name in dataset.column_names:
            units[name] = column(dataset, name).astype(np.float64)
    return units
