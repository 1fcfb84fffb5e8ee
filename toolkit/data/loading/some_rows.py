"""Some of the examples of a split, and digests of its contents: for values that are computed once and kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from toolkit.data.loading.loaders import TrainLoader
from toolkit.data.loading.order import plan_steps
from toolkit.data.loading.packing import PackedRows, PlainRows, Rows

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass
class SomeRows:
    """Some of the examples of a split, by their numbers there."""

    rows: Rows
    numbers: np.ndarray

    def __post_init__(self) -> None:
        self.lengths = self.rows.lengths[self.numbers]
        self.units = {name: values[self.numbers] for name, values in self.rows.units.items()}

    def __len__(self) -> int:
        return len(self.numbers)

    def documents(self, examples: list[int]) -> list[dict[str, Any]]:
        return self.rows.documents(self.numbers[examples].tolist())

    def origins(self, example: int) -> list[str]:
        return self.rows.origins(int(self.numbers[example]))


def seen_in_training(train: TrainLoader) -> np.ndarray:
    """The numbers of the examples that a run from its beginning to its end trains on, in ascending order."""
    if train.examples_to_consume >= train.epoch_size:
        return np.arange(train.epoch_size)
    plans = plan_steps(
        train.epoch_size, train.examples_to_consume, train.seed, 0, train.global_batch_size, train.micro_batch_size, 0, 1,
        train.order,
    )  # fmt: skip
    return np.array(sorted({example for plan in plans for example in plan.everyone}))


def digest_of_columns(dataset: Dataset, columns: Sequence[str]) -> str:
    """SHA-256 over the values of those of the columns that a dataset has."""
    digest = hashlib.sha256()
    read = [name for name in columns if name in dataset.column_names]
    for batch in dataset.with_format("arrow", columns=read).iter(10_000):
        for values in batch.columns:
            for chunk in values.chunks:
                flat = chunk.flatten() if hasattr(chunk, "offsets") else chunk
                digest.update(np.ascontiguousarray(flat.to_numpy(zero_copy_only=False)).data)
    return digest.hexdigest()


def digest_of_rows(rows: Rows, columns: Sequence[str]) -> str:
    """SHA-256 over the examples of a split: these columns of its documents, and which pieces of them are an example."""
    if isinstance(rows, PlainRows):
        return digest_of_columns(rows.dataset, columns)
    packed = cast(PackedRows, rows)
    digest = hashlib.sha256(digest_of_columns(packed.plain.dataset, columns).encode())
    for part in (packed.packing.documents, packed.packing.starts, packed.packing.ends, packed.packing.row_bounds):
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()
