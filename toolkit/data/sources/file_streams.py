"""Files as a stream whose state has the place in the file: a resume reads from there, not from the file's beginning.

The state of `datasets` alone is the number of rows that were read, which it reads again. A checkpoint that has no more than
that is continued so.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from toolkit.config import Refusal
from toolkit.data.compat import ExamplesIterable
from toolkit.data.sources.files import columnar_rows, is_csv, text_rows, without_origin
from toolkit.data.sources.find_files import COLUMNAR, DataFile
from toolkit.data.sources.readers import Row, number_columns, with_numbers
from toolkit.data.sources.stream_state import Place, is_by_line

STREAM_SAMPLE = 1000  # first rows of a file, which decide its columns


class FileRows(ExamplesIterable):
    """The rows of files one after the other, each file a shard."""

    def __init__(self, files: list[DataFile]) -> None:
        super().__init__(lambda files: enumerate(row for row, _ in stream_rows(files[0])), {"files": files})

    def _init_state_dict(self) -> dict[str, Any]:
        self._state_dict = {**super()._init_state_dict(), "type": "ExamplesIterable", "offset": 0, "line": 0}
        return self._state_dict

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        state = self._state_dict or {"shard_idx": 0, "shard_example_idx": 0, "offset": 0, "line": 0}
        for number in range(state["shard_idx"], len(self.kwargs["files"])):
            begin, place = state["shard_example_idx"], Place(state["offset"], state["line"])
            for count, (row, place) in enumerate(stream_rows(self.kwargs["files"][number], begin, place), begin + 1):  # noqa: B020
                state["shard_example_idx"], state["offset"], state["line"] = count, place.offset, place.line
                yield f"{number}_{count}", row
            state |= {"shard_idx": number + 1, "shard_example_idx": 0, "offset": 0, "line": 0}


def stream_rows(file: DataFile, begin: int = 0, place: Place | None = None) -> Iterator[tuple[Row, Place]]:
    """Rows of a file from row `begin` on, each with the place behind it, which is 0 where rows are no lines.

    Columns and numbers are decided by the first thousand of the file; what a row lacks is None.

    Args:
        place: where row `begin` is, if that is known.
    """
    rows = _rows(file, 0, Place())
    first = list(islice(rows, STREAM_SAMPLE))
    columns = dict.fromkeys(name for row, _ in first for name in row)
    types = number_columns(without_origin(row for row, _ in first)) if is_csv([file]) else {}
    rows = _rows(file, begin, place or Place()) if begin > len(first) else chain(first[begin:], rows)
    for row, behind in rows:
        try:
            yield {name: row.get(name) for name in columns} if not types else with_numbers(row, types), behind
        except ValueError as error:
            where = f"in a column that held only numbers in the first {len(first):,} rows"
            raise Refusal(f"{row['origin']}: {error}, {where}.") from None


def _rows(file: DataFile, begin: int, place: Place) -> Iterator[tuple[Row, Place]]:
    if file.ending in COLUMNAR:
        return ((row, Place()) for row in columnar_rows([file], begin))
    if not is_by_line(file.ending, file.sample_by):
        return ((row, Place()) for row in islice(text_rows([file]), begin, None))
    skipped = 0 if place.offset else begin
    return ((row, Place(place.offset, place.line)) for row in islice(text_rows([file], place), skipped, None))
