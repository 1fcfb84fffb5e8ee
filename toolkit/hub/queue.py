"""What is to be uploaded, on disk: one folder for each commit, whole or not there, in order.

`hub_queue/000003-step-40/` holds `job.json` and `files/`, with the paths that they get in the repository. A folder is renamed
into its place when it is complete and out of it when its commit has arrived, so that a kill at any moment loses nothing.
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
from typing import Any

from toolkit.system.console import warn_once
from toolkit.system.files import make_folder, sync, sync_tree, write_atomically

QUEUE, RECORD, FILES, LOCK = "hub_queue", "job.json", "files", ".lock"
WAITING_MOST = 4  # commits; of more, one whose files a later one brings in a newer state is left out


@dataclass(frozen=True)
class Job:
    """One commit: where it goes and what became of it so far.

    `repo_id` without a user is one of whoever the token belongs to. `parent`: the commit before it, once it has been tried.
    `mark` stands in the description of the commit: by it a commit that arrived is known. `problem`: why it is still here.
    `sizes`: bytes of its files; a folder that lacks some of them, as a copy of half a queue does, is no commit.
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
    """Append a commit. `fill` puts its files under the folder that it is given.

    Raises:
        OSError: it can't be written; the queue is as it was.
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
    """The commits that wait, in order; a folder that has just been removed, or isn't whole, is left out."""
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
    """What is known of a commit; None where its record was cut or changed.

    Raises:
        FileNotFoundError: there is none.
    """
    kinds: dict[str, tuple[type, ...]] = {
        "repo_id": (str,), "message": (str,), "revision": (str, type(None)), "private": (bool, type(None)), "mark": (str,),
        "parent": (str, type(None)), "problem": (str, type(None)), "sizes": (dict,),
    }  # fmt: skip
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if record.keys() <= kinds.keys() and all(isinstance(value, kinds[name]) for name, value in record.items()):
            return Job(**record, folder=folder)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        pass
    return None


def write_record(job: Job) -> None:
    """Write what is known of a commit into its folder."""
    record: dict[str, Any] = {f.name: getattr(job, f.name) for f in dataclasses.fields(job) if f.name != "folder"}
    write_atomically(job.folder / RECORD, json.dumps(record, indent=1) + "\n")


def remove_job(job: Job) -> None:
    """Take a commit out of the queue: at once, then its files."""
    done = job.folder.with_name(f".done-{job.folder.name}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(job.folder, done)
    shutil.rmtree(done, ignore_errors=True)


def leave_out_replaced(queue: Path) -> list[Job]:
    """Remove commits that wait in a line too long, when a later one brings all of their files in a newer state.

    Never the first, which may be on its way. Returns those removed.
    """
    removed: list[Job] = []
    jobs = list_jobs(queue)
    for job in jobs[1:-1]:
        if len(jobs) - len(removed) > WAITING_MOST and job.files.keys() <= jobs[-1].files.keys():
            remove_job(job)
            removed.append(job)
    return removed


def clean_queue(queue: Path) -> None:
    """Remove what dead processes left half written or half deleted."""
    for pattern in (".tmp-*", ".done-*"):
        for path in queue.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def only_sender(queue: Path, wait: float = 0.0) -> Iterator[bool]:
    """Be the only process that uploads from a queue, or be told that another one is. `wait` in seconds."""
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
