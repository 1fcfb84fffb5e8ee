"""Columns of tokenized rows against what `datasets` itself makes of them."""

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, concatenate_datasets

from toolkit.data.loading.columns import Columns, column

TYPES = {
    "input_ids": pa.list_(pa.int32()), "label": pa.int8(), "share": pa.float64(), "wanted": pa.bool_(), "scores": pa.list_(pa.float64()),
    "name": pa.string(), "nested": pa.list_(pa.list_(pa.int32())), "same": pa.list_(pa.int64()),
}  # fmt: skip


def part(rows: int, seed: int) -> Dataset:
    draw = np.random.default_rng(seed)
    ids = [draw.integers(0, 99, draw.integers(0, 7)).tolist() for _ in range(rows)]
    values = {
        "input_ids": ids, "label": draw.integers(-5, 5, rows), "share": draw.random(rows), "wanted": draw.random(rows) < 0.5,
        "scores": [[each / 7 for each in row] for row in ids], "name": [f"row {i}" for i in range(rows)],
        "nested": [[row, row[:1]] for row in ids], "same": [[i, i + 1, i + 2] for i in range(rows)],
    }  # fmt: skip
    return Dataset(pa.table({name: pa.array(list(value), TYPES[name]) for name, value in values.items()}))


@pytest.mark.parametrize("wanted", [[5, 0, 6, 2, 2], [3]])
@pytest.mark.parametrize("selected", [False, True])
def test_entries_are_those_that_datasets_makes(selected: bool, wanted: list[int]) -> None:
    """In their types, of rows in any order from several record batches, with and without an index over them.

    Fails when: lists are cut one entry too late; floats stay float64.
    """
    rows = concatenate_datasets([part(5, 1), part(9, 2), part(1, 3)])
    rows = rows.select([14, 3, 0, 7, 7, 12, 5]) if selected else rows
    expected, found = rows.with_format("numpy")[wanted], Columns(rows, rows.column_names).read(wanted)
    assert found.keys() == expected.keys() == TYPES.keys()
    for name in TYPES:
        assert len(found[name]) == len(wanted), name
        for ours, theirs in zip(found[name], expected[name], strict=True):
            if name == "nested":
                assert [each.tolist() for each in ours] == [each.tolist() for each in theirs]
            else:
                assert np.asarray(ours).dtype == np.asarray(theirs).dtype, name
                assert np.asarray(ours).tolist() == np.asarray(theirs).tolist(), name


@pytest.mark.parametrize("name", ["label", "share", "wanted"])
def test_a_column_is_what_datasets_makes_of_it(name: str) -> None:
    """Fails when: whole numbers stay in their narrow type, in which a sum would overflow."""
    rows = concatenate_datasets([part(5, 1), part(9, 2)]).select([13, 0, 5])
    expected = rows.with_format("numpy")[:][name]
    assert column(rows, name).dtype == expected.dtype
    assert column(rows, name).tolist() == expected.tolist()
