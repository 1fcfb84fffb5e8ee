"""Schedules: which trial is trained next, and up to which step; a function of the results so far.

Successive halving: Jamieson and Talwalkar (2016), arXiv:1502.07943. Hyperband: Li et al. (2018), arXiv:1603.06560, algorithm
1. ASHA: Li et al. (2020), arXiv:1810.05934, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from toolkit.config import Refusal
from toolkit.sweeps.journal import Job, Plan
from toolkit.sweeps.population import Population
from toolkit.sweeps.results import mean_result, rank_of, result_of
from toolkit.sweeps.space import Nothing, Point, Proposal, read_space
from toolkit.sweeps.strategies import Strategy, make_strategy

BY_RUNGS = ("halving", "hyperband", "asha", "pbt")


class Schedule(Protocol):
    """`next` proposes; `accept` takes every job that is started, proposed here or elsewhere; `tell` its outcome."""

    learns: bool  # whether results matter to it

    def next(self) -> Proposal | Nothing: ...
    def accept(self, job: Job) -> None: ...
    def tell(self, job: Job) -> None: ...


def make_schedule(plan: Plan) -> Schedule:
    """The schedule of a plan."""
    space = read_space(plan.search)
    directions = [each.maximize for each in plan.objectives]
    if plan.prune not in BY_RUNGS:
        return _Whole(plan, make_strategy(plan.strategy, space, plan.seed, directions, shuffled=plan.prune != "none"))
    if plan.prune == "pbt":
        strategy = make_strategy(plan.strategy, space, plan.seed, directions, shuffled=True, repeats=True)
        return Population(plan, strategy, space)
    brackets, first = [], 0
    for place, (count, rungs) in enumerate(brackets_of(plan)):
        # Trials are compared with those before them: a grid in its order would begin with one corner of the space.
        strategy = make_strategy(plan.strategy, space, plan.seed + place, directions, shuffled=True)
        brackets.append(_Bracket(plan, strategy, first, count, rungs))
        first += count
    return _Brackets(brackets)


def check_rungs(rungs: Sequence[int], written: str) -> None:
    """Raises:
        Refusal: they are not two or more rising steps.
    """
    if len(rungs) < 2 or rungs[0] < 1 or any(later <= earlier for earlier, later in pairwise(rungs)):
        raise Refusal(f"{written}: two or more rising steps are expected, such as 30,90,270.")


def brackets_of(plan: Plan) -> list[tuple[int, list[int]]]:
    """For each bracket its number of trials and its rungs; of Hyperband several, else one."""
    if plan.prune != "hyperband":
        return [(plan.trials, plan.rungs)]
    most, eta = len(plan.rungs) - 1, plan.reduction
    return [(math.ceil((most + 1) / (least + 1) * eta**least), plan.rungs[most - least :]) for least in range(most, -1, -1)]


def trials_in(plan: Plan) -> int:
    """The number of trials of a plan."""
    return sum(count for count, _ in brackets_of(plan)) if plan.rungs else plan.trials * plan.seeds


def rung_counts(count: int, rungs: Sequence[int], reduction: int) -> list[int]:
    """How many trials of a bracket are trained to each rung where none fails; with ASHA about that many."""
    return [max(1, count // reduction**place) for place in range(len(rungs))]


def planned_steps(plan: Plan) -> int:
    """The steps of all trials of a plan with rungs, as far as they are known beforehand."""
    if plan.prune == "pbt":
        return plan.trials * plan.rungs[-1]
    return sum(
        left * (rung - before)
        for count, rungs in brackets_of(plan)
        for left, rung, before in zip(rung_counts(count, rungs, plan.reduction), rungs, [0, *rungs], strict=False)
    )


class _Whole:
    """Every trial to its end; each point as often as there are seeds, and reported when all of them have ended."""

    def __init__(self, plan: Plan, strategy: Strategy) -> None:
        self.learns = strategy.learns
        self._plan, self._strategy, self._started = plan, strategy, 0
        self._points: dict[int, Point] = {}
        self._ended: dict[int, list[Job]] = {}

    def next(self) -> Proposal | Nothing:
        seeds = self._plan.seeds
        if self._started >= self._plan.trials * seeds:
            return Nothing.MORE
        point, seed = divmod(self._started, seeds)
        settings = self._strategy.ask(point) if seed == 0 else self._points[point]
        if settings is None:
            return Nothing.MORE
        return Proposal(self._started, dict(settings) if seeds == 1 else {**settings, "seed": seed_of(self._plan, seed)})

    def accept(self, job: Job) -> None:
        point, seed = divmod(job.trial, self._plan.seeds)
        self._started += 1
        if seed == 0:
            self._points[point] = job.settings if self._plan.seeds == 1 else without_seed(job.settings)
            self._strategy.accept(point, self._points[point])

    def tell(self, job: Job) -> None:
        point = job.trial // self._plan.seeds
        ended = self._ended.setdefault(point, [])
        ended.append(job)
        if len(ended) == self._plan.seeds:
            self._strategy.tell(point, mean_result([result_of(each, self._plan) for each in ended]))


class _Bracket:
    """`count` trials to the first rung, and from each rung the best on to the next: one of `reduction`, at least one.

    Halving waits for the whole rung. ASHA does not: it takes on a trial as soon as that is among the best of the rung so far,
    and begins a new one where none is.
    """

    def __init__(self, plan: Plan, strategy: Strategy, first: int, count: int, rungs: Sequence[int]) -> None:
        self.learns = True
        self._plan, self._strategy, self._first, self._count = plan, strategy, first, count
        self._rungs = [*rungs[:-1], None]  # the last one is the end of the run
        self._started: list[list[Job]] = [[] for _ in rungs]
        self._ended: list[list[Job]] = [[] for _ in rungs]
        self._is_exhausted = False

    def has(self, trial: int) -> bool:
        """Whether a trial is one of this bracket."""
        return self._first <= trial < self._first + self._count

    def next(self) -> Proposal | Nothing:
        is_asha = self._plan.prune == "asha"
        if is_asha and (promoted := self._promoted()):
            return promoted
        if len(self._started[0]) < self._count and not self._is_exhausted:
            settings = self._strategy.ask(len(self._started[0]))
            if settings is not None:
                return Proposal(self._first + len(self._started[0]), settings, self._rungs[0])
            self._is_exhausted = True
        if not is_asha and (promoted := self._promoted()):
            return promoted
        return Nothing.MORE if self._started_count() == self._ended_count() else Nothing.YET

    def accept(self, job: Job) -> None:
        rung = self._rungs.index(job.until)
        if rung == 0:
            self._strategy.accept(len(self._started[0]), job.settings)
        self._started[rung].append(job)

    def tell(self, job: Job) -> None:
        rung = self._rungs.index(job.until)
        self._ended[rung].append(job)
        if rung == 0:
            self._strategy.tell(job.trial - self._first, result_of(job, self._plan))

    def _promoted(self) -> Proposal | None:
        """A trial that goes on: of the highest rung that has one, the best of those which have not yet gone on."""
        for rung in range(len(self._rungs) - 2, -1, -1):
            ended = self._ended[rung]
            if self._plan.prune != "asha" and (self._is_filling(rung) or len(ended) < len(self._started[rung])):
                continue
            most = len(ended) // self._plan.reduction
            if not self._is_filling(rung) and len(ended) == len(self._started[rung]):
                most = max(most, 1)  # the last ones of a rung: somebody goes on
            best = sorted((job for job in ended if result_of(job, self._plan).values), key=lambda job: rank_of(job, self._plan))
            gone_on = {job.trial for job in self._started[rung + 1]}
            for job in best[:most]:
                if job.trial not in gone_on:
                    return Proposal(job.trial, job.settings, self._rungs[rung + 1])
        return None

    def _is_filling(self, rung: int) -> bool:
        """Whether trials may still come to a rung."""
        if rung == 0:
            return len(self._started[0]) < self._count and not self._is_exhausted
        if self._is_filling(rung - 1) or len(self._ended[rung - 1]) < len(self._started[rung - 1]):
            return True
        with_value = sum(bool(result_of(job, self._plan).values) for job in self._ended[rung - 1])
        return len(self._started[rung]) < min(with_value, max(1, len(self._ended[rung - 1]) // self._plan.reduction))

    def _started_count(self) -> int:
        return sum(map(len, self._started))

    def _ended_count(self) -> int:
        return sum(map(len, self._ended))


class _Brackets:
    """Brackets one after another; a later one begins while an earlier one waits for results."""

    learns = True

    def __init__(self, brackets: Sequence[_Bracket]) -> None:
        self._brackets = brackets

    def next(self) -> Proposal | Nothing:
        waits = False
        for bracket in self._brackets:
            found = bracket.next()
            if isinstance(found, Proposal):
                return found
            waits |= found is Nothing.YET
        return Nothing.YET if waits else Nothing.MORE

    def accept(self, job: Job) -> None:
        self._of(job).accept(job)

    def tell(self, job: Job) -> None:
        self._of(job).tell(job)

    def _of(self, job: Job) -> _Bracket:
        return next(bracket for bracket in self._brackets if bracket.has(job.trial))


def seed_of(plan: Plan, place: int) -> int:
    """The seed of a point's trial: that of the recipe's flags, 42 without one, plus its place."""
    for index, word in enumerate(plan.words):
        name, equals, value = word.partition("=")
        if name == "--seed":
            return int(value if equals else plan.words[index + 1]) + place
    return 42 + place


def without_seed(settings: Point) -> Point:
    """Settings without the seed, in which the trials of a point differ."""
    return {name: value for name, value in settings.items() if name != "seed"}
