"""Population-based training: Jaderberg et al. (2017), arXiv:1711.09846, with truncation selection and perturbed settings.

All members train to a rung. There each of the worst fifth is replaced by a fork of one of the best fifth: a new trial, which
goes on from that one's checkpoint with settings near to its own. Who forks from whom, and with which settings, is a function of
the results and the seed.
"""

from __future__ import annotations

import random

from toolkit.sweeps.journal import Job, Plan
from toolkit.sweeps.results import result_of
from toolkit.sweeps.space import Dimension, Nothing, Point, Proposal, Value
from toolkit.sweeps.strategies import Strategy

SHARE = 5  # one of this many members is replaced at a rung, one at least
FACTORS, RESAMPLED = (0.8, 1.2), 0.25  # of a number, and how often a setting is drawn anew instead


class Population:
    """The members at each rung; forks are proposed before the members that go on, as long as their parents stand still."""

    learns = True

    def __init__(self, plan: Plan, strategy: Strategy, space: list[Dimension]) -> None:
        self._plan, self._strategy, self._space = plan, strategy, space
        self._rungs = [*plan.rungs[:-1], None]  # the last one is the end of the run
        self._generation, self._trials = 0, plan.trials
        self._wanted: list[Proposal] | None = None  # of this generation, in order; of the first one they are drawn one by one
        self._started: list[Job] = []
        self._ended: dict[int, Job] = {}

    def next(self) -> Proposal | Nothing:
        if self._wanted is None:
            number = len(self._started)
            settings = self._strategy.ask(number) if number < self._trials else None
            if settings is not None:
                return Proposal(number, settings, self._rungs[0])
        elif len(self._started) < len(self._wanted):
            return self._wanted[len(self._started)]
        if len(self._ended) < len(self._started):
            return Nothing.YET
        return Nothing.MORE

    def accept(self, job: Job) -> None:
        if self._wanted is None:
            self._strategy.accept(job.trial, job.settings)
        self._started.append(job)

    def tell(self, job: Job) -> None:
        self._ended[job.trial] = job
        is_whole = len(self._started) == (self._first_count() if self._wanted is None else len(self._wanted))
        if is_whole and len(self._ended) == len(self._started) and self._generation + 1 < len(self._rungs):
            self._wanted = self._next_generation()
            self._generation += 1
            self._started, self._ended = [], {}

    def _first_count(self) -> int:
        """The members of the first generation: a grid may have fewer points than were requested."""
        count = len(self._started)
        return count if count == self._trials or self._strategy.ask(count) is None else self._trials

    def _next_generation(self) -> list[Proposal]:
        at, until = self._rungs[self._generation], self._rungs[self._generation + 1]
        assert at is not None
        found = [job for job in self._started if result_of(job, self._plan).values]
        failed = [job for job in self._started if job not in found]
        found.sort(key=lambda job: (self._loss(job), job.trial))
        if not found:
            return []
        count = max(1, len(self._started) // SHARE)
        best, worst = found[:count], found[max(count, len(found) - count) :]
        stay = [Proposal(job.trial, job.settings, until, job.parent) for job in found if job not in worst]
        forks: list[Proposal] = []
        for job in [*failed, *worst]:
            draws = random.Random(f"{self._plan.seed} {self._generation} {job.trial}")
            parent = best[draws.randrange(len(best))]
            settings = perturbed(self._space, parent.settings, draws)
            forks.append(Proposal(self._trials + len(forks), settings, until, (parent.trial, at)))
        self._trials += len(forks)
        return [*forks, *stay]

    def _loss(self, job: Job) -> float:
        """The value, less is better."""
        value = result_of(job, self._plan).values[0]
        return -value if self._plan.objectives[0].maximize else value


def perturbed(space: list[Dimension], settings: Point, draws: random.Random) -> Point:
    """Settings near to others: a number times 0.8 or 1.2, within its range; each of them drawn anew once in four times."""
    point: dict[str, Value] = {}
    for each in space:
        if not each.applies(point):
            continue
        share, factor = draws.random(), draws.choice(FACTORS)
        if draws.random() < RESAMPLED or each.name not in settings:
            point[each.name] = each.at(share)
        elif each.choices:
            point[each.name] = settings[each.name]
        else:
            value = min(max(float(settings[each.name]) * factor, each.low), each.high)
            point[each.name] = round(value) if each.is_int else value
    return point
