"""A cache of folders under keys that name their content: built once, safe for many processes, and read only while whole.

A folder has its name when all of it is on the disk, with a digest of every file. Each start reads the digests again: a folder
that is damaged is rebuilt, by one process, which prints a line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from toolkit.config import Refusal
from toolkit.system.console import say
from toolkit.system.digests import damage_in, write_digests
from toolkit.system.files import make_folder, put_in_place, remove, waiting_lock

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

BATCH_ROWS = 1000  # rows of a record batch: datasets finds a row by a search over batches, so they stay small


def cached_splits(key: str, build: Callable[[Path], None]) -> DatasetDict:
    """The `<split>.arrow` files that `build(folder)` writes, as memory-mapped datasets; built only when `key` is new.

    `key` must change with anything that changes the rows: it is also the fingerprint of the datasets, hence the key of
    everything `datasets` derives from them. Several processes may call it at once: one builds, the others wait.
    """
    return open_splits(cache_folder(key, build))


def open_splits(folder: Path) -> DatasetDict:
    """The `<split>.arrow` files of a folder that `cache_folder` has returned, as memory-mapped datasets."""
    from datasets import Dataset, DatasetDict
    from datasets.table import MemoryMappedTable

    splits = DatasetDict()
    for path in sorted(folder.glob("*.arrow"), key=_split_order):
        if path.name.startswith("cache-"):  # what datasets derived from these files lies next to them
            continue
        table = MemoryMappedTable.from_file(str(path))
        # named by its content: the fingerprint that datasets would make has the file's time of modification in it
        splits[path.stem] = Dataset(table, split=path.stem, fingerprint=f"{folder.name}-{path.stem}")
    return splits


def cache_folder(key: str, build: Callable[[Path], None], *, goes_on: bool = False) -> Path:
    """The folder of `key` in the cache of `datasets`, as `build` has written it: a damaged one is rebuilt.

    Args:
        goes_on: `build` may be given the folder that it was filling when its process was killed, with `journal_of` it.

    Raises:
        Refusal: the cache can't be written.
    """
    from datasets import config as datasets_config

    cache = Path(datasets_config.HF_DATASETS_CACHE)
    folder = cache / key
    problem = _problem_of(folder)
    if problem is None:  # before the lock: a finished cache may be read-only
        return folder
    try:
        make_folder(cache)
        with waiting_lock(cache / f"{key}.lock", "prepares the same data"):
            problem = _problem_of(folder)  # another process may have built it since
            if problem is not None:
                if problem:
                    say(f"{folder} is damaged ({problem}): it is built anew", error=True)
                partial = cache / f"{key}.incomplete-{'kept' if goes_on else os.getpid()}"
                remains = [partial, journal_of(partial)] if goes_on else [partial]
                for abandoned in cache.glob(f"{key}.incomplete-*"):  # of a process that was killed: we hold the lock
                    if not goes_on or abandoned not in remains:
                        remove(abandoned)
                for made in remains:
                    made.mkdir(exist_ok=True)
                is_over = True
                try:
                    build(partial)
                    write_digests(partial)
                    put_in_place(partial, folder, aside=cache / f"{key}.incomplete-damaged")
                except BaseException as error:
                    # other data get another key, and a full disk needs the room; after anything else the work goes on
                    is_over = not goes_on or isinstance(error, Refusal | OSError)
                    raise
                finally:
                    for left in remains if is_over else ():
                        remove(left)
    except OSError as error:
        damaged = f" (the copy that is there is damaged: {problem})" if problem else ""
        raise Refusal(
            f"The prepared data can't be written to {cache}: {error.strerror or error}{damaged}. Make room there, or name "
            "another folder: export HF_DATASETS_CACHE=/a/folder/with/space"
        ) from error
    return folder


def journal_of(folder: Path) -> Path:
    """The folder of what is noted on the building of another one. It lasts as long, and is no part of it."""
    return Path(f"{folder}-journal")


def _problem_of(folder: Path) -> str | None:
    """None: the folder is whole; empty: it is missing; else what is wrong with it."""
    return damage_in(folder) if os.path.lexists(folder) else ""


class CutFile(Exception):
    """A file that this process has mapped was cut, or its disk is gone: the next read would end the process with SIGBUS."""

    exit_code, on_every_rank = 1, True


def mapped_files(dataset: Dataset) -> dict[str, int]:
    """The files that a dataset is mapped from, with their sizes in bytes."""
    return {file["filename"]: os.stat(file["filename"]).st_size for file in dataset.cache_files}


def check_uncut(files: dict[str, int]) -> None:
    """Check before each read that mapped files still have their size: microseconds a file.

    One that was deleted or renamed stays readable. One that is cut during the read still ends the process: nothing can be done
    about a mapping then, and the fault handler that `run_recipe` turns on shows where it was.

    Raises:
        CutFile: one of them is shorter than `mapped_files` found it, or its disk is gone.
    """
    for name, size in files.items():
        try:
            found = os.stat(name).st_size
        except FileNotFoundError:
            continue
        except OSError as error:  # such as a network drive that was disconnected
            raise CutFile(f"{name} can't be read any more: {error.strerror}. Once it can be, go on with --resume.") from None
        if found < size:
            raise CutFile(
                f"{name} was cut to {found:,} of {size:,} bytes while this process read it. Find out what wrote there, then go "
                "on with --resume: the next start builds the folder again."
            )


def write_tables(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """One Arrow stream file, as `datasets` memory-maps them; tables are written as they come."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for table in tables:
            writer.write_table(table, max_chunksize=BATCH_ROWS)


def _split_order(path: Path) -> tuple[int, str]:
    usual = ("train", "validation", "test")
    return (usual.index(path.stem) if path.stem in usual else len(usual), path.stem)
