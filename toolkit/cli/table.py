"""A table of text: aligned; as wide as a terminal at most, and whole where it is piped."""

import shutil
import sys
from collections.abc import Sequence

_GAP = "  "


def table(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset(), shrinks: Sequence[int] = ()) -> list[str]:
    """The rows as lines, the first of them the head. `right`: columns of numbers. `shrinks`: columns whose texts are cut in
    the middle, the widest of these first, until the table fits on the terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if (width := width_of_screen()) is not None:
        fit(widths, width, shrinks)
    return [
        _GAP.join(
            _cut(cell, width).rjust(width) if number in right else _cut(cell, width).ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def width_of_screen() -> int | None:
    """The columns of the terminal behind standard output; None where that is a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def fit(widths: list[int], most: int, shrinks: Sequence[int], least: int = 8) -> None:
    """Make columns narrower, in place, until all fit into `most` characters, or none can be narrower."""
    for _ in range(sum(widths) + len(_GAP) * (len(widths) - 1) - most):
        widest = max(shrinks, key=lambda column: widths[column])
        if widths[widest] <= least:
            return
        widths[widest] -= 1


def _cut(text: str, width: int) -> str:
    """The names of tensors and of folders are distinguished by their ends as much as by their beginnings."""
    kept = width - 1
    return text if len(text) <= width else f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"
