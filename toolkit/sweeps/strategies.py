"""Strategies: which point is tried next, a pure function of the space, the seed and the results so far.

Optuna proposes for tpe, gp and cmaes, from a study in memory: it keeps no file, so there is no lock of its own to be left
behind. A sweep that continues gives the study what is in the journal, and gets the same proposals.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from toolkit.config import Refusal
from toolkit.sweeps.space import Dimension, Point, Value, points_at

MOST_POINTS = 100_000  # of a grid, whose points are all in memory


class Result(NamedTuple):
    """What came out of a point: `values`, one for each objective, none where it failed; how far each constraint was violated
    (0 or less: it holds); the `step` at which it was pruned, None where it was not."""

    values: Sequence[float] = ()
    violations: Sequence[float] = ()
    pruned_at: int | None = None


class Strategy(Protocol):
    """Points are proposed and accepted in the order of their numbers; results come in any order that is always the same."""

    learns: bool  # whether results matter to it

    def ask(self, number: int) -> Point | None:
        """The point of a number; None after the last one."""
        ...

    def accept(self, number: int, point: Point) -> None:
        """That point is tried; proposed by this process, or by another one or an earlier one."""
        ...

    def tell(self, number: int, result: Result) -> None:
        """What came out of it."""
        ...


def make_strategy(
    name: str, space: Sequence[Dimension], seed: int, directions: Sequence[bool], *, shuffled: bool = False,
    repeats: bool = False,
) -> Strategy:  # fmt: skip
    """The strategy of that name.

    Args:
        directions: for each objective, whether more is better.
        shuffled: a grid is not tried in its order, in which neighbors follow each other.
        repeats: random draws of choices may be equal, as members of a population may.

    Raises:
        Refusal: it cannot search this space, or the package that it needs is not installed.
    """
    if name not in STRATEGIES:
        raise Refusal(f"--strategy {name}: there are {', '.join(STRATEGIES)}.")
    if name == "cmaes":
        return _CmaEs(space, seed, directions)
    if name in BY_OPTUNA:
        return _Rebuilt(name, space, seed, directions)
    if name == "random" and not repeats and (size := count_points(name, space)):
        return _Drawn(_without_repeats(_random(space, seed), size))
    return _Drawn(_grid(space, seed, shuffled=True) if name == "grid" and shuffled else _DRAWN[name](space, seed))


def count_points(name: str, space: Sequence[Dimension], *, repeats: bool = False) -> int | None:
    """How many points a strategy has: all combinations of choices, of the grid or drawn at random; None where it has no end."""
    is_finite = all(each.choices for each in space) and math.prod(len(each.choices) for each in space) <= MOST_POINTS
    return len(_grid_points(space)) if name == "grid" or (name == "random" and is_finite and not repeats) else None


class _Drawn:
    """Points that do not depend on results."""

    learns = False

    def __init__(self, point: Callable[[int], Point | None]) -> None:
        self.ask = point

    def accept(self, number: int, point: Point) -> None: ...
    def tell(self, number: int, result: Result) -> None: ...


def _grid(space: Sequence[Dimension], seed: int, shuffled: bool = False) -> Callable[[int], Point | None]:
    points = _grid_points(space)
    if shuffled:
        random.Random(seed).shuffle(points)
    return lambda number: points[number] if number < len(points) else None


def _grid_points(space: Sequence[Dimension]) -> list[Point]:
    for dimension in space:
        if not dimension.choices:
            raise Refusal(
                f"--strategy grid: {dimension.name} is a range. List its values, such as --search {dimension.name}="
                f"{dimension.at(0.0):.3g},{dimension.at(0.5):.3g}, or take --strategy quasirandom."
            )
    most = math.prod(len(each.choices) for each in space)
    if most > MOST_POINTS:
        raise Refusal(f"--strategy grid: {most:,} combinations, of at most {MOST_POINTS:,}. Take --strategy random.")
    points: dict[tuple[tuple[str, Value], ...], Point] = {}
    for row in itertools.product(*(each.choices for each in space)):
        point: dict[str, Value] = {}
        for dimension, choice in zip(space, row, strict=True):
            if dimension.applies(point):
                point[dimension.name] = choice
        points.setdefault(tuple(point.items()), point)
    return list(points.values())


def _random(space: Sequence[Dimension], seed: int) -> Callable[[int], Point]:
    def ask(number: int) -> Point:
        draws = random.Random(f"{seed} {number}")
        return points_at(space, [draws.random() for _ in space])

    return ask


def _without_repeats(draw: Callable[[int], Point], size: int) -> Callable[[int], Point | None]:
    """The `size` points that there are, each where it was drawn first."""
    drawn, points = itertools.count(), dict[tuple[tuple[str, Value], ...], Point]()

    def ask(number: int) -> Point | None:
        while len(points) <= number < size:
            point = draw(next(drawn))
            points.setdefault(tuple(point.items()), point)
        return list(points.values())[number] if number < size else None

    return ask


def _quasirandom(space: Sequence[Dimension], seed: int) -> Callable[[int], Point | None]:
    """Scrambled Sobol points: they fill the space more evenly than random ones."""
    _need("scipy", "quasirandom")
    from scipy.stats.qmc import Sobol

    def ask(number: int) -> Point:
        with warnings.catch_warnings():  # scipy (1.17) warns where it is no power of two
            warnings.simplefilter("ignore")
            row = Sobol(len(space), scramble=True, rng=seed).random(number + 1)[number]
        return points_at(space, [min(float(share), 1 - 1e-12) for share in row])

    return ask


class _Rebuilt:
    """Proposals of an Optuna study that is made anew for each point, from what was tried, with a sampler of its own seed: a
    function of these, whichever process tried them."""

    learns = True

    def __init__(self, name: str, space: Sequence[Dimension], seed: int, directions: Sequence[bool]) -> None:
        _need("optuna", name)
        if name == "gp":
            _need("scipy", name)
            if any(each.when for each in space):
                raise Refusal("--strategy gp: supports no conditions. Take --strategy tpe.")
        self._name, self._space, self._seed, self._directions = name, space, seed, directions
        self._tried: dict[int, tuple[Point, Result | None]] = {}

    def ask(self, number: int) -> Point | None:
        import optuna

        study = study_of(self._space, list(self._tried.values()), self._directions)
        makers = {"tpe": optuna.samplers.TPESampler, "gp": optuna.samplers.GPSampler}
        study.sampler = makers[self._name](seed=random.Random(f"{self._seed} {number}").getrandbits(32))
        if not any(each.when for each in self._space):
            return dict(_asked(study, self._space).params)
        trial, point = study.ask(), dict[str, Value]()
        for each in self._space:
            if each.applies(point):
                point[each.name] = _suggested(trial, each)
        return point

    def accept(self, number: int, point: Point) -> None:
        self._tried[number] = (point, None)

    def tell(self, number: int, result: Result) -> None:
        self._tried[number] = (self._tried[number][0], result)


class _CmaEs:
    """CMA-ES by Optuna: its state is in the trials that it has proposed, so an earlier process's are proposed again."""

    learns = True

    def __init__(self, space: Sequence[Dimension], seed: int, directions: Sequence[bool]) -> None:
        _need("optuna", "cmaes")
        _need("cmaes", "cmaes")
        if any(each.choices for each in space) or len(space) < 2:
            raise Refusal("--strategy cmaes: needs two or more ranges and no choices. Take --strategy tpe, or fix the choices.")
        if len(directions) > 1:
            raise Refusal("--strategy cmaes: searches for one objective. Take --strategy tpe.")
        import optuna

        self._space, self._study, self._asked = space, _study(directions), dict[int, Any]()
        self._study.sampler = optuna.samplers.CmaEsSampler(seed=seed % 2**32)  # numpy takes no larger one

    def ask(self, number: int) -> Point | None:
        if number not in self._asked:
            self._asked[number] = _asked(self._study, self._space)
        return dict(self._asked[number].params)

    def accept(self, number: int, point: Point) -> None:
        self.ask(number)

    def tell(self, number: int, result: Result) -> None:
        from optuna.trial import TrialState

        state = TrialState.COMPLETE if result.values else TrialState.FAIL
        self._study.tell(self._asked[number], list(result.values) or None, state)


