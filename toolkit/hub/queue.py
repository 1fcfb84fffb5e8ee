"""The upload queue on disk: one folder for each commit, complete or absent, in order.

`hub_queue/000003-step-40/` holds `job.json` and `files/`, with their paths in the repository. A folder is renamed into its
place when it is complete and out of it when its commit has arrived, so a kill at any moment loses nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

from toolkit.system.console import warn_once
from toolkit.system.files import make_folder, sync, sync_tree, write_atomically
from toolkit.system.json_lines import parse_object

QUEUE, RECORD, FILES, LOCK = "hub_queue", "job.json", "files", ".lock"
WAITING_MOST = 4  # commits; of more, those whose files a later one replaces are left out


@dataclass(frozen=True)
class Job:
    """One commit: where it goes and its state.

    `repo_id` without a user is one of the token's owner. `parent`: the commit before it, once it has been tried. `mark`: in the
    commit's description, to find it on the Hub. `problem`: why the last try failed. `sizes`: bytes of its files; a folder that
    lacks some of them, as a copy of half a queue does, is no commit.
    """

    repo_id: str
    message: str
    revision: str | None = None
    private: bool | None = None
    mark: str = ""
    parent: str | None = None
    problem: str | None = None
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    folder: Path = Path()

    @property
    def files(self) -> dict[str, Path]:
        """By their paths in the repository."""
        root = self.folder / FILES
        return {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}


def add_job(queue: Path, job: Job, name: str, fill: Callable[[Path], None]) -> Job:
    """Append a commit. `fill` puts its files under the folder that it gets.

    Raises:
        OSError: it can't be written; the queue is unchanged.
    """
    make_folder(queue)
    temporary = queue / f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        (temporary / FILES).mkdir(parents=True)
        fill(temporary / FILES)
        job = dataclasses.replace(job, mark=job.mark or f"toolkit:{secrets.token_hex(8)}", folder=temporary)
        job = dataclasses.replace(job, sizes={name: path.stat().st_size for name, path in job.files.items()})
        write_record(job)
        sync_tree(temporary)
        last = max((int(path.name[:6]) for path in _folders(queue)), default=0)
        folder = queue / f"{last + 1:06d}-{name}"
        os.rename(temporary, folder)
        sync(queue)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return dataclasses.replace(job, folder=folder)


def list_jobs(queue: Path) -> list[Job]:
    """The waiting commits, in order, without folders that have just been removed or aren't complete."""
    found = []
    for folder in _folders(queue):
        with contextlib.suppress(FileNotFoundError):
            job = _read_record(folder)
            if job is None:
                warn_once(f"WARNING: {folder / RECORD} is damaged: its files can't be sent. Remove that folder.")
            elif job.sizes == {name: path.stat().st_size for name, path in job.files.items()}:
                found.append(job)
    return found


def _read_record(folder: Path) -> Job | None:
    """The record of a commit; None if it was cut or changed.

    Raises:
        FileNotFoundError: there is none.
    """
    try:
        record = parse_object((folder / RECORD).read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        raise
    except OSError:
        return None
    kinds = {name: kind for name, kind in get_type_hints(Job).items() if name != "folder"}
    kinds["sizes"] = dict
    if record is None or not {"repo_id", "message"} <= record.keys() <= kinds.keys():
        return None
    return Job(**record, folder=folder) if all(isinstance(value, kinds[name]) for name, value in record.items()) else None


def write_record(job: Job) -> None:
    """Write the record of a commit into its folder."""
    record = {name: value for name, value in dataclasses.asdict(job).items() if name != "folder"}
    write_atomically(job.folder / RECORD, json.dumps(record, indent=1) + "\n")


def remove_job(job: Job) -> None:
    """Remove a commit from the queue, at once; then its files."""
    done = job.folder.with_name(f".done-{job.folder.name}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(job.folder, done)
    shutil.rmtree(done, ignore_errors=True)


def leave_out_replaced(queue: Path) -> list[Job]:
    """From a queue longer than WAITING_MOST, remove commits whose files a later one all replaces; returns those.

    Never the first, which may be being sent.
    """
    removed: list[Job] = []
    jobs = list_jobs(queue)
    for job in jobs[1:-1]:
        if len(jobs) - len(removed) > WAITING_MOST and job.files.keys() <= jobs[-1].files.keys():
            remove_job(job)
            removed.append(job)
    return removed


def clean_queue(queue: Path) -> None:
    """Remove what killed processes left half written or half deleted."""
    for pattern in (".tmp-*", ".done-*"):
        for path in queue.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def only_sender(queue: Path, wait: float = 0.0) -> Iterator[bool]:
    """Hold the queue's lock: True, or False if another process uploads from it. `wait` in seconds, -1 for ever."""
    from filelock import FileLock, Timeout

    lock = FileLock(queue / LOCK)
    try:
        lock.acquire(timeout=wait)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _folders(queue: Path) -> list[Path]:
    return sorted(path for path in queue.glob("[0-9]*-*") if path.is_dir() and path.name[:6].isdigit())
