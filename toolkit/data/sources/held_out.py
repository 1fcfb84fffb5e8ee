"""Rows held out by a hash of their content, so that a split never leaks and never moves.

What is hashed is the row's *input*: the prompt, the first user turn, the context, the source, the tokens or the text. So
verbatim copies, copies with another label, several answers to one prompt and several questions about one context all stay on
one side. Neither the seed nor a row's place matters: a file that grows, is shuffled or is cut into several keeps its split.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import Refusal

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

BATCH_ROWS = 10_000
# beside a row's input these say who, where and what about it; two rows that differ only here are the same row
ABOUT_A_ROW = frozenset({"origin", "id", "idx", "index", "label", "labels", "score", "weight"})


def split_by_content(rows: Dataset, fraction: float, always: frozenset[int], name: str) -> tuple[Dataset, Dataset]:
    """Training and held-out rows, each in the order of the source.

    A row is held out when its key falls into the lowest `fraction` of all possible keys, or is in `always`: the key of the
    first row, so that a small file has an evaluation row too, and the same one when it grows.

    Raises:
        Refusal: no row of the source called `name` would be left to train on; for one, all have the same input.
    """
    keys = row_keys(rows)
    held_out = _is_held_out(keys, fraction, always)
    if held_out.all():
        same = " with the same input" if len(rows) > 1 and len(np.unique(keys)) == 1 else ""
        raise Refusal(
            f"{name} has {len(rows):,} row{'s'[: len(rows) > 1]}{same}, too few to hold any out without leaking. Name an "
            "evaluation split (--eval-split, or a folder with train.* and validation.*), or train without: --eval-fraction 0"
            + (" A text file can be read in smaller rows: --sample-by paragraph" if name.endswith(".txt") else "")
        )
    places = np.arange(len(rows))
    return rows.select(places[~held_out]), rows.select(places[held_out])


def stream_by_content(
    rows: IterableDataset, fraction: float, always: frozenset[int]
) -> tuple[IterableDataset, IterableDataset]:
    """The same split of a stream, row by row."""
    sides = (partial(_is_on_side, held_out=side, fraction=fraction, always=always) for side in (False, True))
    training, held_out = (rows.filter(side, batched=True, batch_size=100) for side in sides)
    return training, held_out


def first_key(rows: Dataset | IterableDataset, name: str) -> int:
    """Key of the first row of the source called `name`.

    Raises:
        Refusal: a stream without rows, or whose first ones can't be read.
    """
    try:
        first = next(iter(rows), None)
    except (ValueError, OSError) as error:
        raise Refusal(f"{name} can't be read: {(str(error) or type(error).__name__).splitlines()[0]}") from error
    if first is None:
        raise Refusal(f"{name} has no rows.")
    return int(batch_keys({name: [value] for name, value in first.items()})[0])


def row_keys(rows: Dataset) -> np.ndarray:
    """Keys of all rows, uint64 [rows]; a few seconds for a million texts."""
    parts = [
        _keys(table.column_names, cache(lambda name, table=table: table[name].to_pylist()), len(table))
        for table in rows.with_format("arrow").iter(batch_size=BATCH_ROWS)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def batch_keys(batch: Mapping[str, Sequence[Any]]) -> np.ndarray:
    """Keys of the rows of a batch of columns, uint64 [rows]."""
    return _keys(list(batch), batch.__getitem__, len(next(iter(batch.values()), ())))


def _keys(names: list[str], column: Callable[[str], Sequence[Any]], count: int) -> np.ndarray:
    """A hash of each row's input, or of all its content where it has none; `column` is asked for what is needed only."""
    data = [b""] * count
    for name in _input_columns(names):
        if not all(data):
            data = [found or _canonical(value, name) for found, value in zip(data, column(name), strict=True)]
    if not all(data):  # for instance an empty prompt before each completion
        content = [[_canonical(value) for value in column(name)] for name in sorted(set(names) - ABOUT_A_ROW)]
        data = [found or b"\x1f".join(filter(None, values)) for found, *values in zip(data, *content, strict=True)]
    return np.frombuffer(b"".join(hashlib.blake2b(each, digest_size=8).digest() for each in data), ">u8").astype(np.uint64)


def _is_on_side(batch: Mapping[str, Sequence[Any]], held_out: bool, fraction: float, always: frozenset[int]) -> list[bool]:
    return (_is_held_out(batch_keys(batch), fraction, always) == held_out).tolist()


def _is_held_out(keys: np.ndarray, fraction: float, always: frozenset[int]) -> np.ndarray:
    chosen = keys < np.uint64(min(int(fraction * 2**64), 2**64 - 1))
    return chosen | np.isin(keys, np.fromiter(always, np.uint64))


def _input_columns(columns: Iterable[str]) -> list[str]:
    """The columns that may hold a row's input, the first with content counts.

    `source` and `context` are common names for other things (where a row is from, what is said besides), so they count only
    beside the column that makes them an input.
    """
    names = set(columns)
    found: list[str] = [name for name in ("prompt", "messages", "conversations") if name in names]
    found += [name for name, partner in (("context", "question"), ("source", "target")) if {name, partner} <= names]
    return found + [name for name in ("chosen", "tokens", "text", "input_ids") if name in names and "prompt" not in names]


def _canonical(value: Any, column: str = "") -> bytes:
    """The value as bytes, the same whether it came as a stream or from Arrow, with or without the nulls of other rows."""
    if column in ("messages", "conversations", "chosen"):
        value = _first_user_turn(value)
    if value is None:
        return b""
    if not isinstance(value, str):
        value = json.dumps(_without_nulls(value), sort_keys=True, ensure_ascii=False, default=str) if value != [] else ""
    return value.strip().encode("utf-8", "surrogatepass")


def _first_user_turn(turns: Any) -> Any:
    if not isinstance(turns, list):
        return turns if isinstance(turns, str) else None
    for turn in turns:
        if isinstance(turn, dict) and (turn.get("role") or turn.get("from")) in ("user", "human"):
            return turn.get("content") or turn.get("value") or turns
    return turns


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value] if value and isinstance(value[0], dict | list | float) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value  # a column of ints turns to floats later
