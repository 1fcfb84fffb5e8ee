"""A run's output directory: whether it is free, who writes it, and the files of figures in it."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.config import OutputConfig, Refusal, write_config_file
from toolkit.summary import Summary

FILES = ("config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json", "run.json")
FOLDERS = ("checkpoints", "model", "incidents", "trackers")
LOCK = ".lock"


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
def claimed(config: OutputConfig, is_main_process: bool = True) -> Iterator[Path]:
    """Hold the output directory, with config.yaml in it, for as long as the block runs.

    The lock is the operating system's: it falls when its process dies, so a dead run blocks nobody. A refusal inside the
    block, before there is anything to keep, leaves no directory behind that was not there before.
    """
    from filelock import FileLock, Timeout

    directory = Path(config.output_dir)
    if not is_main_process:
        yield directory
        return
    check_output_dir(config)
    existed = directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise Refusal(f"--output-dir {directory}: another process is writing there now.") from None
    try:
        if config.overwrite_output_dir:
            clear_output_dir(directory)
        write_config_file(config, directory / "config.yaml")
        yield directory
    except Refusal:
        if not existed and not (directory / "metrics.jsonl").exists():
            shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        lock.release()  # the file stays: unlinking it could take it away from one who just locked it


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
    """Append one JSON object to a .jsonl file, in a single write."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json_line(record) + "\n")


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


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a crash, sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
