"""Columns of tokenized rows as NumPy arrays, in the types that `datasets` gives (int64, float32), without an object a number.

`datasets` makes an array of each list of a batch, and an object of each entry of a column that has several record batches: most
of the time of a loader whose documents are short, and gigabytes of memory for ten million rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import Refusal

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_TYPES: dict[str, type] = {"i": np.int64, "u": np.int64, "f": np.float32}  # by the kind of NumPy's type


def check_splits(splits: object, *columns: str) -> None:
    """Refuse what is no mapping of names to datasets, as one dataset alone, or has one to train on without these columns."""
    if not isinstance(splits, Mapping) or not all(hasattr(split, "column_names") for split in splits.values()):
        raise Refusal(
            f"splits are datasets by name, {{'train': ..., 'validation': ...}}, not {_kind(splits)}. "
            "datasets.Dataset.from_list makes a dataset of rows."
        )
    for name, split in splits.items():
        missing = [each for each in columns if each not in (split.column_names or columns)]
        if missing and name != "test":
            raise Refusal(
                f"the split {name} has no column {missing[0]}, but {', '.join(split.column_names)}: loaders read tokenized "
                "rows. Text, or input_ids and labels, go through tokenize_for_sft, tokenize_for_lm or another one first."
            )


def _kind(splits: object) -> str:
    values = splits.values() if isinstance(splits, Mapping) else ()
    return type(splits).__name__ + (f" of {' and '.join(sorted({type(value).__name__ for value in values}))}" if values else "")


def column(dataset: Dataset, name: str) -> np.ndarray:
    """A column of numbers of a map-style dataset."""
    return _as_numpy(dataset.with_format("arrow", columns=[name])[:][name])


class Columns:
    """Columns of a map-style dataset, of which some rows at a time are read.

    Those of numbers and of lists of numbers are views of flat arrays; the others come as `datasets` makes them.
    """

    def __init__(self, dataset: Dataset, names: Sequence[str]) -> None:
        flat = [name for name in names if _is_flat(dataset.data.schema.field(name).type)]
        others = [name for name in names if name not in flat]
        self._flat = dataset.with_format("arrow", columns=flat) if flat else None
        self._others = dataset.with_format("numpy", columns=others) if others else None

    def read(self, rows: list[int]) -> dict[str, Sequence[Any]]:
        """The entries of these rows, by column."""
        table = self._flat[rows] if self._flat is not None else None
        columns = {} if table is None else {name: _entries(table[name]) for name in table.column_names}
        return columns if self._others is None else columns | self._others[rows]


def _is_flat(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    inner = kind.value_type if types.is_list(kind) else kind
    return bool(types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(kind))


def _entries(values: pa.ChunkedArray) -> Any:
    if not hasattr(values.type, "value_type"):
        return _as_numpy(values)
    lists = values.combine_chunks()
    ends = np.cumsum(lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
    flat = _as_numpy(lists.flatten())
    return [flat[start:end] for start, end in pairwise([0, *ends.tolist()])]


def _as_numpy(numbers: pa.ChunkedArray | pa.Array) -> np.ndarray:
    values: np.ndarray = numbers.to_numpy(zero_copy_only=False)
    return values.astype(_TYPES.get(values.dtype.kind, values.dtype))
