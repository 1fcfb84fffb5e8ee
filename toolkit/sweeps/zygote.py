"""A process that has imported what every trial imports, and forks each trial: its start costs a fork, and no second of imports.

It starts no thread of its own and touches no GPU, so that a fork of it is as good as a process that has just imported the
same. The trial has a session, a log, signals and an exit code as `launch` gives them.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType

from toolkit.system.children import death_with_this_process

# Imported once. transformers loads its parts when they are named, so those that each recipe uses are named.
PRELOADED = (
    "numpy", "torch", "torch.utils.data", "transformers", "transformers.modeling_utils", "transformers.tokenization_utils_base",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "accelerate",
)  # fmt: skip


class Forked:
    """A trial that the zygote forked; as much of subprocess.Popen as `launch.Process` has."""

    def __init__(self, zygote: "Zygote", pid: int) -> None:
        self._zygote = zygote
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its code once it has ended, -n for a signal n."""
        if self.returncode is None:
            self.returncode = self._zygote.code_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its code, when it has ended."""
        ends = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if ends is None else ends - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("a trial", timeout or 0.0)
            self._zygote.listen(left)
        return code

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The client's side: starts the process with the first trial, and ends it with the block.

    Args:
        environment: variables that the process, and so each trial, has in addition to this one's.
    """

    def __init__(self, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._codes: dict[int, int] = {}  # of trials that have ended
        self._running: set[int] = set()
        self._started: list[int] = []  # trials that it reported as started, and nobody has taken
        self._unread = b""

    def __enter__(self) -> "Zygote":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def start(self, words: Sequence[str], log: Path, environment: Mapping[str, str] = MappingProxyType({})) -> Forked:
        """Fork a process that runs the script words[0] with the arguments words[1:] and prints to a file.

        Raises:
            OSError: the zygote cannot be started, or has ended.
        """
        asked = {"words": list(words), "log": str(log), "environment": dict(environment)}
        for attempt in (1, 2):
            with contextlib.suppress(BrokenPipeError):
                self._ask(json.dumps(asked).encode() + b"\n")
                while not self._started and self.listen(None):
                    pass
            if self._started:
                break
            if attempt == 2 or self._process is None:
                raise OSError("the process that forks trials has ended")
            self._process.wait()  # it was killed: another one
        pid = self._started.pop()
        self._running.add(pid)
        return Forked(self, pid)

    def _ask(self, line: bytes) -> None:
        if self._process is None or self._process.poll() is not None:
            while self.listen(0.0):
                pass
            self._codes |= dict.fromkeys(self._running, -signal.SIGKILL)  # they have died with the one before
            self._running.clear()
            self._started, self._unread = [], b""
            self._process = subprocess.Popen(
                [sys.executable, "-m", "toolkit.sweeps.zygote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
                start_new_session=True, preexec_fn=death_with_this_process(), env={**os.environ, **self._environment},
            )  # fmt: skip
        assert self._process.stdin
        self._process.stdin.write(line)

    def code_of(self, pid: int) -> int | None:
        """The code of a trial that has ended; it is killed with its zygote."""
        while self.listen(0.0):
            pass
        if pid not in self._codes and self._process and self._process.poll() is not None:
            self._running.discard(pid)
            return -signal.SIGKILL
        return self._codes.pop(pid, None)

    def listen(self, timeout: float | None) -> bool:
        """Take in what the zygote writes within that many seconds; False where that is nothing."""
        if self._process is None or self._process.stdout is None:
            return False
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return False
        found = self._process.stdout.read(1 << 16)
        *lines, self._unread = (self._unread + found).split(b"\n")
        for line in lines:
            pid, *code = map(int, line.split())
            if code:
                self._codes[pid] = code[0]
                self._running.discard(pid)
            else:
                self._started.append(pid)
        return bool(found)


def _serve() -> None:
    """Fork a process for each line of standard input and print its id; when one has ended, its id and its code."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would otherwise write to, and so copy, all of these pages
    running: dict[int, int] = {}  # by a descriptor that can be read once the process has ended
    unread = b""
    while True:
        ready = select.select([0, *running], [], [])[0]
        for descriptor in set(ready) - {0}:
            pid = running.pop(descriptor)
            os.close(descriptor)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(1, f"{pid} {code}\n".encode())
        if 0 not in ready:
            continue
        found = os.read(0, 1 << 16)
        if not found:
            return
        *lines, unread = (unread + found).split(b"\n")
        for line in lines:
            request, die_with_the_zygote = json.loads(line), death_with_this_process()
            pid = os.fork()
            if pid == 0:
                os.setsid()
                if die_with_the_zygote:
                    die_with_the_zygote()
                for descriptor in running:
                    os.close(descriptor)
                _become(request["words"], request["log"], request["environment"])
                return
            running[os.pidfd_open(pid)] = pid
            os.write(1, f"{pid}\n".encode())


def _become(words: list[str], log: str, environment: dict[str, str]) -> None:
    """Be a process that runs a script, as `python SCRIPT ...` is."""
    import numpy as np

    os.environ.update(environment)
    np.random.seed()  # random itself does so after a fork
    nothing, printed = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(nothing, 0)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.close(nothing)
    os.close(printed)
    sys.argv[:] = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
