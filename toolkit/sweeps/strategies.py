"""Strategies: which point is tried next, a pure function of the space, the seed and the results so far.

Optuna proposes for tpe, gp and cmaes, from a study in memory: it keeps no file, so there is no lock of its own to be left
behind. A sweep that continues asks and tells again what is in the journal, and gets the same proposals.
"""

import itertools
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from toolkit.config import Refusal
from toolkit.sweeps.space import Dimension, Point


class Strategy(NamedTuple):
    """`ask(number)`: the point of a trial, None after the last one. `tell(number, value)`: its result, None when it failed.

    Trials are asked and told in the order of their numbers, each told before the next one is asked.
    """

    ask: Callable[[int], Point | None]
    tell: Callable[[int, float | None], None]


def make_strategy(name: str, space: Sequence[Dimension], seed: int, maximize: bool) -> Strategy:
    """The strategy of that name.

    Raises:
        Refusal: it cannot search this space, or the package that it needs is not installed.
    """
    if name not in STRATEGIES:
        raise Refusal(f"--strategy {name}: there are {', '.join(STRATEGIES)}.")
    return STRATEGIES[name](space, seed, maximize)


def grid_size(space: Sequence[Dimension]) -> int:
    """The number of points of the grid."""
    return len(_grid_points(space))


def _grid(space: Sequence[Dimension], seed: int, maximize: bool) -> Strategy:
    points = _grid_points(space)
    return Strategy(lambda number: points[number] if number < len(points) else None, _learn_nothing)


def _grid_points(space: Sequence[Dimension]) -> list[Point]:
    for dimension in space:
        if not dimension.choices:
            raise Refusal(
                f"--strategy grid: {dimension.name} is a range. List its values, such as --search {dimension.name}="
                f"{dimension.at(0.0)},{dimension.at(0.5)}, or take --strategy quasirandom."
            )
    names = [dimension.name for dimension in space]
    return [dict(zip(names, point, strict=True)) for point in itertools.product(*(each.choices for each in space))]


def _random(space: Sequence[Dimension], seed: int, maximize: bool) -> Strategy:
    def ask(number: int) -> Point:
        draws = random.Random(f"{seed} {number}")
        return {dimension.name: dimension.at(draws.random()) for dimension in space}

    return Strategy(ask, _learn_nothing)


def _quasirandom(space: Sequence[Dimension], seed: int, maximize: bool) -> Strategy:
    """Scrambled Sobol points: they fill the space more evenly than random ones."""
    _need("scipy", "quasirandom")
    from scipy.stats.qmc import Sobol

    def ask(number: int) -> Point:
        with warnings.catch_warnings():  # scipy (1.17) wants a power of two
            warnings.simplefilter("ignore")
            sobol = Sobol(len(space), scramble=True, rng=seed)
            row = sobol.random(number + 1)[number]
        return {dimension.name: dimension.at(min(float(share), 1 - 1e-12)) for dimension, share in zip(space, row, strict=True)}

    return Strategy(ask, _learn_nothing)


def _by_optuna(name: str) -> Callable[[Sequence[Dimension], int, bool], Strategy]:
    def make(space: Sequence[Dimension], seed: int, maximize: bool) -> Strategy:
        _need("optuna", name)
        import optuna
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        distributions: dict[str, Any] = {}
        for each in space:
            if each.choices:
                distributions[each.name] = CategoricalDistribution(each.choices)
            elif each.is_int:
                distributions[each.name] = IntDistribution(int(each.low), int(each.high), log=each.is_log)
            else:
                distributions[each.name] = FloatDistribution(each.low, each.high, log=each.is_log)
        study = optuna.create_study(sampler=_sampler(name, space, seed), direction="maximize" if maximize else "minimize")
        asked: dict[int, Any] = {}

        def ask(number: int) -> Point:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                asked[number] = study.ask(distributions)
            return dict(asked[number].params)

        def tell(number: int, value: float | None) -> None:
            if value is None:
                study.tell(asked.pop(number), state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(asked.pop(number), value)

        return Strategy(ask, tell)

    return make


def _sampler(name: str, space: Sequence[Dimension], seed: int) -> Any:
    import optuna

    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed)
    if name == "gp":
        _need("scipy", name)
        return optuna.samplers.GPSampler(seed=seed)
    _need("cmaes", name)
    ranges = [dimension for dimension in space if not dimension.choices]
    if len(ranges) < max(2, len(space)):
        raise Refusal("--strategy cmaes: needs two or more ranges and no choices. Take --strategy tpe, or fix the choices.")
    return optuna.samplers.CmaEsSampler(seed=seed)


def _need(package: str, strategy: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise Refusal(f"--strategy {strategy}: needs {package}, which is not installed. Type pip install {package}.")


def _learn_nothing(number: int, value: float | None) -> None:
    """For strategies that do not look at results."""


STRATEGIES: dict[str, Callable[[Sequence[Dimension], int, bool], Strategy]] = {
    "grid": _grid,
    "random": _random,
    "quasirandom": _quasirandom,
    "tpe": _by_optuna("tpe"),
    "gp": _by_optuna("gp"),
    "cmaes": _by_optuna("cmaes"),
}
