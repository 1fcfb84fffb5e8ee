"""One trial: a recipe started as `toolkit train` starts it, in a run directory of its own, until its outcome."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from toolkit.config.setting import flag_of
from toolkit.distributed.launch import REFUSED, TRY_AGAIN, Process, end_of, kill_group
from toolkit.runs.directory import holds_a_run
from toolkit.sweeps.journal import Job, Outcome, Plan
from toolkit.sweeps.outcomes import curve_of, furthest_step, read_outcome, steps_of, trial_folder
from toolkit.sweeps.pruning import Curve
from toolkit.sweeps.space import Point
from toolkit.sweeps.zygote import Zygote
from toolkit.system.children import death_with_this_process

ATTEMPTS = 3  # of a trial that is killed: each goes on from its newest checkpoint
_KILLED = 128
_WATCH_SECONDS = 0.5  # between looks at the files of a trial that may be pruned, or hang
_LAST_WORDS_SECONDS = 5.0  # for a trial that hangs to write where


class Running(Protocol):
    """A job in progress."""

    def poll(self) -> Outcome | None:
        """Its outcome, once it has ended.

        Raises:
            OSError: it has ended for want of disk space, which is no result of its settings.
        """
        ...

    def interrupt(self, number: int) -> None:
        """Hand a stop signal on to it."""
        ...

    def interrupted(self) -> int | None:
        """The exit code, when a signal has ended it: it goes on another time."""
        ...


# Starts a job in a slot; the last argument finds from the curve so far at which step it is to be pruned, if at all.
Start = Callable[[Job, int, Callable[[Curve], int | None] | None], Running]


@dataclass(frozen=True)
class Recipe:
    """What starts the trials of a recipe.

    Attributes:
        folder: the sweep's directory, absolute.
        environments: for each slot the variables that its trials have in addition to this process's.
        zygote: forks trials; None starts a process for each, which imports everything itself.
    """

    folder: Path
    plan: Plan
    can_resume: bool
    environments: Sequence[Mapping[str, str]]
    zygote: Zygote | None = None

    def start(self, job: Job, slot: int, prune: Callable[[Curve], int | None] | None) -> RecipeTrial:
        """Start a job; `Start` has the arguments."""
        return RecipeTrial(self, job, slot, prune)

    def spawn(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
        """Start a process that prints to a file."""
        if self.zygote:
            return self.zygote.start(words, log, environment)
        command = ["-m", "toolkit", "train", *self.plan.placement, *words] if self.plan.placement else words
        with open(log, "ab") as file:
            return subprocess.Popen(
                [sys.executable, *command], env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=file,
                stderr=file, start_new_session=True, preexec_fn=death_with_this_process(),
            )  # fmt: skip


class RecipeTrial:
    """A job of a recipe's trial: attempts, until one is not killed."""

    def __init__(self, recipe: Recipe, job: Job, slot: int, prune: Callable[[Curve], int | None] | None) -> None:
        self._recipe, self._job, self._slot, self._prune = recipe, job, slot, prune
        self._run = trial_folder(recipe.folder, job.trial)
        self._began, self._attempts, self._is_ending = time.monotonic(), 0, False
        self._watched, self._code = 0.0, 0
        self._signs, self._silent_since, self._aborted = list[int](), 0.0, 0.0
        self._log_start = 0  # of this attempt: earlier ones failed for reasons of their own
        self._process: Process | None = None
        # An earlier process may have been killed after the trial had come to its end, and before that was written down.
        if self._pruned_at() is None and (job.until is None or steps_of(self._run) < job.until):
            self._process = self._start()

    def poll(self) -> Outcome | None:
        code = end_of(self._process) if self._process else 0
        if code is None:
            self._watch()
            return None
        code = code if code >= 0 else _KILLED - code
        if code > _KILLED and self._attempts < ATTEMPTS and not self._is_ending:
            self._process = self._start()
            return None
        job, step, pruned_at = self._job, steps_of(self._run), self._pruned_at()
        is_at_rung = job.until is not None and step >= job.until
        # While it imports, a signal may end it with any code but these; an error of its own comes again when it goes on.
        is_interrupted = code in (TRY_AGAIN, 130) or (self._is_ending and code not in (0, REFUSED))
        if is_interrupted and pruned_at is None and not is_at_rung:
            self._code = code
            return None
        seconds = time.monotonic() - self._began
        if code and not is_interrupted:
            printed = self._printed()
            if _is_out_of_space(self._run, printed):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._run))
            hung = f"wrote nothing for {self._recipe.plan.hang_minutes} minutes, {self._attempts} times; see its log.txt"
            reason = hung if self._aborted else _reason(printed, code)
            return Outcome(reason=reason, code=code, seconds=seconds, step=furthest_step(self._run))
        outcome = read_outcome(self._run, self._recipe.plan, pruned_at or job.until)
        return replace(outcome, seconds=seconds, pruned=pruned_at is not None)

    def interrupt(self, number: int) -> None:
        self._is_ending = True
        if self._process is None:
            return
        if number == signal.SIGKILL:
            kill_group(self._process)
        else:
            self._process.send_signal(number)

    def interrupted(self) -> int | None:
        return self._code or None

    def _start(self) -> Process:
        self._attempts += 1
        self._silent_since, self._aborted = time.monotonic(), 0.0
        self._run.mkdir(parents=True, exist_ok=True)
        log = self._run / "log.txt"
        self._log_start = log.stat().st_size if log.exists() else 0
        recipe, job = self._recipe, self._job
        again = ["--resume" if recipe.can_resume else "--overwrite-output-dir"] if holds_a_run(self._run) else []
        rung = ["--stop-at-step", str(job.until)] if job.until is not None else []
        own = [*flags_of(job.settings), "--output-dir", str(self._run), *rung, *again]
        words = [recipe.plan.recipe, *recipe.plan.words, *own, *(changes_of(job.settings) if job.parent else [])]
        return recipe.spawn(words, log, recipe.environments[self._slot])

    def _printed(self) -> str:
        """What the newest attempt printed."""
        with open(self._run / "log.txt", "rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def _watch(self) -> None:
        """Stop the trial, with a checkpoint, once its curve so far is bad enough; kill it when it hangs."""
        now = time.monotonic()
        if now - self._watched < _WATCH_SECONDS:
            return
        self._watched = now
        if self._prune and not self._is_ending and self._pruned_at() is not None:
            self.interrupt(signal.SIGTERM)
        if self._recipe.plan.hang_minutes is not None:
            self._end_a_hang(now, self._recipe.plan.hang_minutes * 60)

    def _end_a_hang(self, now: float, seconds: float) -> None:
        """By SIGABRT, at which Python writes into the log where each of its threads is."""
        assert self._process
        signs = [_changed(self._run / name) for name in ("log.txt", "metrics.jsonl", "checkpoints")]
        if signs != self._signs:
            self._signs, self._silent_since = signs, now
        elif self._aborted and now - self._aborted > _LAST_WORDS_SECONDS:
            kill_group(self._process)
        elif not self._aborted and now - self._silent_since > seconds:
            self._aborted = now
            self._process.send_signal(signal.SIGABRT)

    def _pruned_at(self) -> int | None:
        return self._prune(curve_of(self._run, self._recipe.plan.objectives[0].metric)) if self._prune else None


def flags_of(settings: Point) -> list[str]:
    """The flags of searched settings."""
    return [word for name, value in settings.items() for word in (flag_of(name), str(value))]


def changes_of(settings: Point) -> list[str]:
    """The flags with which a run goes on with other values of the searched settings."""
    return ["--allow-change", ",".join(settings)]


def fork_run(folder: Path, trial: int, parent: int) -> None:
    """Make the run directory of a trial that goes on from where another one is; nothing where it is there already.

    Checkpoints are never written in place: their files are linked, not copied, where the file system can.
    """
    source, target = trial_folder(folder, parent), trial_folder(folder, trial)
    if target.exists():
        return
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    checkpoints = source / "checkpoints"

    def copy(file: str, place: str) -> None:
        if checkpoints in Path(file).parents:
            with contextlib.suppress(OSError):
                os.link(file, place)
                return
        shutil.copy2(file, place)

    shutil.copytree(source, temporary, symlinks=True, copy_function=copy, ignore=shutil.ignore_patterns("model", "log.txt"))
    os.replace(temporary, target)


def commands_of(plan: Plan, jobs: Sequence[Job], trial: int) -> list[Sequence[str]]:
    """What to type for one run as a trial's: one command; of a fork one for each part with other settings, in the same run."""
    origins = {job.trial: job for job in reversed(jobs)}  # the first job of each trial
    chain: list[tuple[Point, int | None]] = [(origins[trial].settings, None)]
    while parent := origins[trial].parent:
        trial, step = parent
        chain.insert(0, (origins[trial].settings, step))
    if len(chain) == 1:
        return [shown_command(plan, chain[0][0])]
    commands: list[Sequence[str]] = []
    for settings, until in chain:
        stop = [] if until is None else ["--stop-at-step", str(until)]
        again = ["--resume", *changes_of(settings)] if commands else []
        commands.append([*shown_command(plan, settings), "--output-dir", "runs/best", *stop, *again])
    return commands


def shown_command(plan: Plan, settings: Point) -> Sequence[str]:
    """What to type for one run with these settings."""
    return ["toolkit", "train", plan.recipe, *plan.placement, *plan.words, *flags_of(settings)]


def _changed(path: Path) -> int:
    """When a file or a folder changed; 0 where it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _reason(printed: str, code: int) -> str:
    """Why a trial failed: the line of what it printed with the reason."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    if code == REFUSED:
        return next((line for line in reversed(lines) if line.startswith("refused:")), "refused")
    if memory := next((line for line in reversed(lines) if _is_out_of_memory(line)), ""):
        return f"out of memory: {memory}"
    if code > _KILLED:
        return f"killed by signal {code - _KILLED}, {ATTEMPTS} times"
    return lines[-1] if lines else f"exit code {code}"


def _is_out_of_space(run: Path, printed: str) -> bool:
    """Whether a trial ended because the disk is full: it printed that, or there is no room for a log."""
    words = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), f"[Errno {errno.ENOSPC}]", " free, but ")
    return any(word in printed[-20_000:] for word in words) or shutil.disk_usage(run).free < 1 << 20


def _is_out_of_memory(line: str) -> bool:
    """Printed at the end, and not of a micro-batch that was halved, after which the run went on."""
    if ": continuing with" in line:
        return False
    return "out of memory" in line.lower() or "MemoryError" in line or "can't allocate memory" in line
