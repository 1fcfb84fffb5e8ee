"""Tokenized splits as Parquet files that training reads, also as a stream and by URL: whole documents, already in mixed order.

All files of an output get their names at once, when every one of them is on the disk.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toolkit.cache.arrow import check_uncut, mapped_files
from toolkit.config import Refusal
from toolkit.data.loading.columns import column
from toolkit.data.tokenize.vocabulary import TOKENIZED_WITH
from toolkit.system.console import say
from toolkit.system.files import make_folder, put_in_place, remove, waiting_lock
from toolkit.system.progress import progress

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

SHARD_TOKENS = 50_000_000  # of a shard, unless their number is given
GROUP_ROWS = 1000  # of a row group: what a reader holds in memory


@dataclass(frozen=True)
class Written:
    """What was written of one split."""

    shards: int
    rows: int
    tokens: int
    bytes: int


def check_output(folder: Path) -> None:
    """Refuse a folder that holds anything: what is there may be of other rows, and training would read both."""
    if folder.is_dir() and (there := sorted(os.listdir(folder))):
        raise Refusal(f"{folder}: is there already, and holds {there[0]}. Name another folder, or remove that one.")


def write_shards(
    splits: Mapping[str, Dataset], folder: Path, *, mark: str, seed: int, num_shards: int | None = None
) -> dict[str, Written]:
    """Write `SPLIT-00000-of-00010.parquet` ... with `input_ids`, `labels` where there are any, and the mark of the vocabulary.

    Rows are shuffled over all shards of a split, by the seed alone; one killed in between begins again, to the same files.

    Args:
        splits: tokenized ones, of `tokenize_for_lm` or `tokenize_for_sft`.
        mark: of `vocabulary_mark`.
        num_shards: of the training split. Default: one for each 50 million tokens.

    Raises:
        Refusal: the folder holds something, there are fewer rows than shards, or the disk can't be written.
    """
    from datasets import config as datasets_config

    cache = Path(datasets_config.HF_DATASETS_CACHE)
    name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:24]
    temporary = folder.absolute().parent / f".{folder.name}.incomplete"
    try:
        make_folder(cache)
        make_folder(temporary.parent)
        with waiting_lock(cache / f"shards-{name}.lock", "writes the same folder"):
            check_output(folder)
            remove(temporary)  # of a process that was killed: we hold the lock
            temporary.mkdir()
            try:
                written = {
                    split: _write_split(rows, temporary, split, mark, seed, num_shards if split == "train" else None)
                    for split, rows in splits.items()
                }
                put_in_place(temporary, folder, aside=temporary.with_suffix(".empty"))
            finally:
                remove(temporary)
    except OSError as error:
        raise Refusal(
            f"{folder}: can't be written ({error.strerror or error}). Make room there, or name another folder."
        ) from error
    return written


def _write_split(rows: Dataset, folder: Path, split: str, mark: str, seed: int, num_shards: int | None) -> Written:
    lengths = column(rows, "length")
    tokens = int(lengths.sum())
    count = num_shards or max(1, min(len(rows), math.ceil(tokens / SHARD_TOKENS)))
    if count > len(rows):
        raise Refusal(f"--num-shards {count}: there are {len(rows):,} rows to write. Lower it.")
    columns = [name for name in ("input_ids", "labels") if name in rows.column_names]
    table, files = rows.select_columns(columns).with_format("arrow"), mapped_files(rows)
    parts = np.array_split(np.random.default_rng(seed).permutation(len(rows)), count)
    size = 0
    with progress(f"Writing {split}", "rows", len(rows)) as add:
        for number, part in enumerate(parts):
            path = folder / f"{split}-{number:05}-of-{count:05}.parquet"
            with _writer(path, columns) as writer:
                for start in range(0, len(part), GROUP_ROWS):
                    check_uncut(files)
                    group = part[start : start + GROUP_ROWS]
                    writer.write_table(_marked(table[group], mark, writer.schema))
                    add(len(group))
            size += path.stat().st_size
            say(f"{path.name}: {len(part):,} rows, {int(lengths[part].sum()):,} tokens, {path.stat().st_size / 1e6:,.1f} MB")
    return Written(count, len(rows), tokens, size)


def _writer(path: Path, columns: list[str]) -> pa.parquet.ParquetWriter:
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema([*((name, pa.list_(pa.int32())) for name in columns), (TOKENIZED_WITH, pa.string())])
    return parquet.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)


def _marked(table: pa.Table, mark: str, schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    return pa.table([*table.columns, pa.array([mark] * len(table))], schema=schema)
