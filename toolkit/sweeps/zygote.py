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
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from toolkit.distributed.launch import death_with_this_process

# Imported once. transformers loads its parts when they are named, so those that each recipe uses are named.
PRELOADED = (
    "numpy", "torch", "torch.utils.data", "transformers", "transformers.modeling_utils", "transformers.tokenization_utils_base",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "accelerate",
)  # fmt: skip


class Forked:
    """A trial that the zygote forked; as much of subprocess.Popen as `supervise` needs."""

    def __init__(self, zygote: "Zygote", pid: int) -> None:
        self._zygote = zygote
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its code once it has ended, -n for a signal n."""
        return self._end(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Its code, when it has ended."""
        code = self._end(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a trial", timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def _end(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._zygote.has_answer(timeout):
            answer = self._zygote.answer()
            self.returncode = -signal.SIGKILL if answer is None else answer  # it is killed with its zygote
        return self.returncode


class Zygote:
    """The client's side: starts the process with the first trial, and ends it with the block."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

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

    def start(self, words: Sequence[str], log: Path) -> Forked:
        """Fork a process that runs the script words[0] with the arguments words[1:] and prints to a file.

        Raises:
            OSError: the zygote has ended.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "toolkit.sweeps.zygote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
                start_new_session=True, preexec_fn=death_with_this_process(),
            )  # fmt: skip
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"words": list(words), "log": str(log)}).encode() + b"\n")
        pid = self.answer()
        if pid is None:
            raise OSError("the process that forks trials has ended")
        return Forked(self, pid)

    def has_answer(self, timeout: float | None) -> bool:
        """Whether the zygote has said something, or has ended."""
        assert self._process
        assert self._process.stdout
        return bool(select.select([self._process.stdout], [], [], timeout)[0])

    def answer(self) -> int | None:
        """The next number that it says; None when it has ended."""
        assert self._process
        assert self._process.stdout
        line = self._process.stdout.readline()
        return int(line) if line.endswith(b"\n") else None


def _serve() -> None:
    """Fork a process for each line of standard input; say its id, and its code when it has ended."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would otherwise write to, and so copy, all of these pages
    requests = os.fdopen(0, "rb", buffering=0, closefd=False)
    while line := requests.readline():
        request, die_with_the_zygote = json.loads(line), death_with_this_process()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            if die_with_the_zygote:
                die_with_the_zygote()
            os.write(1, f"{os.getpid()}\n".encode())
            _become(request["words"], request["log"])
            return
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(1, f"{code}\n".encode())


def _become(words: list[str], log: str) -> None:
    """Be a process that runs a script, as `python SCRIPT ...` is."""
    import numpy as np

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
