"""A sweep in text: its trials, the best of them, what runs and how far it has come, and about how long the rest takes."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.config.setting import flag_of
from toolkit.sweeps.journal import Job, Plan
from toolkit.sweeps.outcomes import planned_steps_of, progress_of, trial_folder
from toolkit.sweeps.results import Trial, best_trials, metrics_of, result_of, spent_budget, steps_used, trials_of
from toolkit.sweeps.schedule import planned_steps, trials_in, without_seed
from toolkit.sweeps.space import Point
from toolkit.sweeps.trials import Running
from toolkit.system.console import say, show_moving_line
from toolkit.system.numbers import show_decimals


def status_lines(plan: Plan, jobs: Sequence[Job], folder: Path, lives: Callable[[str], bool]) -> list[str]:
    """Each trial, those that run with where they are; the noise of the seeds; how many have ended, and the time that is left.

    `lives`: whether a worker does; without one nothing runs, and there is no time to show.
    """
    reached = reached_in_words(plan, jobs, folder)
    lines = [trial_line(trial, plan, reached.get(trial.number, "")) for trial in trials_of(jobs).values()]
    lines += seed_lines(plan, jobs) if plan.seeds > 1 else []
    at_a_time = sum(lives(job.worker) for job in open_jobs(jobs))
    left = seconds_left(plan, jobs, folder, at_a_time) if at_a_time else None
    return [*lines, count_line(plan, jobs) + ("" if left is None else f"; {_about(left)} left")]


def trial_line(trial: Trial, plan: Plan, reached: str = "") -> str:
    """A trial with its metrics or the reason why it has none, and its settings; `reached`: where it is if it has not ended."""
    outcome = trial.outcome
    if outcome is None:
        how = f"not ended, {reached}" if reached else "not ended"
    elif not result_of(trial, plan).values:
        how = f"failed ({outcome.reason})"
    else:
        how = "  ".join(f"{name} {show_decimals(outcome.values[name])}" for name in dict.fromkeys(metrics_of(plan)))
        if any(violation > 0 for violation in result_of(trial, plan).violations):
            how += " (beyond a constraint)"
        if outcome.same_as is not None:
            how += f" (that of {f'trial {outcome.same_as}' if isinstance(outcome.same_as, int) else outcome.same_as})"
        if outcome.pruned:
            how += f" (pruned at step {outcome.step})"
        elif trial.until is not None:
            how += f" (at step {trial.until})"
        if trial.runs:
            how += f" (goes on, {reached})" if reached else " (goes on)"
    return f"trial {trial.number:04d}  {how}  {show_point(trial.settings)}"


def count_line(plan: Plan, jobs: Sequence[Job]) -> str:
    """How many trials have ended, and the steps trained where they are counted."""
    trials = trials_of(jobs).values()
    if plan.prune == "pbt":
        forks = sum(job.parent is not None for job in {job.trial: job for job in jobs}.values())
        return f"{plan.trials} members and {forks} forks; {steps_used(jobs)} of {plan.trials * plan.rungs[-1]} steps trained"
    ended = sum(trial.outcome is not None for trial in trials)
    with_value = sum(bool(result_of(trial, plan).values) for trial in trials)
    line = f"{ended} of {trials_in(plan)} trials have ended, {with_value} with a value"
    steps = steps_used(jobs)
    line = f"{line}; {steps} steps trained" if steps else line
    return f"{line}; {budget}" if (budget := spent_budget(plan, jobs)) else line


def seed_lines(plan: Plan, jobs: Sequence[Job]) -> list[str]:
    """For each point that was trained with several seeds its mean and standard deviation, the best first, and how many seeds
    would separate the two best."""
    groups: dict[tuple[tuple[str, object], ...], list[float]] = {}
    for trial in trials_of(jobs).values():
        if values := result_of(trial, plan).values:
            groups.setdefault(tuple(without_seed(trial.settings).items()), []).append(values[0])
    found = [(statistics.fmean(values), values, dict(point)) for point, values in groups.items()]
    found.sort(key=lambda each: -each[0] if plan.objectives[0].maximize else each[0])
    name = plan.objectives[0].metric
    lines = []
    for mean, values, point in found:
        spread = f" ± {show_decimals(statistics.stdev(values))}" if len(values) > 1 else ""
        lines.append(f"{name} {show_decimals(mean)}{spread} ({len(values)} seeds)  {show_point(point)}")  # type: ignore[arg-type]
    if len(found) > 1 and min(len(found[0][1]), len(found[1][1])) > 1:
        lines.append(seeds_needed(found[0][1], found[1][1]))
    return lines


def seeds_needed(one: Sequence[float], other: Sequence[float]) -> str:
    """How many seeds each of two points needs so that their difference is beyond chance: 5 % two-sided, found 4 times of 5.

    The normal approximation n = (1.96 + 0.84)² (s₁² + s₂²) / (mean difference)²; at least 2.
    """
    difference = abs(statistics.fmean(one) - statistics.fmean(other))
    variance = statistics.variance(one) + statistics.variance(other)
    if not difference:
        return "the two best have the same mean"
    needed = max(2, -int(-(1.96 + 0.84) ** 2 * variance // difference**2))
    enough = "" if needed > min(len(one), len(other)) else ", which there are"
    return f"to separate the two best would need {needed} seeds of each{enough}"


class Live:
    """The moving line of a terminal: what runs, the best so far, and the time that is left."""

    def __init__(self, folder: Path, plan: Plan, slots: int) -> None:
        self._folder, self._plan, self._slots = folder, plan, slots
        self.is_on = sys.stderr.isatty()
        self._shown = 0.0

    def show(self, running: Mapping[int, tuple[Job, Running]], jobs: Sequence[Job]) -> None:
        """Write it anew, each second."""
        now = time.monotonic()
        if not self.is_on or now - self._shown < 1:
            return
        self._shown = now
        show_moving_line(self.line([job for job, _ in running.values()], jobs))

    def line(self, running: Sequence[Job], jobs: Sequence[Job]) -> str:
        """Running trials with their step and metric, the best so far, how many have ended and about how long the rest takes."""
        plan, name = self._plan, self._plan.objectives[0].metric
        parts = []
        for job in running:
            reached = reached_by(job, jobs, plan, self._folder)
            value = "" if reached.value is None else f" {show_decimals(reached.value)}"
            parts.append(f"{job.trial:04d}{value}" + (f" at {reached.step}/{reached.end}" if reached.end else ""))
        trials = trials_of(jobs)
        best = best_trials(list(trials.values()), plan)
        value = show_decimals(result_of(best[0], plan).values[0]) if best else ""
        best_shown = f"best {name} {value} ({best[0].number:04d})" if best else "no value yet"
        ended = sum(job.outcome is not None for job in jobs)
        line = f"runs {', '.join(parts)} | {best_shown} | {ended} ended{'' if plan.rungs else f' of {trials_in(plan)}'}"
        at_a_time = max(self._slots, len(open_jobs(jobs)))  # in other processes too
        left = seconds_left(plan, jobs, self._folder, at_a_time)
        return line if left is None else f"{line}, {_about(left)} left"

    def say(self, text: str) -> None:
        """A line that stays, above the moving one."""
        self.clear()
        say(text)

    def clear(self) -> None:
        """Take the moving line away."""
        if self.is_on:
            show_moving_line()


def show_point(settings: Point) -> str:
    """Settings as they are typed."""
    return " ".join(f"{flag_of(name)} {value}" for name, value in settings.items())


def _about(seconds: float) -> str:
    if seconds >= 5400:
        return f"about {seconds / 3600:.1f} h"
    return f"about {seconds / 60:.0f} min" if seconds >= 60 else f"about {seconds:.0f} s"


def point_of(plan: Plan, settings: Point) -> Point:
    """The settings of a point: without the seed where the sweep itself gave it."""
    return without_seed(settings) if plan.seeds > 1 else settings


@dataclass(frozen=True)
class Reached:
    """Where a job is that has not ended.

    Attributes:
        began: the step from which it goes on.
        step: the last one that its run has logged.
        end: the step at which the job ends; None where no run has written it yet.
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
    """About how long it takes until all trials have ended, with that many at a time; None before one has ended.

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
