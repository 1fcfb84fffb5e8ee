"""A run's output directory: whether it is free, who writes it, and the files of metrics in it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config import OutputConfig, Refusal, RunConfig, write_config_file
from toolkit.config.places import check_place, unwritable
from toolkit.runs.summary import Summary
from toolkit.system.console import one_line, without_passwords
from toolkit.system.files import make_folder, regular, write_atomically
from toolkit.system.json_lines import strict_json
from toolkit.system.numbers import show_bytes

if TYPE_CHECKING:
    from accelerate import Accelerator

FILES = ("config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json", "run.json")
FOLDERS = ("checkpoints", "model", "incidents", "trackers", "hub_queue", "rollouts")
LOCK, OWNER = ".lock", ".owner.json"


def holds_a_run(directory: Path) -> bool:
    return any((directory / name).exists() for name in (*FILES, "checkpoints"))


def check_output_dir(config: OutputConfig) -> None:
    """Refuse an output directory that cannot be written or that holds a run which would be overwritten; writes nothing."""
    directory = Path(config.output_dir)
    check_place(directory, "--output-dir")
    there_is_a_run = holds_a_run(directory)
    resuming = isinstance(config, RunConfig) and (config.resume or config.resume_from)
    if there_is_a_run and not (resuming or config.overwrite_output_dir):
        raise Refusal(
            f"--output-dir {directory}: a run is already there. Continue it with --resume, take another --output-dir, "
            "or throw it away with --overwrite-output-dir."
        )


@contextlib.contextmanager
def claimed(config: OutputConfig, accelerator: Accelerator | None = None) -> Iterator[Path]:
    """Hold the output directory for as long as the block runs; without an accelerator, with config.yaml in it.

    The lock is the operating system's: it falls when its process dies, so a dead run blocks nobody. A refusal inside the
    block, before there is anything to keep, leaves no directory behind that was not there before. With an accelerator the
    main process holds it for all ranks, and what it refuses they all refuse.
    """
    from filelock import FileLock

    from toolkit.distributed.ranks import on_main  # with torch, which the rest of this file does without

    directory = Path(config.output_dir)
    existed = os.path.exists(directory)  # unlike Path's, it takes a name that is too long for one that is missing
    lock = FileLock(directory / LOCK)

    def claim() -> None:
        check_output_dir(config)
        try:
            make_folder(directory)
            _lock(lock, directory)
        except OSError as error:  # such as /proc, which lets nobody make a folder
            raise unwritable(directory, "--output-dir", error) from None
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
    except Exception as error:
        if lock.is_locked:  # by the main process of this run, and not by another run
            note_failure(directory, error)
        raise
    finally:
        lock.release()  # the file stays: unlinking it could take it away from one who just locked it


def write_config(config: OutputConfig) -> None:
    """Write config.yaml: the settings of the run that is in the directory, once it is clear that it continues."""
    write_config_file(config, Path(config.output_dir) / "config.yaml")


def _lock(lock: Any, directory: Path) -> None:
    """Take the lock, or name who has it; the owner is only named, the lock itself decides."""
    from filelock import Timeout

    owner = directory / OWNER
    try:
        lock.acquire(timeout=0.2, poll_interval=0.05)  # `is_locked` may hold it for a moment
    except Timeout:
        try:
            who = "process {pid} on {host}, since {since},".format_map(json.loads(owner.read_text()))
        except (OSError, ValueError, KeyError):
            who = "another process"
        raise Refusal(f"--output-dir {directory}: {who} is writing there now.") from None
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    owner.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))


def is_locked(directory: Path) -> bool:
    """Whether a process holds the directory now. A shared lock is tried, which others may try at the same time."""
    import fcntl

    try:
        with open(directory / LOCK, "rb", opener=regular) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a disk without locks
        return False
    return False


def note_failure(directory: Path, error: BaseException) -> None:
    """Write why a run failed next to who ran it, for `toolkit runs`. That file stays on this machine."""
    owner = directory / OWNER
    with contextlib.suppress(OSError, ValueError):
        said = without_passwords(one_line(f"{type(error).__name__}: {error}", 300))
        owner.write_text(json.dumps({**json.loads(owner.read_text()), "failed": said}))


def clear_metrics(directory: Path) -> None:
    """Remove the metrics of an earlier run: those of a fresh start must not follow them."""
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
            f"--output-dir {directory}: {show_bytes(free)} free, but {what} needs about {show_bytes(needed)}. "
            "Free some space, take another --output-dir, or write less with --save-strategy no or --save-total-limit 1."
        )


def write_summary(directory: Path, summary: Summary) -> None:
    """Write the final metrics to summary.json."""
    write_atomically(directory / "summary.json", json.dumps(strict_json(summary.metrics), indent=1, allow_nan=False) + "\n")
