"""SIGTERM and Ctrl-C: noted at once, acted upon at the end of a step, and in time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from toolkit.distributed.ranks import largest
from toolkit.system.interruptions import OutOfTime
from toolkit.training.stopping import launcher_words

if TYPE_CHECKING:
    from accelerate import Accelerator

    from toolkit.config import RunConfig

ECHO_SECONDS = 0.5
SAGEMAKER_DEADLINE = 120.0  # seconds from SIGTERM to SIGKILL in a SageMaker job


# SIGUSR1 is what batch systems send ahead of the end; Windows has none.
STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))


class StopSignal:
    """The first stop signal this process has seen, if any, and how long it may still take.

    `seconds_to_save` is what the last checkpoint took: so much, twice, is kept free before the deadline. While `busy_saving`
    the deadline doesn't interrupt.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.number: int | None = None
        self.deadline, self.seconds_to_save, self.busy_saving = deadline, 0.0, False
        self.closed = False

    def disarm(self) -> None:
        """The loop is left: no deadline interrupts any more."""
        self.closed = True

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """No deadline interrupts what is done inside; how long it took is remembered."""
        self.busy_saving, began = True, time.monotonic()
        try:
            yield
        finally:
            self.busy_saving, self.seconds_to_save = False, time.monotonic() - began

    def agreed(self, accelerator: Accelerator) -> int | None:
        """The signal to stop for, if any rank has seen one: all ranks get it at the same step."""
        return largest(accelerator, self.number or 0) or None


@contextlib.contextmanager
def signals_noted(stop: StopSignal) -> Iterator[None]:
    """Note the first SIGTERM, SIGINT or SIGUSR1 in `stop`, for the run to act on; the second one acts by itself.

    A SIGTERM or SIGUSR1 that comes within ECHO_SECONDS is the first one again: Slurm signals each process of a step, and the
    launcher, which is one of them, hands it on. Nobody but a person sends SIGINT. With a deadline `OutOfTime` is raised in the
    main thread when there is just time left to save.
    """
    deadline = stop.deadline

    first: list[float] = []

    def note(number: int, frame: FrameType | None) -> None:
        if first:
            if number == signal.SIGINT or time.monotonic() - first[0] >= ECHO_SECONDS:
                let_the_next_one_act()
                signal.raise_signal(number)
            return
        first.append(time.monotonic())
        stop.number = number
        message = f"\n{signal.Signals(number).name}: finishing this step, then saving; once more to leave at once\n"
        if os.environ.get("LOCAL_RANK", "0") == "0":  # a launcher sends it to each rank
            os.write(2, message.encode())  # print is not safe inside a signal handler
        if deadline is not None:
            leaving = min(3.0, deadline / 3)  # what is left after a save: to inform other ranks, and to end
            signal.setitimer(signal.ITIMER_REAL, max(deadline - 2 * stop.seconds_to_save - leaving, 0.01))

    def let_the_next_one_act() -> None:
        restore(*STOPPING)
        for each in STOPPING:
            if before.get(each) is signal.SIG_IGN:  # as a script's `&` leaves SIGINT: the next one is still to end it
                signal.signal(each, signal.SIG_DFL)

    def late(number: int, frame: FrameType | None) -> None:
        if stop.closed:
            return
        if stop.busy_saving:
            signal.setitimer(signal.ITIMER_REAL, 0.05)  # as soon as that is done
            return
        raise OutOfTime

    def restore(*numbers: int) -> None:
        for number in numbers:
            if number in before:
                signal.signal(number, before[number])

    launcher_words()
    before: dict[int, Any] = {}
    # ValueError: not the main thread; a notebook or a server owns the signals
    with contextlib.suppress(ValueError):
        for number in STOPPING:
            before[number] = signal.signal(number, note)
        if deadline is not None and hasattr(signal, "SIGALRM"):  # Windows has no alarm
            before[signal.SIGALRM] = signal.signal(signal.SIGALRM, late)
    try:
        yield
    finally:
        if deadline is not None and signal.SIGALRM in before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        restore(*before)


def stop_deadline(config: RunConfig) -> float | None:
    """Seconds between a stop signal and the end: as set, else what SageMaker leaves in one of its jobs."""
    if config.stop_deadline is not None:
        return float(config.stop_deadline)
    return SAGEMAKER_DEADLINE if "SM_HPS" in os.environ or "SM_TRAINING_ENV" in os.environ else None
