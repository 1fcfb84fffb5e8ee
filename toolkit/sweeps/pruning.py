"""Pruning: whether a trial that runs is stopped before its end, from its curve and those of earlier trials.

Which earlier trials is settled when the trial starts, so that the decision is the same however fast others run, and when the
sweep was killed in between. The trial stops with a checkpoint, and goes on exactly when it is wanted again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from toolkit.sweeps.journal import Job, Plan

Curve = list[tuple[int, float]]  # (step, value) at each evaluation
FIRST_TRIALS = 5  # that are never pruned by the median: this many must have reached a step


def pruner_of(plan: Plan, earlier: Sequence[Job]) -> Callable[[Curve], int | None] | None:
    """For a plan and the trials that a new one was proposed from: the step of its curve at which that is stopped, if any.

    `median` is the rule of Golovin et al. (2017), Google Vizier, section 3.2, as Optuna's MedianPruner has it: the best value
    so far is worse than the median, at that step, of those that were trained to their end.
    """
    maximize = plan.objectives[0].maximize
    if plan.prune == "median":
        ended = [job.outcome for job in earlier if job.outcome and job.outcome.values and not job.outcome.pruned]
        curves = [dict(outcome.curve) for outcome in ended]
        return lambda curve: _below_median(curve, curves, maximize)
    return None


def _below_median(curve: Curve, others: Sequence[dict[int, float]], maximize: bool) -> int | None:
    best: float | None = None
    for place, (step, value) in enumerate(curve):
        best = value if best is None else max(best, value) if maximize else min(best, value)
        at_this_step = [other[step] for other in others if step in other]
        if place == 0 or len(at_this_step) < FIRST_TRIALS:  # the first evaluation means little
            continue
        median = statistics.median(at_this_step)
        if best < median if maximize else best > median:
            return step
    return None
