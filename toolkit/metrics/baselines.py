"""Whether a run is better than its baselines."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from toolkit.metrics.direction import greater_is_better


class Comparison(NamedTuple):
    """The final value of a metric, and the baselines of it that it is better than, and those that it isn't."""

    name: str
    value: float
    beaten: dict[str, float]
    unbeaten: dict[str, float]  # the hardest first, as in `beaten`


def compared_with_baselines(
    baselines: Mapping[str, Any], values: Mapping[str, Any], greater_better: bool | None = None
) -> Comparison | None:
    """The final value of the metric that a run's baselines are of, next to them; None without baselines or without that metric.

    A value that equals a baseline has not beaten it.

    Args:
        baselines: "figure", the metric's name, and a number for each baseline.
        values: final metrics by name.
        greater_better: whether more of this metric is better, where it is set.
    """
    name = str(baselines.get("figure"))
    value = values.get(name)
    numbers = {key: float(each) for key, each in baselines.items() if key != "figure" and isinstance(each, (int, float))}
    if not numbers or not isinstance(value, (int, float)):
        return None
    sign = 1 if greater_is_better(name, greater_better) else -1
    hardest_first = sorted(numbers, key=lambda key: -sign * numbers[key])
    beaten = {key: numbers[key] for key in hardest_first if sign * value > sign * numbers[key]}
    return Comparison(name, float(value), beaten, {key: numbers[key] for key in hardest_first if key not in beaten})


def in_words(compared: Comparison, show: Callable[[float], str]) -> str:
    """Such as: eval_loss 4.0100 beats every baseline, the best of them bigram (4.4972). `show` makes a number readable."""
    if compared.unbeaten:
        sides = (compared.unbeaten, compared.beaten)
        unbeaten, beaten = (", ".join(f"{name} ({show(value)})" for name, value in side.items()) for side in sides)
        is_equal = all(value == compared.value for value in compared.unbeaten.values())
        verb = "only equals" if is_equal else "does NOT beat"
        return f"{compared.name} {show(compared.value)} {verb} {unbeaten}" + (f", but beats {beaten}" if beaten else "")
    best, value = next(iter(compared.beaten.items()))
    which = "the baseline" if len(compared.beaten) == 1 else "every baseline, the best of them"
    return f"{compared.name} {show(compared.value)} beats {which} {best} ({show(value)})"
