"""Results: what the objectives and constraints of a plan make of an outcome, which trial is better, and which ones are best."""

from __future__ import annotations

import importlib.util
import math
import re
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.config import Refusal
from toolkit.sweeps.journal import Job, Outcome, Plan
from toolkit.sweeps.space import Point, read_space
from toolkit.sweeps.strategies import Result, study_of


@dataclass(frozen=True)
class Constraint:
    """A metric of a run with its limit."""

    metric: str
    limit: float
    is_upper: bool

    def violation(self, value: float) -> float:
        """How far the value is beyond the limit; 0 or less where it holds."""
        return value - self.limit if self.is_upper else self.limit - value


@dataclass
class Trial:
    """A trial as its jobs left it: the last one that ended has its outcome; `runs`: whether another one has not ended."""

    number: int
    settings: Point
    outcome: Outcome | None
    until: int | None
    runs: bool


def read_constraint(written: str) -> Constraint:
    """The constraint of `parameters<=1e6` or `eval_accuracy>=0.8`.

    Raises:
        Refusal: it cannot be read.
    """
    found = re.fullmatch(r"\s*([\w./-]+)\s*(<=|>=)\s*(\S+)\s*", written)
    try:
        limit = float(found[3]) if found else math.nan
    except ValueError:
        limit = math.nan
    if found is None or not math.isfinite(limit):
        raise Refusal(f"--constraint {written}: a metric of the run and its limit are expected, such as peak_memory_gb<=8.")
    return Constraint(found[1], limit, found[2] == "<=")


def metrics_of(plan: Plan) -> list[str]:
    """The metrics that a trial must have: objectives and constraints."""
    return [*(each.metric for each in plan.objectives), *(read_constraint(each).metric for each in plan.constraints)]


def result_of(job: Job | Trial, plan: Plan) -> Result:
    """What the strategy gets of a job that has ended; of one that has not, nothing."""
    outcome = job.outcome
    if outcome is None or any(not math.isfinite(outcome.values.get(name, math.nan)) for name in metrics_of(plan)):
        return Result()
    constraints = [read_constraint(each) for each in plan.constraints]
    return Result(
        [outcome.values[each.metric] for each in plan.objectives],
        [each.violation(outcome.values[each.metric]) for each in constraints],
        outcome.step if outcome.pruned else None,
    )


def mean_result(results: Sequence[Result]) -> Result:
    """The mean over the seeds of a point, of those that have a value; the last step at which one was pruned."""
    found = [each for each in results if each.values]
    if not found:
        return Result()
    pruned = [each.pruned_at for each in found if each.pruned_at is not None]
    return Result(
        [statistics.fmean(values) for values in zip(*(each.values for each in found), strict=True)],
        [statistics.fmean(values) for values in zip(*(each.violations for each in found), strict=True)],
        max(pruned) if pruned else None,
    )


def rank_of(job: Job | Trial, plan: Plan) -> tuple[float, float, int]:
    """What to sort jobs with a value by, the best first: those that keep the constraints, by their first objective."""
    result = result_of(job, plan)
    violation = sum(max(0.0, each) for each in result.violations)
    value = result.values[0]
    return violation, -value if plan.objectives[0].maximize else value, job.trial if isinstance(job, Job) else job.number


def trials_of(jobs: Sequence[Job]) -> dict[int, Trial]:
    """The trials by number, from the jobs in the order of their numbers."""
    trials: dict[int, Trial] = {}
    for job in jobs:
        before = trials.get(job.trial)
        outcome, until = job.outcome, job.until
        if outcome is None and before:
            outcome, until = before.outcome, before.until
        trials[job.trial] = Trial(job.trial, job.settings, outcome, until, job.outcome is None)
    return trials


def best_trials(trials: Sequence[Trial], plan: Plan) -> list[Trial]:
    """The best first: of one objective that trial, the first of equals; of several the Pareto front.

    Trials that break a constraint, were pruned or stopped at a rung are none of them, unless no other has a value.
    """
    with_value = [trial for trial in trials if result_of(trial, plan).values]
    allowed = [trial for trial in with_value if all(each <= 0 for each in result_of(trial, plan).violations)]
    whole = [trial for trial in allowed if trial.until is None and trial.outcome and not trial.outcome.pruned] or allowed
    whole.sort(key=lambda trial: rank_of(trial, plan))
    if len(plan.objectives) == 1:
        return whole[:1]
    signs = [-1 if each.maximize else 1 for each in plan.objectives]
    rows = [[sign * value for sign, value in zip(signs, result_of(trial, plan).values, strict=True)] for trial in whole]
    return [trial for trial, row in zip(whole, rows, strict=True) if not any(_dominates(other, row) for other in rows)]


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def steps_used(jobs: Sequence[Job], copied: bool = False) -> int:
    """The steps that were trained for these jobs: of each trial the furthest one, of settings that were equal once.

    `copied`: those too that equal settings did not need to take again.
    """
    furthest: dict[int, int] = {}
    for job in jobs:
        if job.outcome and (copied or job.outcome.same_as is None):
            began = job.parent[1] if job.parent else 0
            furthest[job.trial] = max(furthest.get(job.trial, 0), job.outcome.step - began)
    return sum(furthest.values())


def spent_budget(plan: Plan, jobs: Sequence[Job], steps: int | None = None) -> str:
    """The budget of a sweep that is used up, in words; empty where none is. `steps`: those that count, else all trained."""
    hours = sum(job.outcome.seconds for job in jobs if job.outcome) / 3600 / plan.parallel
    if plan.budget_steps is not None and (steps_used(jobs) if steps is None else steps) >= plan.budget_steps:
        return f"the budget of {plan.budget_steps} steps is used up"
    if plan.budget_hours is not None and hours >= plan.budget_hours:
        return f"the budget of {plan.budget_hours:g} hours is used up"
    return ""


LEAST_TRIALS = 10


def importances(trials: Sequence[Trial], plan: Plan) -> dict[str, float]:
    """For each setting that all trials have its share of what sets the best tenth of them apart; they sum to 1.

    Raises:
        Refusal: Optuna is not installed, or the trials are too few or too much alike.
    """
    found = [(trial.settings, result_of(trial, plan)) for trial in trials if result_of(trial, plan).values]
    names = [each.name for each in read_space(plan.search) if all(each.name in settings for settings, _ in found)]
    varied = [name for name in names if len({settings[name] for settings, _ in found}) > 1]
    if len(found) < LEAST_TRIALS or len(varied) < 2:
        raise Refusal(f"needs {LEAST_TRIALS} trials with a value that differ in two settings; {len(found)} have one")
    if importlib.util.find_spec("optuna") is None:
        raise Refusal("needs optuna, which is not installed; type pip install optuna")
    # a trial that was stopped early has a value too
    whole = [(settings, Result(result.values, result.violations)) for settings, result in found]
    study = study_of(read_space(plan.search), whole, [each.maximize for each in plan.objectives])
    import optuna

    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    sign = -1 if plan.objectives[0].maximize else 1
    with warnings.catch_warnings():  # it warns that it looks at low values
        warnings.simplefilter("ignore")
        shares = optuna.importance.get_param_importances(
            study, evaluator=evaluator, params=varied, target=lambda trial: sign * trial.values[0]
        )
    return {str(name): float(share) for name, share in shares.items()}
