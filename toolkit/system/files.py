"""Files and folders that a crash leaves whole: written next to their place, synced, then renamed. Temporary folders; locks."""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from toolkit.system.console import say

SILENT_SECONDS = 3.0  # of waiting for a lock, before a message
TEMPORARY = "toolkit-temporary-"
NEW_SECONDS = 60.0  # in which a folder may have no lock yet


def make_folder(path: Path) -> None:
    """Make a folder with those above it, so that a power loss takes none of their names away."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def regular(path: str, flags: int) -> int:
    """An `opener` for `open`: a named pipe, a socket or a device in a file's place is an error, and nobody waits for it.

    Raises:
        OSError: what is there is none of a file and a folder, which `open` itself refuses.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


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


def sync_tree(folder: Path) -> None:
    """Wait until a folder is on the disk with all that is in it; links are not followed."""
    for path in folder.iterdir():
        if path.is_symlink():
            continue
        if path.is_dir():
            sync_tree(path)
        else:
            sync(path)
    sync(folder)


@contextlib.contextmanager
def written_next_to(temporary: Path) -> Iterator[None]:
    """A block that fills a temporary directory; when it fails nothing of that stays, and `naming` names its parent."""
    try:
        with naming(temporary.parent):
            yield
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def naming(place: Path) -> Iterator[None]:
    """A block that writes at a place, which is in the errors of that: a full disk's name none.

    Raises:
        OSError: also for the errors of safetensors and of tokenizers, which have the operating system's in their own words.
    """
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(place)
        raise
    except Exception as error:
        if isinstance(error, SafetensorError) or type(error) is Exception:  # tokenizers 0.23 raises the latter
            raise OSError(f"{place}: can't be written: {error}") from error
        raise


def put_in_place(temporary: Path, final: Path, aside: Path) -> None:
    """Give a folder that was filled next to its place its name, once everything in it is on the disk.

    What had the name before is renamed to `aside`, and removed when the new folder has its name on the disk: at every moment
    one of the two is whole. The files get the permissions that any new file has.
    """
    _permit_as_usual(temporary)
    sync_tree(temporary)
    is_there = os.path.lexists(final)
    if is_there:
        remove(aside)
        os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except BaseException:
        if is_there:
            os.rename(aside, final)
        raise
    sync(final.parent)
    remove(aside)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it; what can't be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def temporary_folder(use: str) -> Iterator[Path]:
    """A folder in TMPDIR for a block, removed at its end. What a kill left of earlier ones of this user is removed first.

    The folder is locked as long as this process or a fork of it lives, which holds across containers that share TMPDIR, where
    the number of a process says nothing.
    """
    import fcntl

    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY}{use}-", ignore_cleanup_errors=True) as name:
        descriptor = os.open(name, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a disk without locks, where nobody can take it for abandoned either
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield Path(name)
        finally:
            os.close(descriptor)


def _remove_abandoned() -> None:
    import fcntl

    for folder in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):  # locked, or removed by another process by now
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or time.time() - found.st_mtime < NEW_SECONDS:
                continue
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(folder)
            finally:
                os.close(descriptor)


def write_atomically(path: Path, content: str | bytes, temporary: str | Path = "") -> None:
    """Replace a file so that a reader, a crash or a power loss sees the old content or the new one.

    Args:
        temporary: what the content is written to first, where several processes may write the file at once.

    Raises:
        OSError: it can't be written; it is as before, and nothing is next to it.
    """
    temporary = temporary or f"{path.parent}/.{path.name}.tmp"  # no Path, of which Python keeps each name's place
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename = str(path)  # a full disk names none
        raise
    sync(path.parent)


@contextlib.contextmanager
def waiting_lock(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file, which is released when its process ends; after a few seconds of waiting, print a message once.

    Args:
        what: what the other process is doing, such as "prepares data".
    """
    from filelock import FileLock, Timeout

    lock = FileLock(str(path))
    try:
        lock.acquire(timeout=SILENT_SECONDS)
    except Timeout:
        say(f"waiting for another process, which {what} (it holds {path})", error=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _permit_as_usual(folder: Path) -> None:
    """Give the files the permissions that the umask leaves a new one: safetensors lets only the owner read what it writes."""
    probe = folder / ".permissions"
    probe.touch()
    usual = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) != usual:
            with contextlib.suppress(OSError):  # a file system without permissions
                path.chmod(usual)


def allow_open_files(number: int) -> int:
    """How many files this process may open, after its own limit was raised to `number` or the most that the system permits."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return number
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = number if hard == resource.RLIM_INFINITY else min(hard, number)
    if 0 <= soft < most:
        with contextlib.suppress(ValueError, OSError):  # macOS allows fewer than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else number
