"""Worker processes of a DataLoader, started all or none."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from toolkit.config import Refusal

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def started(loader: DataLoader[Any], flag: str) -> Iterator[Any]:
    """What a DataLoader yields, by the worker processes of `flag`; they run when this returns.

    Raises:
        Refusal: they can't be started, for a limit of processes or threads, or without /dev/shm.
    """
    _end_them_at_the_end()
    before = multiprocessing.active_children()
    try:
        return iter(loader)
    except (OSError, RuntimeError) as error:
        places = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not any("multiprocessing" in place for place in places):  # the first rows, which are read here, can't be had
            raise
        # torch (2.13) leaves those that were started, and Python waits for them at its end
        for process in multiprocessing.active_children():
            if process not in before:
                with contextlib.suppress(RuntimeError):  # of torch, at a worker's end
                    process.kill()
                    process.join()
        raise Refusal(
            f"{flag} {loader.num_workers}: the worker processes can't be started ({error}). They need processes, threads and "
            f"/dev/shm, of which a container may have few. Take a smaller number."
        ) from error


@functools.cache
def _end_them_at_the_end() -> None:
    """When one worker has died (by the kernel, for want of memory) torch leaves the others to Python, which ends them by
    SIGTERM. Those of a run ignore it, and Python would wait for them."""

    def end() -> None:
        for process in multiprocessing.active_children():
            if process.daemon:
                process.kill()

    atexit.register(end)  # after multiprocessing's own, so called before it
