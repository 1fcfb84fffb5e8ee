"""One trial: a recipe started as `toolkit train` starts it, in a run directory of its own, and its value read from there."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.config import Refusal
from toolkit.distributed.launch import REFUSED, TRY_AGAIN, launch, supervise
from toolkit.runs.directory import holds_a_run
from toolkit.sweeps.journal import Outcome, Plan, trial_folder
from toolkit.sweeps.space import Point
from toolkit.sweeps.zygote import Zygote

ATTEMPTS = 3  # of a trial that is killed: each goes on from its newest checkpoint
INTERRUPTED = (TRY_AGAIN, 130)
_KILLED = 128


class Stopped(Exception):
    """A trial was stopped by a signal; the sweep ends, and continues with this trial."""

    def __init__(self, code: int) -> None:
        super().__init__(f"stopped by a signal (exit code {code})")
        self.code = code


def flags_of(settings: Point) -> list[str]:
    """The flags of searched settings."""
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def run_trial(
    folder: Path, plan: Plan, number: int, settings: Point, *, can_resume: bool, processes: int, environment: Mapping[str, str],
    zygote: Zygote | None = None,
) -> Outcome:
    """Run one trial to its end, from its newest checkpoint where an earlier attempt left one.

    What it prints is in log.txt of its run directory. With a zygote it is a fork of that, without one a process that imports
    everything itself.

    Raises:
        Stopped: a signal ended it, after a checkpoint where the recipe writes them.
        Refusal: it finished and did not log the metric.
    """
    run = trial_folder(folder, number)
    began = time.monotonic()
    code = 0
    for _ in range(ATTEMPTS):
        code = _start(run, plan, settings, can_resume, processes, environment, zygote)
        if code in INTERRUPTED:
            raise Stopped(code)
        if code <= _KILLED:
            break
    seconds = time.monotonic() - began
    if code:
        return Outcome(None, _reason(run, code), code, seconds)
    value = _metric(run, plan.metric)
    return Outcome(value, "" if value is not None else f"{plan.metric} is not finite", 0, seconds)


def _start(
    run: Path, plan: Plan, settings: Point, can_resume: bool, processes: int, environment: Mapping[str, str],
    zygote: Zygote | None,
) -> int:  # fmt: skip
    run.mkdir(parents=True, exist_ok=True)
    again = ["--resume" if can_resume else "--overwrite-output-dir"] if holds_a_run(run) else []
    words = [plan.recipe, *plan.words, *flags_of(settings), "--output-dir", str(run), *again]
    if zygote:
        return supervise(partial(zygote.start, words, run / "log.txt"))
    with open(run / "log.txt", "ab") as log:
        return launch([sys.executable, *words], processes, environment=environment, log=log)


def _metric(run: Path, metric: str) -> float | None:
    """The best value of the metric in the run where it decides which checkpoint is best, else that of the run's end."""
    summary = _read_object(run / "summary.json")
    best = summary.get("best")
    of_best = isinstance(best, dict) and best.get("name") == metric
    if not of_best and metric not in summary:
        logged = [name for name, value in summary.items() if isinstance(value, float)]
        raise Refusal(f"{run}: the trial did not log {metric}, by which the sweep judges; its summary has {', '.join(logged)}.")
    value = best["value"] if of_best and isinstance(best, dict) else summary[metric]
    return float(value) if isinstance(value, int | float) else None


def _reason(run: Path, code: int) -> str:
    """Why a trial failed: the line of its log that says so."""
    text = (run / "log.txt").read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if code == REFUSED:
        return next((line for line in reversed(lines) if line.startswith("refused:")), "refused")
    if memory := next((line for line in reversed(lines) if _is_out_of_memory(line)), ""):
        return f"out of memory: {memory}"
    if code > _KILLED:
        return f"killed by signal {code - _KILLED}, {ATTEMPTS} times"
    return lines[-1] if lines else f"exit code {code}"


def _is_out_of_memory(line: str) -> bool:
    return "out of memory" in line.lower() or "MemoryError" in line or "can't allocate memory" in line


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def shown_command(plan: Plan, settings: Point) -> Sequence[str]:
    """What to type for one run with these settings."""
    return ["toolkit", "train", plan.recipe, *plan.placement, *plan.words, *flags_of(settings)]
