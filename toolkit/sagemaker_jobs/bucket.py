"""A folder in the place of S3, kept equal to a container's checkpoints as SageMaker does it: file by file, deletions too."""

import contextlib
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

POLL_SECONDS = 0.1
Seen = dict[str, tuple[int, int]]  # of each file its time of change and its size, when it was copied last


def download(bucket: Path, folder: Path) -> Seen:
    """Copy all that is in the bucket; returns what is in the folder now."""
    bucket.mkdir(parents=True, exist_ok=True)
    shutil.copytree(bucket, folder, dirs_exist_ok=True)
    return _files(folder)


@contextlib.contextmanager
def kept_equal(folder: Path, bucket: Path, seen: Seen) -> Iterator[threading.Event]:
    """While the block runs, copy what changes in the folder; once more at its end, unless the event says: the machine is gone.

    Files are copied in random order, one after another: at any moment the bucket may hold half of what belongs together. A
    single file is there whole or not at all, as in S3.
    """
    gone, ended = threading.Event(), threading.Event()

    def work() -> None:
        while not ended.wait(POLL_SECONDS) and not gone.is_set():
            copy_changes(folder, bucket, seen, gone)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield gone
    finally:
        ended.set()
        thread.join()
        copy_changes(folder, bucket, seen, gone)


def copy_changes(folder: Path, bucket: Path, seen: Seen, gone: threading.Event) -> None:
    """One round: files that are new or changed, and deletions of those that this machine had."""
    now = _files(folder)
    todo = [path for path, state in now.items() if seen.get(path) != state] + [path for path in seen if path not in now]
    random.shuffle(todo)
    for path in todo:
        if gone.is_set():
            return
        if path not in now:
            (bucket / path).unlink(missing_ok=True)
            del seen[path]
            continue
        target, temporary = bucket / path, bucket.parent / f".copying-{threading.get_ident()}"
        with contextlib.suppress(OSError):  # gone or renamed in the meantime: the next round sees that
            shutil.copyfile(folder / path, temporary)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, target)
            seen[path] = now[path]


def _files(folder: Path) -> Seen:
    found: Seen = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            state = path.stat()
            if path.is_file():
                found[str(path.relative_to(folder))] = (state.st_mtime_ns, state.st_size)
    return found
