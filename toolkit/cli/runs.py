"""toolkit runs: a table of the runs below a directory."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.table import table, width_of_screen
from toolkit.config import Refusal
from toolkit.system.console import DIM, GREEN, RED, as_typed, one_line, say
from toolkit.system.numbers import show_decimals

if TYPE_CHECKING:
    from toolkit.report.run_list import RunLine

COLUMNS = ("name", "recipe", "status", "steps", "metric", "best", "last", "time", "cost", "age", "note")
_STYLES = {"running": GREEN, "failed": RED, "diverged": RED, "died": RED}
_NEEDS = {"cost": 110, "recipe": 90, "last": 70}  # columns of the terminal; narrower, and the table is without


def runs(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to look, and below it.")] = Path("runs"),
    sort: Annotated[
        str, typer.Option(metavar="COLUMN", help=f"One of {', '.join(COLUMNS)}; the best or the newest first.")
    ] = "age",
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--filter", metavar="STATUS", help="Only these: running, finished, interrupted, failed, died ..."),
    ] = None,
    trials: Annotated[bool, typer.Option("--trials", help="Every trial of a sweep, which else is one line.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with paths, seconds and all columns.")] = False,
) -> None:
    """List runs: recipe, status, steps done and planned, best and last metric, time, age.

    A run is running while its lock is held; one that holds no lock and wrote no end has died, as by a kill. The cost is the
    time of its devices together. On a narrow terminal some columns are left out; piped, the table is whole.
    """
    from toolkit.report.run_list import STATUSES, list_runs

    if sort not in COLUMNS:
        raise typer.BadParameter(f"{sort}: is none of {', '.join(COLUMNS)}.", param_hint="--sort")
    if unknown := set(only or ()) - set(STATUSES):
        raise typer.BadParameter(f"{', '.join(unknown)}: is none of {', '.join(STATUSES)}.", param_hint="--filter")
    if not directory.is_dir():
        raise Refusal(f"{directory}: no such directory. Name the one with your runs: {as_typed('toolkit', 'runs', 'DIR')}")
    everything = list_runs(directory, trials=trials)
    found = [each for each in everything if not only or each.status in only]
    found.sort(key=lambda each: _rank(each, sort), reverse=reverse)
    if as_json:
        say(json.dumps([dataclasses.asdict(each) for each in found], indent=1, default=str))
    elif not found:
        say(f"{directory}: {f'none of {len(everything)} runs is so' if everything else 'no run in there or below'}")
    else:
        _show(found)


def _show(found: "list[RunLine]") -> None:
    width = width_of_screen()
    rows = [[each.upper() for each in COLUMNS], *(_cells(each) for each in found)]
    kept = [
        number for number, name in enumerate(COLUMNS)
        if any(row[number] for row in rows[1:]) and (width is None or width >= _NEEDS.get(name, 0))
    ]  # fmt: skip
    rows = [[row[number] for number in kept] for row in rows]
    names = [COLUMNS[number] for number in kept]
    right = frozenset(names.index(name) for name in ("steps", "best", "last", "time", "cost", "age") if name in names)
    shrinks = [names.index(name) for name in ("note", "name", "metric") if name in names]
    for line, each in zip(table(rows, right, shrinks), [None, *found], strict=True):
        say(line, style=DIM if each is None else _STYLES.get(each.status, ""))


def _cells(line: "RunLine") -> list[str]:
    from toolkit.report.numbers import show_seconds
    from toolkit.report.run_list import age

    steps = "" if line.steps is None else f"{line.steps:,}"
    steps += f"/{line.planned:,}" if line.planned is not None else ""
    old = age(line)
    numbers = ["" if each is None else show_decimals(each) for each in (line.best, line.last)]
    times = ["" if each is None else show_seconds(each) for each in (line.seconds, line.device_seconds)]
    shown = [line.name, line.recipe, line.status, steps, line.metric, *numbers, *times, _show_age(old), line.note]
    return [one_line(each, 160) for each in shown]


def _show_age(seconds: float | None) -> str:
    """90 s, 5 min, 3 h, 12 d."""
    if seconds is None:
        return ""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _rank(line: "RunLine", column: str) -> tuple[bool, Any]:
    """Ascending: text by its letters, the best metric first, the newest first, counts and times with the most first."""
    value = {"time": line.seconds, "cost": line.device_seconds, "age": line.began}.get(column, getattr(line, column, None))
    if isinstance(value, str):
        return not value, value
    if value is None:
        return True, 0.0
    smaller_first = column in ("best", "last") and not line.greater_is_better
    return False, value if smaller_first else -value
