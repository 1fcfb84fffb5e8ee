"""A cache of Arrow files under a key that names their content: built once, safe for many processes, never half there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from toolkit.config import Refusal

if TYPE_CHECKING:
    from datasets import DatasetDict

BATCH_ROWS = 1000  # rows of a record batch: datasets finds a row by a search over batches, so they stay small


def cached_splits(key: str, build: Callable[[Path], None]) -> DatasetDict:
    """The `<split>.arrow` files that `build(folder)` writes, as memory-mapped datasets; built only when `key` is new.

    `key` must change with anything that changes the rows: it is also the fingerprint of the datasets, hence the key of
    everything `datasets` derives from them. Several processes may ask at once: one builds, the others wait.
    """
    from datasets import Dataset, DatasetDict

    folder = cache_folder(key, build)
    splits = DatasetDict()
    for path in sorted(folder.glob("*.arrow"), key=_split_order):
        if path.name.startswith("cache-"):  # what datasets derived from these files lies beside them
            continue
        rows = Dataset.from_file(str(path), split=path.stem)
        rows._fingerprint = f"{key}-{path.stem}"  # the default one holds the file's modification time
        splits[path.stem] = rows
    return splits


def cache_folder(key: str, build: Callable[[Path], None]) -> Path:
    """The folder of `key` in the cache of `datasets`; it appears with its name only when `build` has finished.

    Raises:
        Refusal: the cache can't be written.
    """
    from datasets import config as datasets_config
    from filelock import FileLock

    cache = Path(datasets_config.HF_DATASETS_CACHE)
    folder = cache / key
    if folder.is_dir():  # before the lock: a finished cache may be read-only
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(str(cache / f"{key}.lock")):
            if not folder.is_dir():
                for abandoned in cache.glob(f"{key}.incomplete-*"):  # of a process that was killed: we hold the lock
                    shutil.rmtree(abandoned, ignore_errors=True)
                partial = Path(tempfile.mkdtemp(prefix=f"{key}.incomplete-", dir=cache))
                try:
                    build(partial)
                    partial.chmod(0o755)
                    os.rename(partial, folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise Refusal(
            f"The prepared data can't be written to {cache}: {error.strerror or error}. Make room there, or name another "
            "folder: export HF_DATASETS_CACHE=/a/folder/with/space"
        ) from error
    return folder


def write_tables(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """One Arrow stream file, as `datasets` memory-maps them; tables are written as they come."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for table in tables:
            writer.write_table(table, max_chunksize=BATCH_ROWS)


def _split_order(path: Path) -> tuple[int, str]:
    usual = ("train", "validation", "test")
    return (usual.index(path.stem) if path.stem in usual else len(usual), path.stem)
