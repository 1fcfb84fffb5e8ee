"""Curves of metrics.jsonl: each metric's steps and values as two arrays, since a long run has logged millions of them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any

from toolkit.report.numbers import finite_number
from toolkit.system.numbers import is_usable

Points = list[tuple[float, float | None]]  # (step, value); None where the value was not finite

NOT_METRICS = ("step", "epoch", "examples", "time", "supervised_tokens", "nonfinite_steps")


class Series:
    """All that was logged of a metric, in the order of the file."""

    def __init__(self) -> None:
        self.steps, self.values = array("d"), array("d")  # NaN in place of a value that was not finite

    def add(self, steps: array[float], column: tuple[Any, ...]) -> None:
        """The values at some steps; what is no number, such as a text, is left out."""
        if set(map(type, column)) == {float} and is_usable(sum(map(abs, column))):  # usual, and quicker than to look at each
            self.steps.extend(steps)
            self.values.extend(column)
            return
        for step, value in zip(steps, column, strict=True):
            if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
                number = finite_number(value)
                self.steps.append(step)
                self.values.append(math.nan if number is None else number)

    def points(self) -> Points:
        """The curve, by step."""
        steps, values = self.steps.tolist(), self.values.tolist()
        points: Points = list(zip(steps, values, strict=True))
        if math.isnan(sum(values)):
            points = [(step, None if math.isnan(value) else value) for step, value in zip(steps, values, strict=True)]
        if steps != sorted(steps):
            points.sort(key=itemgetter(0))
        return points


def add_events(series: dict[str, Series], events: Iterable[dict[str, Any]]) -> None:
    """Add records of metrics.jsonl with a finite step to the series of their metrics, in order of appearance.

    Records with the same names one after another are taken as columns, in a third of the time that a loop over each takes.
    """
    for names, group in groupby(events, tuple):
        columns = dict(zip(names, zip(*map(dict.values, group), strict=True), strict=True))
        steps, new = array("d", columns["step"]), todays_names(columns)
        for name, column in columns.items():
            if name not in NOT_METRICS:
                series.setdefault(new.get(name, name), Series()).add(steps, column)


def todays_names(names: Collection[str]) -> dict[str, str]:
    """Old names among those of a record, and new ones: DPO's `logps_drop` was `kl` in 0.1, as KTO's and policies' still is."""
    of_pairs = (prefix for prefix in ("", "eval_", "first_eval_") if f"{prefix}logps_chosen" in names)
    return {f"{prefix}kl": f"{prefix}logps_drop" for prefix in of_pairs if f"{prefix}kl" in names}
