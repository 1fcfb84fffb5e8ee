"""SIGTERM and Ctrl-C: noted at once, acted upon at the end of a step."""

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch


class Interrupted(Exception):
    """A signal ended the run after a durable checkpoint; the message is the command that continues."""

    exit_code = 75


class StopSignal:
    """The first stop signal this process has seen, if any."""

    number: int | None = None

    def agreed(self, accelerator: Any) -> int | None:
        """The signal to stop for, if any rank has seen one: all ranks hear of it at the same step."""
        if accelerator.num_processes == 1:
            return self.number
        seen = torch.tensor([self.number or 0], device=accelerator.device)
        torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
        return int(seen) or None


@contextlib.contextmanager
def signals_noted() -> Iterator[StopSignal]:
    """Note the first SIGTERM or SIGINT for the run to act on; the second one acts by itself."""
    stop = StopSignal()

    def note(number: int, frame: Any) -> None:
        stop.number = number
        message = f"\n{signal.Signals(number).name}: finishing this step, then saving; once more to leave at once\n"
        os.write(2, message.encode())  # print is not safe inside a signal handler
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before: dict[int, Any] = {}
    # ValueError: not the main thread; a notebook or a server owns the signals
    with contextlib.suppress(ValueError):
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()


def continuing_command() -> str:
    """The command that continues this process's run."""
    arguments = [a for a in sys.argv[1:] if a not in ("--resume", "--overwrite-output-dir", "--overwrite_output_dir")]
    return shlex.join(["python", sys.argv[0], *arguments, "--resume"])
