"""Upload a run's queue, commit by commit: `python -m toolkit.hub.sender QUEUE PROCESS` does it while the run trains.

A process of its own, so that a connection that hangs holds up neither the training nor its end. It ends with the process
that started it; what is unfinished then stays in the queue.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config import Refusal
from toolkit.hub.client import (
    asked_wait,
    check_write_access,
    hub_api,
    make_repository,
    may_pass,
    public_already,
    quiet_hub,
    reason,
    waiting_times,
)
from toolkit.hub.files import left_behind
from toolkit.hub.queue import Job, list_jobs, only_sender, remove_job, write_record
from toolkit.system.console import say
from toolkit.system.standard_streams import outlive_the_log

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_POLL_SECONDS = 0.2


class CannotSend(Exception):
    """A commit that another try will not upload, or not soon; it stays in the queue."""


def start_sender(queue: Path) -> subprocess.Popen[bytes]:
    """Start the process that uploads what is in the queue, and what will be."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "toolkit.hub.sender", str(queue.absolute()), str(os.getpid())],
        stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # Ctrl-C is for the run
    )  # fmt: skip


def serve(queue: Path) -> None:
    """Upload in order, until a commit is refused: a later one must not go before it."""
    quiet_hub()
    api = hub_api()
    with only_sender(queue, wait=-1):
        while True:
            jobs = list_jobs(queue)
            if not jobs:
                time.sleep(_POLL_SECONDS)
                continue
            try:
                send_job(api, jobs[0], sleep=time.sleep, warn=say)
            except CannotSend as error:
                say(f"WARNING: the Hub: {jobs[0].message} can't be uploaded: {error}. It is kept in {queue}.")
                return


def send_job(
    api: HfApi, job: Job, *, sleep: Callable[[float], None], tries: int | None = None, warn: Callable[[str], None] | None = None
) -> Job:
    """Upload a commit and take it out of the queue; returns it with the repository's full name.

    Args:
        tries: how often; None: until it succeeds or can't.
        warn: called once, after three tries.

    Raises:
        CannotSend: it is refused, or `tries` were not enough. The reason is in its record.
    """
    waits, number = waiting_times(), 0
    while True:
        number += 1
        try:
            job = _send_once(api, job)
            remove_job(job)
            return job
        except Exception as error:
            if not job.folder.exists():  # left out for a later one that brings the same files
                return job
            job = replace(job, problem=reason(error))
            with contextlib.suppress(OSError):  # a full disk
                write_record(job)
            if not may_pass(error) or number == tries:
                raise CannotSend(job.problem) from error
            if number == 3 and warn:
                warn(f"WARNING: the Hub: {job.message} waits and is retried: {job.problem}")
            sleep(max(next(waits), asked_wait(error)))


def _send_once(api: HfApi, job: Job) -> Job:
    """One try. What an earlier one uploaded is found on the Hub and not uploaded again."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    job, head = _with_repository(api, job)
    if _has_arrived(api, job, head):
        return job
    files = job.files
    tree = api.list_repo_tree(job.repo_id, recursive=True, revision=head)
    removed = left_behind([entry.path for entry in tree if hasattr(entry, "blob_id")], files)
    job = replace(job, parent=head, problem=None)
    write_record(job)  # before: after a kill it must be known that it may have arrived
    api.create_commit(  # makes none if the branch has all of it
        job.repo_id,
        [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=_as_sent(name, path, job)) for name, path in files.items()),
            *(CommitOperationDelete(path_in_repo=name) for name in removed),
        ],
        commit_message=job.message, commit_description=job.mark, revision=job.revision or "main", parent_commit=head,
    )  # fmt: skip
    return job


def _as_sent(name: str, path: Path, job: Job) -> Path | bytes:
    """A file of a commit; of a model card the text, with the name of the repository, which may be known only now."""
    from toolkit.export.card import with_name

    if name != "README.md":
        return path
    card = path.read_bytes().decode()
    return with_name(card, job.repo_id).encode()


def _with_repository(api: HfApi, job: Job) -> tuple[Job, str]:
    """The commit with the full name of its repository, which is made if need be, and the branch's newest commit.

    Raises:
        Refusal: the repository is public, and this is to be private.
    """
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if "/" not in job.repo_id:  # the Hub could not be reached before
        job = replace(job, repo_id=check_write_access(api, job.repo_id, job.private, job.revision))
        write_record(job)
    try:
        info = api.repo_info(job.repo_id, revision=job.revision)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        if error.response.status_code != 404:
            raise
        make_repository(api, job.repo_id, job.private, job.revision)
        info = api.repo_info(job.repo_id, revision=job.revision)
    if job.private and not info.private:
        raise Refusal(public_already(job.repo_id))
    return job, str(info.sha)


def _has_arrived(api: HfApi, job: Job, head: str) -> bool:
    """Whether this commit is in the branch, possibly below later ones.

    If it has no known try, the whole branch is searched: its folder may be an older copy.
    """
    if job.parent == head:
        return False
    for commit in api.list_repo_commits(job.repo_id, revision=job.revision):
        if commit.commit_id == job.parent:
            return False
        if job.mark in commit.message or job.mark in commit.title:
            return True
    return False


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    outlive_the_log()
    threading.Thread(target=_end_with, args=(int(sys.argv[2]),), daemon=True).start()
    serve(Path(sys.argv[1]))
