"""A stream of files goes on at any row, from a place in the file, also from a state of an earlier version that has none."""

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pytest
from pyarrow import parquet

import toolkit as tk
from toolkit.data.loading import streams
from toolkit.data.loading.streams import StreamLoader
from toolkit.data.sources import file_streams, readers

Rows = list[dict[str, Any]]


def json_lines(rows: Rows) -> bytes:
    return "\n\n".join(map(json.dumps, rows)).encode()  # a blank line after each


def csv_lines(rows: Rows) -> bytes:
    return ("text,number\n" + "".join(f'"{row["text"]}",{row["number"]}\n' for row in rows)).encode()


WRITE: dict[str, Callable[[Path, Rows], Any]] = {
    ".jsonl": lambda path, rows: path.write_bytes(b"\xef\xbb\xbf" + json_lines(rows)),
    ".jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(json_lines(rows))),
    ".txt": lambda path, rows: path.write_text("".join(f"{row['number']} ä\n" for row in rows)),
    ".csv": lambda path, rows: path.write_bytes(csv_lines(rows)),
    ".parquet": lambda path, rows: parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=4),
    ".feather": lambda path, rows: pyarrow.feather.write_feather(pa.Table.from_pylist(rows), path, chunksize=4, compression="zstd"),
}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files of ragged sizes, of which the first five rows decide the columns."""
    monkeypatch.setattr(file_streams, "STREAM_SAMPLE", 5)
    number = 0
    for name, size in (("a", 11), ("b", 3), ("c", 17)):
        rows = [{"text": f"row {number + i} " + "x" * (i % 7), "number": number + i} for i in range(size)]
        WRITE[request.param](tmp_path / f"{name}{request.param}", rows)
        number += size
    return tmp_path


def load(folder: Path, eval_fraction: float = 0.2) -> Any:
    return tk.load_splits(tk.DataConfig(dataset=str(folder), streaming=True, eval_fraction=eval_fraction, max_eval_examples=3))["train"]


def without_places(state: Any) -> Any:
    """As an earlier version wrote it."""
    if isinstance(state, dict):
        return {key: without_places(value) for key, value in state.items() if key not in ("offset", "line")}
    return [without_places(value) for value in state] if isinstance(state, list) else state


@pytest.mark.parametrize("folder", WRITE, indirect=True)
@pytest.mark.parametrize("eval_fraction", [0.0, 0.2])
@pytest.mark.parametrize("earlier", [False, True])
def test_from_the_state_at_any_row_the_rows_are_those_that_come_next(folder: Path, earlier: bool, eval_fraction: float) -> None:
    """Also behind the filter of held-out rows, with their origin. Fails when: the place is that of the row before; lines are counted from
    the place; a row group too many is skipped; the columns are those of the first rows after the place."""
    stream = load(folder, eval_fraction)
    whole, states = [], []
    for row in stream:
        whole.append(row)
        states.append(json.loads(json.dumps(stream.state_dict())))
    assert len(whole) > 20
    for number, state in enumerate(states, 1):
        again = copy.deepcopy(stream)
        again.load_state_dict(without_places(state) if earlier else state)
        assert list(again) == whole[number:]


@pytest.mark.parametrize("folder", [".jsonl", ".parquet"], indirect=True)
def test_batches_from_a_mixed_window_go_on_after_each_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through three epochs. Fails when: the state is that of the end of the window, not of its beginning."""
    monkeypatch.setattr(streams, "STREAM_BUFFER", 8)

    def loader() -> StreamLoader:
        train = load(folder, 0.0).map(lambda row: {"input_ids": [len(row["text"]), int(row["origin"].split(":")[-1])]})
        return StreamLoader(
            train.select_columns(["input_ids"]), lambda documents: {"ids": [d["input_ids"] for d in documents]}, 1, 2, 4, 80, ""
        )

    first, whole, states = loader(), [], []
    for batch in first.batches():
        whole.append([each["ids"] for each in batch.micro_batches])
        states.append(json.loads(json.dumps(first.state())))
    for step, state in enumerate(states[:-1], 1):
        again = loader()
        again.restore(state, step * 4)
        assert [[each["ids"] for each in batch.micro_batches] for batch in again.batches(step * 4)] == whole[step:]


@pytest.mark.parametrize("folder", [".jsonl", ".jsonl.gz", ".parquet"], indirect=True)
def test_what_lies_before_the_place_is_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the rows that decide the columns. Fails when: a file is read from its beginning, or a row group from the first one."""
    stream = load(folder, 0.0)
    for row in stream:
        if row["number"] == 28:
            break
    again = copy.deepcopy(stream)
    again.load_state_dict(stream.state_dict())
    parsed: list[Any] = []
    parse, iterate = readers.parse_json, parquet.ParquetFile.iter_batches
    monkeypatch.setattr(readers, "parse_json", lambda *given, **named: parsed.append(given) or parse(*given, **named))
    groups: list[list[int]] = []

    def read_groups(self: Any, *given: Any, **named: Any) -> Any:
        groups.append(named["row_groups"])
        return iterate(self, *given, **named)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", read_groups)
    rest = list(again)
    assert [row["number"] for row in rest] == [29, 30]
    assert len(parsed) <= 5 + 2
    assert not groups or groups[-1] == [3, 4]
