"""Progress of work that takes minutes and is no training: a bar on a terminal, a line a minute in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from toolkit.system.console import write
from toolkit.system.numbers import show_time

LOG_SECONDS = 60.0  # between two lines of a log; work that is done before the first has none
BAR_SECONDS = 3.0  # before a bar is shown

Item = TypeVar("Item")


@contextmanager
def progress(work: str, unit: str, total: int | None = None) -> Iterator[Callable[[int], object]]:
    """What to call with how many more are done; `unit` is rows, or B for bytes. Shows the rate and, with a total, an ETA.

    It is shown on the standard error of its beginning, wherever that of the work goes.
    """
    from tqdm.auto import tqdm

    space = "" if unit == "B" else " "
    with tqdm(
        total=total, desc=work, unit=space + unit, unit_scale=unit == "B", disable=None, leave=False, delay=BAR_SECONDS
    ) as bar:
        screen = sys.stderr
        if screen.isatty():
            yield bar.update
            return
        started = shown = time.monotonic()
        done = 0

        def add(count: int) -> None:
            nonlocal done, shown
            done += count
            if (now := time.monotonic()) - shown >= LOG_SECONDS:
                shown = now
                write(f"{work}: {_amounts(done, total, unit, done / (now - started))}\n", screen)

        yield add


def with_progress(
    items: Iterable[Item], work: str, unit: str, total: int | None, size: Callable[[Item], int]
) -> Iterator[Item]:
    """The items, each counted by its size once it is done."""
    with progress(work, unit, total) as add:
        for item in items:
            yield item
            add(size(item))


def _amounts(done: int, total: int | None, unit: str, rate: float) -> str:
    """Such as `1,200,000 of 9,500,774 rows, 21,400 rows/s, ETA 6:28`."""
    scale, name = (1e6, "MB") if unit == "B" else (1.0, unit)
    of = "" if total is None else f" of {total / scale:,.0f}"
    left = "" if total is None or not rate else f", ETA {show_time(max(0, total - done) / rate)}"
    speed = f"{rate / scale:,.0f} {name}/s" if rate >= scale else f"{60 * rate / scale:,.0f} {name}/min"
    return f"{done / scale:,.0f}{of} {name}, {speed}{left}"
