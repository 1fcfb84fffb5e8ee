"""How a run ends before its last step (a signal, its deadline, an error that is not the code's), and what continues it."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from toolkit import checkpoint as ckpt
from toolkit.distributed.heartbeat import RankLost, is_of_collective
from toolkit.distributed.launch import TRAIN_OPTIONS
from toolkit.system.console import as_typed, first_line
from toolkit.system.free_memory import OutOfMemory, is_out_of_memory
from toolkit.system.interruptions import Interrupted, InterruptedByKeyboard
from toolkit.training.memory import WHAT_HELPS

if TYPE_CHECKING:
    from toolkit.config import RunConfig
    from toolkit.distributed.heartbeat import Heartbeat


def interruption(number: int, step: int, how_to_continue: str, config: RunConfig) -> Interrupted:
    """The exception of a run that a signal ended, whose state is saved; its message has the command that continues."""
    by_keyboard = number == signal.SIGINT and not _has_command_line(config)
    message = f"stopped by {signal.Signals(number).name} after step {step}. {how_to_continue}"
    return InterruptedByKeyboard(message) if by_keyboard else Interrupted(message)


def stopped_at(step: int) -> Interrupted:
    """The exception of a run that --stop-at-step has ended, whose state is saved."""
    return Interrupted(f"stopped after step {step}, by --stop-at-step; go on with --resume and a later one, or none")


def leave(interrupted: Interrupted, heartbeat: Heartbeat | None) -> NoReturn:
    """The deadline is near: leave without waiting for another rank."""
    if heartbeat is None:
        raise interrupted
    heartbeat.close()
    os.write(2, f"{interrupted}\n".encode())
    os._exit(Interrupted.exit_code)


def explained(error: Exception, step: int, heartbeat: Heartbeat | None, how_to_continue: str) -> BaseException | None:
    """The exception to raise in place of an error in the loop, with a message and an exit code; None: the cause is unknown."""
    if is_out_of_memory(error):
        return OutOfMemory(
            f"out of memory in step {step}: {first_line(error)}\nLower --per-device-train-batch-size (the result stays with "
            f"the same --global-batch-size) or --per-device-eval-batch-size. {WHAT_HELPS} {how_to_continue}"
        )
    if heartbeat and is_of_collective(error):
        who = heartbeat.who_is_lost()
        if not who:
            return Interrupted(f"stopped after step {step}, because another rank has left. {how_to_continue}")
        return RankLost(f"{who}: a collective failed in step {step} ({first_line(error)}). {how_to_continue}")
    return None


def how_to_continue(checkpoints: Path, config: RunConfig) -> str:
    """The newest checkpoint, and the command that continues from it."""
    newest = ckpt.read_pointer(checkpoints, "last")
    model = as_typed("toolkit", "export", checkpoints.parent)
    kept = f"The newest checkpoint is {newest} (its model: {model})" if newest else "There is NO checkpoint yet"
    if not _has_command_line(config):
        overwrites = ", overwrite_output_dir=False" if config.overwrite_output_dir else ""
        return f"{kept}. Continue with:\n  main(dataclasses.replace(config, resume=True{overwrites}))"
    return f"{kept}. Continue with:\n  {continuing_command(newest is not None, config.overwrite_output_dir)}"


def _has_command_line(config: RunConfig) -> bool:
    """Whether one was read; else it is a notebook, or someone's own program."""
    return config.given is not None


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
