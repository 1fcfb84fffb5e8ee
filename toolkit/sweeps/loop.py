"""The loop of a sweep: ask, run, write down, tell; from the journal on when it was interrupted."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from toolkit.config import Refusal
from toolkit.sweeps.journal import Outcome, Plan, Trial, held, read_journal, repair, write_end, write_plan, write_start
from toolkit.sweeps.space import Point, read_space
from toolkit.sweeps.strategies import make_strategy


def run_sweep(
    folder: Path, plan: Plan, run_trial: Callable[[int, Point], Outcome], ended: Callable[[Trial], None] = lambda trial: None
) -> dict[int, Trial]:
    """Run the trials of a plan that the journal does not hold yet, one after another; the trials by number.

    Settings that a trial had before are not computed again: its outcome is taken. A trial that failed is one with a reason.

    Args:
        run_trial: computes the trial of a number and its settings; what it raises ends the sweep, and the trial is run again
            when the sweep continues.
        ended: called with each trial that ends.

    Raises:
        Refusal: another process runs the sweep, or the folder holds one of another plan.
    """
    strategy = make_strategy(plan.strategy, read_space(plan.search), plan.seed, plan.maximize)
    with held(folder):
        repair(folder)
        before, trials = read_journal(folder)
        if before is not None:
            _check_same(folder, before, plan)
        if before != plan:
            write_plan(folder, plan)
        for number in range(plan.trials):
            settings = strategy.ask(number)
            if settings is None:
                break
            trial = trials.get(number)
            if trial is None:
                write_start(folder, number, settings)
                trial = trials[number] = Trial(number, settings)
            elif dict(trial.settings) != dict(settings):
                raise Refusal(
                    f"{folder}: trial {number} had {show_point(trial.settings)}, and {plan.strategy} proposes "
                    f"{show_point(settings)} now: other versions of libraries made the sweep. Take another --sweep-dir."
                )
            if trial.outcome is None:
                trial.outcome = _known(trials, trial) or run_trial(number, settings)
                write_end(folder, number, trial.outcome)
                ended(trial)
            strategy.tell(number, value_of(trial))
    return trials


def best_of(trials: Mapping[int, Trial], maximize: bool) -> Trial | None:
    """The trial with the best value, the first of equals; None where none has one."""
    finished = [(value, -trial.number, trial) for trial in trials.values() if (value := value_of(trial)) is not None]
    sign = 1 if maximize else -1
    return max(finished, key=lambda each: (sign * each[0], each[1]))[2] if finished else None


def value_of(trial: Trial) -> float | None:
    """The value of a finished trial; None of one that failed or has not ended."""
    value = trial.outcome.value if trial.outcome else None
    return value if value is not None and math.isfinite(value) else None


def show_point(settings: Point) -> str:
    """Settings as they are typed."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())


def _known(trials: Mapping[int, Trial], wanted: Trial) -> Outcome | None:
    for trial in trials.values():  # one that failed is tried again
        if trial.outcome and value_of(trial) is not None and dict(trial.settings) == dict(wanted.settings):
            first = trial.outcome.same_as
            return dataclasses.replace(trial.outcome, same_as=trial.number if first is None else first, seconds=0.0)
    return None


def _check_same(folder: Path, before: Plan, now: Plan) -> None:
    for field in dataclasses.fields(Plan):
        old, new = getattr(before, field.name), getattr(now, field.name)
        if field.name not in ("trials", "folder") and old != new:
            raise Refusal(
                f"--sweep-dir {folder}: holds a sweep with another {field.name.replace('_', ' ')} ({old}, now {new}). "
                f"Take another --sweep-dir, or type `toolkit sweep continue {folder}` for that one."
            )
