"""SIGTERM and Ctrl-C: noted at once, acted upon at the end of a step, and in time."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from toolkit.distributed.launch import TRAIN_OPTIONS
from toolkit.distributed.ranks import largest
from toolkit.system.interruptions import OutOfTime

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
        """The signal to stop for, if any rank has seen one: all ranks hear of it at the same step."""
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
            leaving = min(3.0, deadline / 3)  # what is left after a save: to tell other ranks, and to end
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


def continuing_command(saved: bool = True, overwrites: bool = False) -> str:
    """The command that continues this process's run: what was typed, launcher included, less what began the run.

    `saved`: whether its directory holds a checkpoint; else a --resume-from stays. `overwrites`: whether its settings, perhaps
    those of a file, throw away what is in the output directory.
    """
    begun, rest = _as_typed()
    arguments, from_file = [], False
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.removeprefix("--").partition("=")
        name = name.replace("_", "-") if word.startswith("--") else ""
        from_file |= name == "config"
        if name in ("resume", "overwrite-output-dir", "no-overwrite-output-dir"):
            if not equals and rest and rest[0].lower() in ("true", "false", "yes", "no", "1", "0"):
                rest.pop(0)
        elif name == "local-rank" or (saved and name in ("resume-from", "resume-from-checkpoint")):
            rest = rest if equals else rest[1:]  # the first is what torch.distributed.launch adds for each rank
        else:
            arguments.append(word)
    if saved:
        arguments.append("--resume")
    if overwrites and from_file:
        arguments.append("--no-overwrite-output-dir")
    return shlex.join([*begun, *arguments])


@functools.cache
def launcher_words() -> tuple[str, ...]:
    """The command line of the launcher that started this process, as it was typed; empty where none did.

    Remembered from the first call, which comes early: `accelerate launch` (1.15) dies of a SIGTERM before its child.
    """
    import psutil

    try:
        words = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # gone, or another user's
        return ()
    if len(words) > 1 and (name := os.path.basename(words[1])) in _LAUNCHERS:  # a script, behind the Python of its first line
        words = [name if shutil.which(name) == words[1] else words[1], *words[2:]]
    known = words and (os.path.basename(words[0]) in _LAUNCHERS or (words[1:2] == ["-m"] and words[2] in _MODULES))
    return tuple(words) if known else ()


_LAUNCHERS = ("toolkit", "accelerate", "accelerate-launch", "torchrun", "mpirun", "mpiexec", "orterun", "prterun")
_MODULES = ("toolkit", "accelerate.commands.launch", "torch.distributed.run", "torch.distributed.launch")


def _as_typed() -> tuple[list[str], list[str]]:
    """What was typed before the flags that a recipe may have, and these."""
    words, own, original = list(launcher_words()), sys.argv, sys.orig_argv
    train = words.index("train") + 1 if "train" in words else 0
    if train > 1 and os.path.basename(words[train - 2]) == "toolkit":
        return words[:train], words[train:]  # the recipe's name, its flags and the launcher's options in any order
    if words[-len(own) :] == own:
        return [*words[: -len(own)], own[0]], own[1:]
    starter = _starter()
    if not starter and original[-len(own) :] == own:
        return [*original[: -len(own)], own[0]], own[1:]
    return [sys.executable, *starter, own[0]], own[1:]


def _starter() -> list[str]:
    """What is between Python and the recipe: nothing, or the `toolkit train` that would start as many ranks."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    options = shlex.split(os.environ.get(TRAIN_OPTIONS, ""))
    if not options and world > 1:
        options = ["--processes", str(here)]
        if here < world:
            this = os.environ.get("GROUP_RANK") or str(int(os.environ["RANK"]) // here)
            options += ["--nodes", str(world // here), "--node-rank", this, "--main-address", os.environ["MASTER_ADDR"]]
    return ["-m", "toolkit", "train", *options] if options else []
