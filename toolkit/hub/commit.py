"""One commit of the queue on its way to the Hub: made once, however often the connection breaks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from toolkit.config import Refusal
from toolkit.hub.client import asked_wait, check_write_access, make_repository, may_pass, public_already, reason, waiting_times
from toolkit.hub.files import left_behind
from toolkit.hub.queue import Job, remove_job, write_record


class CannotSend(Exception):
    """A commit that another try will not bring to the Hub, or not soon; it stays in the queue."""


def send_job(
    api: Any, job: Job, *, sleep: Callable[[float], None], tries: int | None = None, say: Callable[[str], None] | None = None
) -> Job:
    """Bring a commit to the Hub and take it out of the queue; returns it with the repository's whole name.

    Args:
        tries: how often; None: until it goes well or can't.
        say: is told once that it doesn't go well and is tried again.

    Raises:
        CannotSend: it is refused, or `tries` were not enough. The reason stands in its record.
    """
    waits, told, number = waiting_times(), False, 0
    while True:
        number += 1
        try:
            job = _send_once(api, job)
            remove_job(job)
            return job
        except Exception as error:
            if not job.folder.exists():  # left out for a later one that brings the same files
                return job
            job = dataclasses.replace(job, problem=reason(error))
            with contextlib.suppress(OSError):  # a full disk: then the reason is only said
                write_record(job)
            if not may_pass(error) or number == tries:
                raise CannotSend(job.problem) from error
            if number >= 3 and say and not told:
                say(f"WARNING: the Hub: {job.message} waits, and is tried again: {job.problem}")
                told = True
            sleep(max(next(waits), asked_wait(error)))


def _send_once(api: Any, job: Job) -> Job:
    """One try. What an earlier one brought to the Hub is found there and not brought again."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    job, head = _with_repository(api, job)
    branch = job.revision or "main"
    if _has_arrived(api, job, head):
        return job
    tree = api.list_repo_tree(job.repo_id, recursive=True, revision=head)
    removed = left_behind([entry.path for entry in tree if hasattr(entry, "blob_id")], files := job.files)
    job = dataclasses.replace(job, parent=head, problem=None)
    write_record(job)  # before: whoever goes on after a kill must know that it may have arrived
    api.create_commit(  # makes none where the branch has all of it
        job.repo_id,
        [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()),
            *(CommitOperationDelete(path_in_repo=name) for name in removed),
        ],
        commit_message=job.message, commit_description=job.mark, revision=branch, parent_commit=head,
    )  # fmt: skip
    return job


def _with_repository(api: Any, job: Job) -> tuple[Job, str]:
    """The commit with the whole name of its repository, which is made if need be, and the branch's newest commit.

    Raises:
        Refusal: it is public, and this is to be private.
    """
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if "/" not in job.repo_id:  # the Hub could not be asked before
        job = dataclasses.replace(job, repo_id=check_write_access(api, job.repo_id, job.private, job.revision))
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
    return job, info.sha


def _has_arrived(api: Any, job: Job, head: str) -> bool:
    """Whether this commit is in the branch, below others that came after it.

    Of one that was never tried as far as is known, all of the branch is looked through: its folder may be an older copy.
    """
    if job.parent == head:
        return False
    for commit in api.list_repo_commits(job.repo_id, revision=job.revision):
        if commit.commit_id == job.parent:
            return False
        if job.mark in commit.message or job.mark in commit.title:
            return True
    return False
