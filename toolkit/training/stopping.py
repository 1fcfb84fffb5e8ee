"""The end of a run that a signal asked for: what is saved, what is said, and in time."""

import os
import signal
import time
from typing import Any

from toolkit import checkpoint as ckpt
from toolkit.distributed.engines import engine_of
from toolkit.system.interruptions import Interrupted, InterruptedByKeyboard
from toolkit.training.run_state import write_checkpoint
from toolkit.training.signals import continuing_command


def interrupt(run: Any, number: int) -> None:
    """End the run, whose state is saved, for a signal: `Interrupted` is raised with the command that continues."""
    run.finish_saves()
    by_keyboard = number == signal.SIGINT and not _has_command_line(run)
    message = f"stopped by {signal.Signals(number).name} after step {run.step}. {how_to_continue(run)}"
    raise InterruptedByKeyboard(message) if by_keyboard else Interrupted(message)


def leave_in_time(run: Any) -> None:
    """The deadline is near: save if the weights are those of a whole step, then leave, without waiting for another rank."""
    if run.between_steps:
        last = [event for event in run.events if event["step"] == run.step]
        run.evaluation_is_owed = run.due("eval") and not any(name.startswith("eval_") for event in last for name in event)
        run.read_window()
        write_checkpoint(run)
        if engine_of(run.accelerator).shards:
            run.say(f"no time to gather a checkpoint of step {run.step} from all ranks: what followed the newest one is lost")
    try:
        interrupt(run, run.stop.number or signal.SIGTERM)
    except Interrupted as interrupted:
        if run.heartbeat is None:
            raise
        run.heartbeat.close()
        time.sleep(1.5 * run.heartbeat.interval)  # the others learn that this rank has left; it may hold the store
        os.write(2, f"{interrupted}\n".encode())
        os._exit(Interrupted.exit_code)


def how_to_continue(run: Any) -> str:
    """The newest checkpoint, and the command that goes on from it."""
    newest = ckpt.read_pointer(run.checkpoints, "last")
    kept = f"The newest checkpoint is {newest}" if newest else "There is NO checkpoint yet"
    if not _has_command_line(run):
        overwrites = ", overwrite_output_dir=False" if run.config.overwrite_output_dir else ""
        return f"{kept}. Continue with:\n  main(dataclasses.replace(config, resume=True{overwrites}))"
    return f"{kept}. Continue with:\n  {continuing_command(newest is not None, run.config.overwrite_output_dir)}"


def _has_command_line(run: Any) -> bool:
    """Whether one was read; else it is a notebook, or someone's own program."""
    return getattr(run.config, "given", None) is not None
