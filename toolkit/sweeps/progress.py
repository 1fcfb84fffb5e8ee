"""How far a sweep has come: where its running trials are, and about how long the rest takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.sweeps.journal import Job, Plan
from toolkit.sweeps.outcomes import planned_steps_of, progress_of, trial_folder
from toolkit.sweeps.results import steps_used
from toolkit.sweeps.schedule import planned_steps, trials_in
from toolkit.system.numbers import show_decimals


@dataclass(frozen=True)
class Reached:
    """Where a job is that has not ended.

    Attributes:
        began: the step from which it goes on.
        step: the last one that its run has logged.
        end: the step at which the job ends; None where no run has said so yet.
        value: of the first objective, at the last evaluation; None before one.
    """

    began: int
    step: int
    end: int | None
    value: float | None

    @property
    def share(self) -> float:
        """How much of the job is done, 0 to 1; 0 where its end is not known."""
        if self.end is None or self.end <= self.began:
            return 0.0
        return min((self.step - self.began) / (self.end - self.began), 1.0)


def reached_by(job: Job, jobs: Sequence[Job], plan: Plan, folder: Path) -> Reached:
    """Where a job is, by the files of its run; at its beginning where these are on another machine."""
    run = trial_folder(folder, job.trial)
    earlier = [each.outcome.step for each in jobs[: job.number] if each.trial == job.trial and each.outcome]
    began = max([*earlier, job.parent[1] if job.parent else 0])
    step, curve = progress_of(run, plan.objectives[0].metric)
    end = planned_steps_of(run) if job.until is None else job.until
    return Reached(began, max(began, step), end, curve[-1][1] if curve else None)


def open_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Those that have not ended; without those for which an equal one is computed."""
    return [job for job in jobs if job.outcome is None and job.same is None]


def reached_in_words(plan: Plan, jobs: Sequence[Job], folder: Path) -> dict[int, str]:
    """Of each trial that has not ended, where it is, as far as that is known."""
    metric, found = plan.objectives[0].metric, dict[int, str]()
    for job in open_jobs(jobs):
        reached = reached_by(job, jobs, plan, folder)
        if reached.end is None and not reached.step:
            continue
        value = "" if reached.value is None else f", {metric} {show_decimals(reached.value)}"
        found[job.trial] = f"at step {reached.step}{'' if reached.end is None else f' of {reached.end}'}{value}"
    return found


def seconds_left(plan: Plan, jobs: Sequence[Job], folder: Path, at_a_time: int) -> float | None:
    """About how long it takes until all trials have ended, with so many at a time; None before one has ended.

    A job to come takes as long as those before it on average, with rungs a step to come; of those that run only what they have
    not yet done is left. A budget leaves no more than itself, and what runs.
    """
    ended = [job.outcome for job in jobs if job.outcome]
    trained = [outcome for outcome in ended if outcome.same_as is None]
    seconds, steps = sum(outcome.seconds for outcome in trained), steps_used(jobs)
    if not seconds or (plan.rungs and not steps):
        return None
    running = [reached_by(job, jobs, plan, folder) for job in open_jobs(jobs)]
    if plan.rungs:
        unit, sizes = seconds / steps, [(each.end or plan.rungs[-1]) - each.began for each in running]
        to_come = planned_steps(plan) - steps_used(jobs, copied=True) - sum(sizes)
    else:
        unit, sizes = seconds / len(trained), [1] * len(running)
        to_come = trials_in(plan) - len(ended) - len(running)
    waiting = unit * max(to_come, 0)
    if plan.budget_hours is not None:
        waiting = min(waiting, plan.budget_hours * 3600 * plan.parallel - seconds)
    if plan.budget_steps is not None and steps:
        waiting = min(waiting, (plan.budget_steps - steps) * seconds / steps)
    waiting += unit * sum(size * (1 - each.share) for size, each in zip(sizes, running, strict=True))
    return max(waiting, 0.0) / max(1, min(at_a_time, len(running) + (to_come > 0)))
