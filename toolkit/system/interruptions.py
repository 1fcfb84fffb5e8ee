"""What ends a run or a command early, and a time limit for code from elsewhere, such as a chat template."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

TEMPLATE_SECONDS = 20.0  # for one chat: a template needs a thousandth of that


class Interrupted(BaseException):
    """A signal ended the run after a durable checkpoint; the message is the command that continues.

    Not an `Exception`: a sweep with `except Exception: continue` must end as well.
    """

    exit_code = 75


class InterruptedByKeyboard(Interrupted, KeyboardInterrupt):
    """The same by Ctrl-C or a notebook's stop button, where no command line runs the recipe: also what Python raises."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came where nothing is to be continued: what Ctrl-C ends, it ends too."""


def raise_on_sigterm() -> None:
    """From now on SIGTERM ends this process by an exception, so that temporary files go; a fork of it dies of the signal."""
    process = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            raise Terminated
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)


class OutOfTime(Exception):
    """The deadline after a stop signal is near and the step is not done."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End a block of Python code after `seconds` of wall-clock time.

    By the timer signal, so only in the main thread and where the system has one; elsewhere the block takes its time.

    Raises:
        TimeoutError: it has not ended by then.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"has not ended after {seconds:g} s")

    began = time.monotonic()
    before = signal.signal(signal.SIGALRM, end)
    earlier, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(earlier - (time.monotonic() - began), 0.001) if earlier else 0.0)
        signal.signal(signal.SIGALRM, before)
