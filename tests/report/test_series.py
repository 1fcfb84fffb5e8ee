"""Curves out of the lines of a run, against a loop over each value."""

import math
import random
from typing import Any

import pytest

from toolkit.report.reading import NOT_METRICS, Points, Series, add_events

ODD = (None, True, "text", math.nan, math.inf, -math.inf, 10**400, -(10**400), 1e305, 3, [1.0])


def by_value(events: list[dict[str, Any]]) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for event in sorted(events, key=lambda event: event["step"]):
        for name, value in event.items():
            if name not in NOT_METRICS and (value is None or type(value) in (int, float)):
                usable = value is not None and abs(value) < 1e300
                found.setdefault(name, []).append((float(event["step"]), float(value) if usable else None))
    return found


def some_events(odd: float, order: str) -> list[dict[str, Any]]:
    """Steps with one, two or all of three metrics, each in stretches of the same names; a share `odd` of values is odd."""
    draw = random.Random(1)
    events, names = [], ["loss"]
    for step in range(400):
        if draw.random() < 0.2:
            names = draw.sample(["loss", "grad_norm", "eval_loss"], draw.randint(1, 3))
        values = {name: draw.choice(ODD) if draw.random() < odd else draw.gauss(0, 1) for name in names}
        events.append({"time": 0.5, "step": (step - draw.randint(0, 3)) * draw.choice([1, 1.0]), **values})
    return events if order == "file" else sorted(events, key=lambda event: event["step"])


@pytest.mark.parametrize("order", ["file", "sorted"])
@pytest.mark.parametrize("odd", [0.0, 0.01, 0.5])
def test_series_are_those_of_a_loop_over_each_value(odd: float, order: str) -> None:
    """Fails when: a column is taken as numbers by its first value, a value above 1e300 is drawn, or points are left unsorted."""
    events = some_events(odd, order)
    series: dict[str, Series] = {}
    for start in range(0, len(events), 150):
        add_events(series, events[start : start + 150])
    assert {name: each.points() for name, each in series.items() if each.steps} == by_value(events)
