"""A run's output directory: whether it is free, who writes it, and the files of figures in it."""

import contextlib
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.config import OutputConfig, Refusal, write_config_file
from toolkit.summary import Summary

FILES = ("config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json", "run.json")
FOLDERS = ("checkpoints", "model", "incidents", "trackers", "hub_queue")
LOCK, OWNER = ".lock", ".owner.json"


def holds_a_run(directory: Path) -> bool:
    return any((directory / name).exists() for name in (*FILES, "checkpoints"))


def check_output_dir(config: OutputConfig) -> None:
    """Refuse an output directory that cannot be written or that holds a run which would be overwritten; writes nothing."""
    directory = Path(config.output_dir)
    if directory.exists() and not directory.is_dir():
        raise Refusal(f"--output-dir {directory}: is a file, not a directory.")
    parent = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        raise Refusal(f"--output-dir {directory}: no permission to write in {parent}.")
    resuming = getattr(config, "resume", False) or getattr(config, "resume_from", None)
    if holds_a_run(directory) and not (resuming or config.overwrite_output_dir):
        raise Refusal(
            f"--output-dir {directory}: a run is already there. Continue it with --resume, take another --output-dir, "
            "or throw it away with --overwrite-output-dir."
        )


@contextlib.contextmanager
def claimed(config: OutputConfig, accelerator: Any = None) -> Iterator[Path]:
    """Hold the output directory for as long as the block runs; without an accelerator, with config.yaml in it.

    The lock is the operating system's: it falls when its process dies, so a dead run blocks nobody. A refusal inside the
    block, before there is anything to keep, leaves no directory behind that was not there before. With an accelerator the
    main process holds it for all ranks, and what it refuses they all refuse.
    """
    from filelock import FileLock

    from toolkit.ranks import on_main  # with torch, which the rest of this file does without

    directory = Path(config.output_dir)
    existed = directory.exists()
    lock = FileLock(directory / LOCK)

    def claim() -> None:
        check_output_dir(config)
        make_folder(directory)
        _lock(lock, directory)
        if config.overwrite_output_dir:
            clear_output_dir(directory)
        if accelerator is None:
            write_config(config)

    try:
        if accelerator is None:
            claim()
        else:
            on_main(accelerator, claim)
        yield directory
    except Refusal:
        kept = ("metrics.jsonl", "samples.jsonl", "checkpoints", "incidents", "model")
        if lock.is_locked and not existed and not any((directory / name).exists() for name in kept):
            shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        lock.release()  # the file stays: unlinking it could take it away from one who just locked it


def write_config(config: OutputConfig) -> None:
    """Write config.yaml: the settings of the run that is in the directory, once it is clear that it goes on."""
    write_config_file(config, Path(config.output_dir) / "config.yaml")


def _lock(lock: Any, directory: Path) -> None:
    """Take the lock, or say who has it; the owner is only named, the lock itself decides."""
    from filelock import Timeout

    owner = directory / OWNER
    try:
        lock.acquire(timeout=0)
    except Timeout:
        try:
            told = "process {pid} on {host}, since {since},".format_map(json.loads(owner.read_text()))
        except (OSError, ValueError, KeyError):
            told = "another process"
        raise Refusal(f"--output-dir {directory}: {told} is writing there now.") from None
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    owner.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))


def clear_figures(directory: Path) -> None:
    """Remove the figures of an earlier run: those of a fresh start must not follow them."""
    for name in ("metrics.jsonl", "samples.jsonl", "summary.json"):
        (directory / name).unlink(missing_ok=True)


def clear_output_dir(directory: Path) -> None:
    """Remove what a run writes, and nothing else that lies there."""
    for name in FILES:
        (directory / name).unlink(missing_ok=True)
    for name in FOLDERS:
        shutil.rmtree(directory / name, ignore_errors=True)


def check_disk_space(directory: str | Path, needed: int, what: str) -> None:
    """Refuse to start when the disk cannot hold what the run is going to write; sizes in bytes."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise Refusal(
            f"--output-dir {directory}: {free / 1e9:.2f} GB free, but {what} needs about {needed / 1e9:.2f} GB. "
            "Free some space, take another --output-dir, or write less with --save-strategy no or --save-total-limit 1."
        )


def json_line(record: dict[str, Any]) -> str:
    """Strict JSON: a number that is not finite becomes null, since JSON has no word for it."""
    return json.dumps({name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in record.items()})


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON object to a .jsonl file, whole or not at all; its folder is made when it isn't there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json_line(record) + "\n")
    except OSError:
        with contextlib.suppress(OSError):  # half a line would hide those after it from a reader
            os.truncate(path, size)
        raise


class LineFile:
    """A .jsonl file that a full disk does not stop: lines that can't be written wait for the next one that can."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[dict[str, Any]] = []

    def append(self, record: dict[str, Any]) -> OSError | None:
        """Write a record, after those that wait; returns the error when they begin to wait with this one."""
        began_waiting = not self._waiting
        self._waiting.append(record)
        try:
            while self._waiting:
                append_line(self.path, self._waiting[0])
                self._waiting.pop(0)
        except OSError as error:
            return error if began_waiting else None
        return None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file; a last line cut off by a crash is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def truncate_lines(path: Path, last_step: int) -> None:
    """Drop the records after a step, so that a resumed run writes no step twice; atomic."""
    if path.exists():
        kept = [json_line(record) for record in read_lines(path) if record.get("step", 0) <= last_step]
        write_atomically(path, "".join(line + "\n" for line in kept))


def write_summary(directory: Path, summary: Summary) -> None:
    """Write the final figures to summary.json."""
    write_atomically(directory / "summary.json", json.dumps(summary.figures, indent=1) + "\n")


def make_folder(path: Path) -> None:
    """Make a folder with those above it, so that a power loss takes none of their names away."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def written_beside(temporary: Path) -> Iterator[None]:
    """A block that fills a temporary directory; when it fails nothing of that stays.

    Raises:
        OSError: also for safetensors' errors, which wrap the operating system's in their own words.
    """
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(str(error)) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a crash, sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
