"""Worker processes of a DataLoader, started all or none."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import traceback
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from toolkit.config import Refusal
from toolkit.data.compat import folder_of_sockets

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class LostSockets(Exception):
    """Worker processes can't be reached any more: the folder of their sockets is gone."""

    exit_code, on_every_rank = 1, True


def started(loader: DataLoader[Any], flag: str) -> Iterator[Any]:
    """What a DataLoader yields, by the worker processes of `flag`; they run when this returns.

    Raises:
        Refusal: they can't be started, for a limit of processes or threads, or without /dev/shm; the path of TMPDIR is too
            long for what they have in it.
        LostSockets: what they have in TMPDIR was removed, before or while they run.
    """
    _end_them_at_the_end()
    before = multiprocessing.active_children()
    try:
        sockets = folder_of_sockets() if loader.num_workers else ""
        if sockets and not os.path.isdir(sockets):
            raise _lost(sockets)
        return _reached(iter(loader), sockets)
    except (OSError, RuntimeError) as error:
        places = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not any("multiprocessing" in place for place in places):  # the first rows, which are read here, can't be had
            raise
        # torch (2.13) leaves those that were started, and Python waits for them at its end
        _kill(process for process in multiprocessing.active_children() if process not in before)
        raise Refusal(
            f"{flag} {loader.num_workers}: the worker processes can't be started ({error}). They need processes, threads and "
            f"/dev/shm, of which a container may have few. Take a smaller number."
        ) from error


def open_socket() -> None:
    """Let a worker process open, as it begins, the socket by which it hands over tensors. Where it can't be opened, an error of
    then is raised for whoever reads the rows; one at the first tensors would be lost, and they would be waited for for ever."""
    from multiprocessing.resource_sharer import DupFd

    with open(os.devnull) as handed_over:
        os.close(DupFd(handed_over.fileno()).detach())


def _reached(rows: Iterator[Any], sockets: str) -> Iterator[Any]:
    try:
        yield from rows
    except FileNotFoundError:
        if sockets and not os.path.isdir(sockets):
            raise _lost(sockets) from None
        raise
    except OSError as error:
        if "AF_UNIX path too long" not in str(error):
            raise
        place = os.path.dirname(sockets)
        raise Refusal(
            f"TMPDIR={place}: its path is too long ({len(place)} characters) for the sockets of worker processes. Take a "
            "shorter one, such as TMPDIR=/tmp, or --dataloader-num-workers 0."
        ) from None


def _lost(sockets: str) -> LostSockets:
    _kill(process for process in multiprocessing.active_children() if process.daemon)  # each would end in a traceback
    return LostSockets(
        f"{sockets} was removed, without which worker processes can't be reached. Go on with --resume, and with TMPDIR set to "
        "a folder that stays."
    )


def _kill(processes: Iterable[multiprocessing.process.BaseProcess]) -> None:
    for process in processes:
        with contextlib.suppress(RuntimeError):  # of torch, at a worker's end
            process.kill()
            process.join()


@functools.cache
def _end_them_at_the_end() -> None:
    """When one worker has died (by the kernel, for want of memory) torch leaves the others to Python, which ends them by
    SIGTERM. Those of a run ignore it, and Python would wait for them."""

    def end() -> None:
        _kill(process for process in multiprocessing.active_children() if process.daemon)

    atexit.register(end)  # after multiprocessing's own, so called before it
