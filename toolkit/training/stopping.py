"""How a run ends before its last step: by a signal, by its deadline, or by an error that is not the code's."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from toolkit import checkpoint as ckpt
from toolkit.distributed.heartbeat import RankLost
from toolkit.system.console import first_line
from toolkit.system.interruptions import Interrupted, InterruptedByKeyboard
from toolkit.training.continuing_command import continuing_command
from toolkit.training.memory import WHAT_HELPS, OutOfMemory, is_out_of_memory

if TYPE_CHECKING:
    from toolkit.config import RunConfig
    from toolkit.distributed.heartbeat import Heartbeat

_OF_COLLECTIVES = ("gloo", "nccl", "connection closed by peer", "connection reset", "watchdog", "socket", "collective")


def interruption(number: int, step: int, how_to_continue: str, config: RunConfig) -> Interrupted:
    """The exception of a run that a signal ended, whose state is saved; its message has the command that continues."""
    by_keyboard = number == signal.SIGINT and not _has_command_line(config)
    message = f"stopped by {signal.Signals(number).name} after step {step}. {how_to_continue}"
    return InterruptedByKeyboard(message) if by_keyboard else Interrupted(message)


def stopped_at(step: int) -> Interrupted:
    """The exception of a run that --stop-at-step has ended, whose state is saved."""
    return Interrupted(f"stopped after step {step}, as --stop-at-step says; go on with --resume and a later one, or none")


def leave(interrupted: Interrupted, heartbeat: Heartbeat | None) -> NoReturn:
    """The deadline is near: leave without waiting for another rank."""
    if heartbeat is None:
        raise interrupted
    heartbeat.close()
    time.sleep(1.5 * heartbeat.interval)  # the others learn that this rank has left; it may hold the store
    os.write(2, f"{interrupted}\n".encode())
    os._exit(Interrupted.exit_code)


def explained(error: RuntimeError, step: int, heartbeat: Heartbeat | None, how_to_continue: str) -> BaseException | None:
    """The exception to raise in place of an error in the loop, with a message and an exit code; None: the cause is unknown."""
    if is_out_of_memory(error):
        return OutOfMemory(
            f"out of memory in step {step}: {first_line(error)}\nLower --per-device-train-batch-size (the result stays with "
            f"the same --global-batch-size) or --per-device-eval-batch-size. {WHAT_HELPS} {how_to_continue}"
        )
    if heartbeat and any(word in str(error).lower() for word in _OF_COLLECTIVES):
        missing = heartbeat.missing()
        if heartbeat.departed() and not missing:
            return Interrupted(f"stopped after step {step}, because another rank has left. {how_to_continue}")
        who = f"rank {', '.join(map(str, missing))} gives no sign of life" if missing else "another rank has ended"
        return RankLost(f"{who}: a collective failed in step {step} ({first_line(error)}). {how_to_continue}")
    return None


def how_to_continue(checkpoints: Path, config: RunConfig) -> str:
    """The newest checkpoint, and the command that continues from it."""
    newest = ckpt.read_pointer(checkpoints, "last")
    kept = f"The newest checkpoint is {newest}" if newest else "There is NO checkpoint yet"
    if not _has_command_line(config):
        overwrites = ", overwrite_output_dir=False" if config.overwrite_output_dir else ""
        return f"{kept}. Continue with:\n  main(dataclasses.replace(config, resume=True{overwrites}))"
    return f"{kept}. Continue with:\n  {continuing_command(newest is not None, config.overwrite_output_dir)}"


def _has_command_line(config: RunConfig) -> bool:
    """Whether one was read; else it is a notebook, or someone's own program."""
    return config.given is not None
