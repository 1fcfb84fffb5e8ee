"""SIGTERM and Ctrl-C: noted at once, acted upon at the end of a step, and in time."""

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from typing import Any

from toolkit.launch import TRAIN_OPTIONS
from toolkit.ranks import largest

SAGEMAKER_DEADLINE = 120.0  # seconds from SIGTERM to SIGKILL in a SageMaker job


# SIGUSR1 is what batch systems send ahead of the end; Windows has none.
STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))


class Interrupted(Exception):
    """A signal ended the run after a durable checkpoint; the message is the command that continues."""

    exit_code = 75


class OutOfTime(Exception):
    """The deadline after a stop signal is near and the step is not done."""


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

    def agreed(self, accelerator: Any) -> int | None:
        """The signal to stop for, if any rank has seen one: all ranks hear of it at the same step."""
        return largest(accelerator, self.number or 0) or None


@contextlib.contextmanager
def signals_noted(deadline: float | None = None) -> Iterator[StopSignal]:
    """Note the first SIGTERM, SIGINT or SIGUSR1 for the run to act on; the second one acts by itself.

    With a deadline in seconds `OutOfTime` is raised in the main thread when there is just time left to save.
    """
    stop = StopSignal(deadline)

    def note(number: int, frame: Any) -> None:
        stop.number = number
        message = f"\n{signal.Signals(number).name}: finishing this step, then saving; once more to leave at once\n"
        os.write(2, message.encode())  # print is not safe inside a signal handler
        restore(*STOPPING)
        for each in STOPPING:
            if before.get(each) is signal.SIG_IGN:  # as a script's `&` leaves SIGINT: the next one is still to end it
                signal.signal(each, signal.SIG_DFL)
        if deadline is not None:
            leaving = min(3.0, deadline / 3)  # what is left after a save: to tell other ranks, and to end
            signal.setitimer(signal.ITIMER_REAL, max(deadline - 2 * stop.seconds_to_save - leaving, 0.01))

    def late(number: int, frame: Any) -> None:
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

    before: dict[int, Any] = {}
    # ValueError: not the main thread; a notebook or a server owns the signals
    with contextlib.suppress(ValueError):
        for number in STOPPING:
            before[number] = signal.signal(number, note)
        if deadline is not None and hasattr(signal, "SIGALRM"):  # Windows has no alarm
            before[signal.SIGALRM] = signal.signal(signal.SIGALRM, late)
    try:
        yield stop
    finally:
        if deadline is not None and signal.SIGALRM in before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        restore(*before)


def stop_deadline(config: Any) -> float | None:
    """Seconds between a stop signal and the end: as set, else what SageMaker leaves in one of its jobs."""
    if config.stop_deadline is not None:
        return float(config.stop_deadline)
    return SAGEMAKER_DEADLINE if "SM_HPS" in os.environ or "SM_TRAINING_ENV" in os.environ else None


def continuing_command(saved: bool = True, overwrites: bool = False) -> str:
    """The command that continues this process's run, with the program that started it.

    `saved`: whether its directory holds a checkpoint; else a --resume-from stays. `overwrites`: whether its settings, perhaps
    those of a file, throw away what is in the output directory.
    """
    arguments, rest, from_file = [], list(sys.argv[1:]), False
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.removeprefix("--").partition("=")
        name = name.replace("_", "-") if word.startswith("--") else ""
        from_file |= name == "config"
        if name in ("resume", "overwrite-output-dir", "no-overwrite-output-dir"):
            if not equals and rest and rest[0].lower() in ("true", "false", "yes", "no", "1", "0"):
                rest.pop(0)
        elif saved and name in ("resume-from", "resume-from-checkpoint"):
            rest = rest if equals else rest[1:]
        else:
            arguments.append(word)
    if saved:
        arguments.append("--resume")
    if overwrites and from_file:
        arguments.append("--no-overwrite-output-dir")
    return shlex.join([sys.executable, *_starter(), sys.argv[0], *arguments])


def _starter() -> list[str]:
    """What stands between Python and the recipe: nothing, or `toolkit train` as it was typed or would start as many ranks."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    options = shlex.split(os.environ.get(TRAIN_OPTIONS, ""))
    if not options and world > 1:
        options = ["--processes", str(here)]
        if here < world:
            this = os.environ.get("GROUP_RANK") or str(int(os.environ["RANK"]) // here)
            options += ["--nodes", str(world // here), "--node-rank", this, "--main-address", os.environ["MASTER_ADDR"]]
    return ["-m", "toolkit", "train", *options] if options else []