def study_of(space: Sequence[Dimension], tried: Sequence[tuple[Point, Result | None]], directions: Sequence[bool]) -> Any:
    """An Optuna study in memory, of points with what came out of them; None: they run."""
    _need("optuna", "tpe")
    study = _study(directions)
    study.add_trials([_frozen(space, point, result) for point, result in tried])
    return study


def _frozen(space: Sequence[Dimension], point: Point, result: Result | None) -> Any:
    from optuna.trial import TrialState, create_trial

    distributions = {each.name: _distribution(each) for each in space if each.name in point}
    values, curve = None, {}
    if result is None:
        state = TrialState.RUNNING
    elif not result.values:
        state = TrialState.FAIL
    elif result.pruned_at is None:
        state, values = TrialState.COMPLETE, list(result.values)
    else:
        state, curve = TrialState.PRUNED, {result.pruned_at: result.values[0]}
    violations = {str(place): value for place, value in enumerate(result.violations)} if result else {}
    return create_trial(
        state=state, values=values, params=dict(point), distributions=distributions, intermediate_values=curve,
        constraints=violations,
    )  # fmt: skip


def _study(directions: Sequence[bool]) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(directions=["maximize" if each else "minimize" for each in directions])


def _asked(study: Any, space: Sequence[Dimension]) -> Any:
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return study.ask({each.name: _distribution(each) for each in space})


def _suggested(trial: Any, dimension: Dimension) -> Value:
    name, low, high = dimension.name, dimension.low, dimension.high
    if dimension.choices:
        return trial.suggest_categorical(name, dimension.choices)
    if dimension.is_int:
        return trial.suggest_int(name, int(low), int(high), log=dimension.is_log)
    return trial.suggest_float(name, low, high, log=dimension.is_log)


def _distribution(dimension: Dimension) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.choices:
        return CategoricalDistribution(dimension.choices)
    if dimension.is_int:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.is_log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.is_log)


def _need(package: str, strategy: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise Refusal(f"--strategy {strategy}: needs {package}, which is not installed. Type pip install {package}.")


BY_OPTUNA = ("tpe", "gp", "cmaes")
_DRAWN: dict[str, Callable[[Sequence[Dimension], int], Callable[[int], Point | None]]] = {
    "grid": _grid, "random": _random, "quasirandom": _quasirandom,
}  # fmt: skip
STRATEGIES = (*_DRAWN, *BY_OPTUNA)
