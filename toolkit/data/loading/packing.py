"""Packing: which documents share a row, as an index over the tokenized dataset."""

from dataclasses import dataclass

import numpy as np


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

    A document that is cut goes on in the next row as a document of its own: it does not see its beginning, and its first
    token there is not predicted. With `overlap`, for evaluation, a row that goes on with a document begins with the last
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
