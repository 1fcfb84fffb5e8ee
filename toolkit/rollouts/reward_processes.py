"""Processes in which reward functions run: a function that hangs or crashes costs its call, and its process is replaced."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO

from toolkit.config import Refusal
from toolkit.rollouts.reward_calls import Call, Outcome, Source, failed, too_slow

IMPORT_SECONDS = 300.0  # until a process has imported a function, whatever heavy library that needs
GRACE_SECONDS = 5.0  # in which an async function that was stopped may end
MOST_OUTPUT = 1 << 24  # bytes that a function may write to the screen in a call; what is above is thrown away
SHOWN_OUTPUT = 1 << 16


@dataclass(eq=False)
class Worker:
    """One process, the connection to it, and the file that it writes its output to."""

    process: subprocess.Popen[bytes]
    connection: Connection
    output: IO[bytes]
    loaded: set[Source] = field(default_factory=set)

    def take_output(self) -> str:
        """What was written since the last time."""
        descriptor = self.output.fileno()
        text = os.pread(descriptor, SHOWN_OUTPUT, 0)
        os.ftruncate(descriptor, 0)
        return text.decode(errors="replace")

    def kill(self) -> None:
        """End it and what its functions have started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        self.output.close()


class RewardProcesses:
    """A number of worker processes, started when they are first needed, and ended with this one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.workers: list[Worker] = []
        weakref.finalize(self, _end_all, self.workers)

    def run(self, source: Source, calls: list[Call], timeout: float, is_async: bool = False) -> Generator[Outcome, None, None]:
        """The outcome of each call, in their order, whichever ends first. Closed, it ends what is running.

        Args:
            timeout: seconds for each call, its import of the function not counted.
            is_async: all calls at once in one process.
        """
        if not calls:
            return
        while len(self.workers) < min(self.count, 1 if is_async else len(calls)):
            self.workers.append(_start())
        if is_async:
            yield from self._run_together(source, calls, timeout)
            return
        waiting, running = deque(range(len(calls))), dict[Worker, tuple[int, float]]()
        outcomes, given = dict[int, Outcome](), 0
        try:
            while waiting or running:
                for number in range(len(self.workers)):
                    if waiting and self.workers[number] not in running:
                        worker, place = self._with(source, number), waiting.popleft()
                        running[worker] = place, time.monotonic() + timeout
                        _send(worker, ("call", source, calls[place]))
                for worker, message in _messages(list(running), min(deadline for _, deadline in running.values())):
                    place, deadline = running[worker]
                    if message is not None:
                        outcome: Outcome = message[2]
                    elif worker.process.poll() is not None:
                        outcome = failed(calls[place], _how_it_ended(worker))
                    elif time.monotonic() >= deadline:
                        outcome = failed(calls[place], too_slow(timeout))
                    else:
                        continue
                    outcome.output = worker.take_output()
                    outcomes[place] = outcome
                    del running[worker]
                    if message is None:
                        self._drop(worker)
                        self.workers.append(_start())
                while given in outcomes:
                    yield outcomes.pop(given)
                    given += 1
        finally:
            for worker in running:  # an answer that came later would be taken for that to another call
                self._drop(worker)

    def _run_together(self, source: Source, calls: list[Call], timeout: float) -> list[Outcome]:
        worker, deadline = self._with(source, 0), time.monotonic() + timeout + GRACE_SECONDS
        outcomes: list[Outcome | None] = [None] * len(calls)
        _send(worker, ("calls", source, calls, timeout))
        problem, last = "", 0
        while not problem and None in outcomes:
            for _, message in _messages([worker], deadline):
                if message is not None:
                    last = message[1]
                    outcomes[last] = message[2]
                elif worker.process.poll() is not None:
                    problem = _how_it_ended(worker)
                elif time.monotonic() >= deadline:
                    problem = too_slow(timeout)
        output = worker.take_output()
        if problem:
            self._drop(worker)
        found = [failed(call, problem) if each is None else each for call, each in zip(calls, outcomes, strict=True)]
        found[last].output = output
        return found

    def _with(self, source: Source, number: int) -> Worker:
        """A worker that has imported the function.

        Raises:
            Refusal: it can't be imported there.
        """
        if self.workers[number].process.poll() is not None:  # someone has ended it between two calls
            self._drop(self.workers[number])
            self.workers.insert(number, _start())
        worker = self.workers[number]
        if source in worker.loaded:
            return worker
        _send(worker, ("load", source))
        deadline = time.monotonic() + IMPORT_SECONDS
        while True:
            for _, message in _messages([worker], deadline):
                if message is not None and message[1] is None:
                    worker.loaded.add(source)
                    worker.take_output()  # of its import, which this process has seen at its own
                    return worker
                if message is not None:
                    raise Refusal(message[1])
                if worker.process.poll() is not None or time.monotonic() >= deadline:
                    ended, output = worker.process.poll() is not None, worker.take_output()
                    how = _how_it_ended(worker) if ended else f"it takes more than {IMPORT_SECONDS:g} seconds"
                    self._drop(worker)
                    raise Refusal(
                        f"--reward-funcs {source.written}: can't be imported in a process of its own: {how}. {output[-500:]}\n"
                        "Mend that, or run it in the training process: --reward-processes 0"
                    )

    def _drop(self, worker: Worker) -> None:
        worker.kill()
        self.workers.remove(worker)


def _end_all(workers: list[Worker]) -> None:
    """When nobody has the rewards any more, and at the latest when Python ends."""
    while workers:
        workers.pop().kill()


def _start() -> Worker:
    here, there = Pipe()
    output = tempfile.TemporaryFile()  # noqa: SIM115 - it is open as long as the worker lives
    fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
    # it finds what this process finds, in the same order
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    with there:
        process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "toolkit.rollouts.reward_worker", str(there.fileno())],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(there.fileno(),), start_new_session=True,
            env=os.environ | {"PYTHONPATH": paths},
        )  # fmt: skip
    return Worker(process, here, output)


def _send(worker: Worker, message: tuple[object, ...]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a process that has ended is seen where answers are read
        worker.connection.send(message)


def _messages(workers: list[Worker], deadline: float) -> list[tuple[Worker, tuple | None]]:
    """What the workers have answered by then, each with None where its process ended or nothing came in about a second."""
    ready = wait([worker.connection for worker in workers], max(0.0, min(1.0, deadline - time.monotonic())))
    found: list[tuple[Worker, tuple | None]] = []
    for worker in workers:
        message = None
        if worker.connection in ready:
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(timeout=1.0)
                if worker.process.poll() is None:  # it lives, but its function has closed the connection
                    os.killpg(worker.process.pid, signal.SIGKILL)
                    worker.process.wait()
        elif os.fstat(worker.output.fileno()).st_size > MOST_OUTPUT:
            os.ftruncate(worker.output.fileno(), 0)
        found.append((worker, message))
    return found


def _how_it_ended(worker: Worker) -> str:
    code = worker.process.returncode
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"its process was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"its process ended with code {code}"
