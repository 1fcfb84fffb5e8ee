"""What the files of a run have of its trial: its values, its curve, and how far it has come."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.config import Refusal
from toolkit.sweeps.journal import Outcome, Plan
from toolkit.sweeps.pruning import Curve
from toolkit.sweeps.results import metrics_of
from toolkit.system.json_lines import read_lines, read_object


def trial_folder(folder: Path, number: int) -> Path:
    """The run directory of a trial."""
    return folder / "trials" / f"{number:04d}"


def read_outcome(run: Path, plan: Plan, until: int | None = None) -> Outcome:
    """What a run has come to, or had come to at a step.

    The first objective counts with the best value that was evaluated, as the best checkpoint does; with several objectives, for
    constraints and in a population the last values count, which are those of one and the same model.

    Raises:
        Refusal: it did not log a metric.
    """
    summary, events = read_object(run / "summary.json"), read_lines(run / "metrics.jsonl")
    if until is not None:
        events = [event for event in events if _step(event) <= until]
    logged: dict[str, Any] = {name: value for event in events for name, value in event.items()}
    logged = {**summary, **logged} if until is not None else {**logged, **summary}
    first = plan.objectives[0]
    curve = _curve(events, first.metric)
    values: dict[str, float] = {}
    for name in metrics_of(plan):
        value = logged.get(name, logged.get(f"eval_{name}", _of_card(run, name)))
        if len(plan.objectives) == 1 and name == first.metric:
            best = summary.get("best")
            if until is None and plan.prune != "pbt" and isinstance(best, dict) and best.get("name") in (name, f"eval_{name}"):
                value = best.get("value")
            elif curve and plan.prune == "pbt":
                value = curve[-1][1]
            elif curve:
                value = (max if first.maximize else min)(each for _, each in curve)
        if value is None and name not in logged and f"eval_{name}" not in logged:
            numbers = ", ".join(sorted(each for each, number in logged.items() if isinstance(number, float)))
            raise Refusal(f"{run}: the trial did not log {name}, by which the sweep judges; it has {numbers or 'none at all'}.")
        if (number := _number(value)) is not None and math.isfinite(number):
            values[name] = number
    missing = [name for name in metrics_of(plan) if name not in values]
    reason = f"{missing[0]} is not finite" if missing else ""
    return Outcome(values, reason, step=until or steps_of(run), curve=curve)


def curve_of(run: Path, metric: str) -> Curve:
    """(step, value) of a metric at each evaluation so far."""
    return progress_of(run, metric)[1]


def progress_of(run: Path, metric: str) -> tuple[int, Curve]:
    """The last step that a run has logged, and (step, value) of a metric at each evaluation so far.

    It is called each second for all trials that run, by several: a file is read again only when it has changed.
    """
    path = run / "metrics.jsonl"
    try:
        found = os.stat(path)
    except OSError:
        return 0, []
    step, curve = _progress(path, metric, found.st_size, found.st_mtime_ns)
    return step, list(curve)


@functools.lru_cache(maxsize=256)
def _progress(path: Path, metric: str, size: int, time: int) -> tuple[int, Curve]:
    events = read_lines(path)
    return max(map(_step, events), default=0), _curve(events, metric)


def steps_of(run: Path) -> int:
    """Steps taken when the run last ended."""
    found = read_object(run / "summary.json").get("steps")
    return found if isinstance(found, int) else 0


def furthest_step(run: Path) -> int:
    """The last step that any file of a run knows of: one that was killed has no summary, or that of an earlier end."""
    logged = map(_step, read_lines(run / "metrics.jsonl"))
    saved = (int(path.name[5:]) for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdigit())
    return max([steps_of(run), *logged, *saved])


def planned_steps_of(run: Path) -> int | None:
    """The steps that a run has in all, once it has begun."""
    layout = read_object(run / "run.json").get("layout")
    steps = layout.get("steps") if isinstance(layout, dict) else None
    return steps if isinstance(steps, int) else None


def _curve(events: Sequence[Mapping[str, Any]], metric: str) -> Curve:
    """Without the evaluation before training, by which no checkpoint is the best and no trial better than another."""
    names = (metric, f"eval_{metric}")
    found = [(_step(event), _number(next((event[name] for name in names if name in event), None))) for event in events]
    return [(step, value) for step, value in found if step and value is not None]


def _number(value: object) -> float | None:
    """As a float; None where it is no number, or none that a float can be."""
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def _step(event: Mapping[str, Any]) -> int:
    step = event.get("step")
    return step if isinstance(step, int) else 0


def _of_card(run: Path, name: str) -> Any:
    card = read_object(run / "run.json")
    model = card.get("model")
    return card.get(name, model.get(name) if isinstance(model, dict) else None)
