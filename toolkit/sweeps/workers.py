"""Workers: the processes that run a sweep, each known by a name, and whether one still lives."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

SILENT_SECONDS = 60.0  # after which a worker of another machine is taken for dead
_BEAT_SECONDS = 10.0


@functools.cache
def this_machine() -> str:
    """The machine, its start and the namespace of process ids: within one, a process id identifies one process."""
    parts = [socket.gethostname()]
    for path, read in (("/proc/sys/kernel/random/boot_id", Path.read_text), ("/proc/self/ns/pid", os.readlink)):
        try:
            parts.append(str(read(Path(path))).strip())
        except OSError:
            continue  # not Linux
    return "/".join(parts)


_working: set[str] = set()  # workers of this process that are at work
_numbers = itertools.count()


def new_worker() -> str:
    """A name among the workers of a sweep: the machine, the process and its start, and a number within the process."""
    return f"{this_machine()}:{os.getpid()}:{_started(os.getpid())}:{next(_numbers)}"


def _started(pid: int) -> float | None:
    """When a process was started; None where it is gone. The same at each call, however the clock is set meanwhile."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        # psutil (7.2) adds on Linux when the machine was booted, which the kernel moves with each correction of the clock
        booted = psutil.boot_time() if sys.platform == "linux" else 0.0
        return float(round(process.create_time() - booted, 2))
    except psutil.Error:
        return None


class Liveness:
    """Which workers live: on this machine by their processes, on another by a beat that goes on changing.

    Args:
        read_beat: the last beat of a worker, None where it has none.
        write_beat: sets this worker's beat.
    """

    def __init__(self, read_beat: Callable[[str], str | None], write_beat: Callable[[str, str], None]) -> None:
        self.me = new_worker()
        _working.add(self.me)
        self._read, self._write = read_beat, write_beat
        self._written = -_BEAT_SECONDS
        self._seen: dict[str, tuple[str | None, float]] = {}

    def beat(self) -> None:
        """Publish that this worker lives, every few seconds."""
        now = time.monotonic()
        if now - self._written >= _BEAT_SECONDS:
            self._write(self.me, str(time.time()))
            self._written = now

    def close(self) -> None:
        """It works no more: what it has not ended is for others."""
        _working.discard(self.me)

    def lives(self, worker: str) -> bool:
        """Whether a worker lives. Of another machine's, which may be silent for a minute, by what was seen here: no clocks
        are compared."""
        machine, pid, started, _ = [*worker.rsplit(":", 3), "", "", ""][:4]
        if not pid.isdigit():
            return False  # no name of a worker
        if machine == this_machine():
            return worker in _working if int(pid) == os.getpid() else str(_started(int(pid))) == started
        beat, now = self._read(worker), time.monotonic()
        if worker not in self._seen or self._seen[worker][0] != beat:
            self._seen[worker] = (beat, now)
        return now - self._seen[worker][1] < SILENT_SECONDS


def beats_in(folder: Path) -> Liveness:
    """Beats as files of a folder that the workers share."""

    def place(worker: str) -> Path:
        return folder / (worker.replace("/", "_").replace(":", "_") + ".txt")

    def read(worker: str) -> str | None:
        try:
            return place(worker).read_text(encoding="utf-8")
        except OSError:
            return None

    def write(worker: str, beat: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        place(worker).write_text(beat, encoding="utf-8")

    return Liveness(read, write)
