"""What a run has left in its directory, read for the report. Any file may be missing or cut off: what is there is shown.

Curves are two arrays each, steps and values, because a long run has logged millions of them.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from toolkit.config import Refusal
from toolkit.config.files import NOT_READ
from toolkit.report.numbers import finite_number
from toolkit.system.files import regular
from toolkit.system.json_lines import parse_object, read_blocks
from toolkit.system.numbers import is_usable

FILES = ("metrics.jsonl", "samples.jsonl", "summary.json", "run.json", "config.yaml")  # that a run writes, and that are read
_SETTING_LINE = re.compile(rf"([A-Za-z_]\w*):\s*(.*?)(?:  # (?:default: (.*?))?(?:(?:; )?{NOT_READ})?)?")


@dataclass(frozen=True)
class SettingLine:
    """One line of config.yaml. `default` is the recipe's default as text where the value differs from it, else None.

    `is_read`: whether the run read the setting; one that it didn't had no effect.
    """

    name: str
    value: str
    panel: str
    default: str | None
    is_read: bool = True


@dataclass(frozen=True)
class RunRecord:
    """A run as it is in its files."""

    directory: Path
    series: dict[str, Series] = field(default_factory=dict)  # metrics.jsonl by metric, in order of appearance
    last_step: float | None = None
    nonfinite_steps: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl by step, where requested
    samples: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)  # run.json
    settings: list[SettingLine] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)  # what could not be read

    def setting(self, name: str) -> str | None:
        """The value of a setting as text."""
        return next((line.value for line in self.settings if line.name == name), None)


def check_runs(directories: Iterable[str | Path]) -> None:
    """Refuse directories that are missing, or that no run has written into.

    Raises:
        Refusal: of the first of them.
    """
    for directory in map(Path, directories):
        if not directory.is_dir():
            raise Refusal(f"{directory}: no such directory; the --output-dir of a run is needed.")
        if not any((directory / name).exists() for name in FILES):
            raise Refusal(f"{directory}: holds none of {', '.join(FILES)}; the --output-dir of a run is needed.")


def read_run(directory: Path, keep_events: bool = False) -> RunRecord:
    """Read all files of a run that can be read. `keep_events`: also what each line of metrics.jsonl holds."""
    complaints: list[str] = []
    series: dict[str, Series] = {}
    kept: list[dict[str, Any]] = []
    last_step, nonfinite_steps = -math.inf, 0
    for records in _read_blocks(directory / "metrics.jsonl", complaints):
        events = [record for record in records if finite_number(record.get("step")) is not None]
        add_events(series, events)
        last_step = max([last_step, *(event["step"] for event in events)])
        counts = (event.get("nonfinite_steps") for event in events)
        nonfinite_steps += sum(count for count in counts if isinstance(count, int))
        kept += events if keep_events else []
    series = {name: found for name, found in series.items() if found.steps}
    kept.sort(key=itemgetter("step"))
    samples = [sample for records in _read_blocks(directory / "samples.jsonl", complaints) for sample in records]
    summary = _read_object(directory / "summary.json", complaints)
    card = _read_object(directory / "run.json", complaints)
    settings = _read_settings(directory / "config.yaml", card, complaints)
    last = last_step if last_step > -math.inf else None
    return RunRecord(directory, series, last, nonfinite_steps, kept, samples, summary, card, settings, complaints)


def series_of(run: RunRecord, name: str) -> Points:
    """Every logged value of a metric by step."""
    return run.series[name].points() if name in run.series else []


def metric_names(run: RunRecord) -> list[str]:
    """Names of all metrics in metrics.jsonl in order of appearance, without `eval_`; a name is for both."""
    return list(dict.fromkeys(name.removeprefix("eval_") for name in run.series if name not in NOT_METRICS))


def first_and_last(run: RunRecord, name: str) -> tuple[float | None, float | None]:
    """The first and the final value of a metric; the summary has the last word on both (a run may go back to its best)."""
    values = [value for _, value in series_of(run, name) if value is not None]
    first = finite_number(run.summary.get(f"first_{name}"))
    last = finite_number(run.summary.get(name))
    if last is None and values:
        last = values[-1]
    if first is None and len(values) > 1:
        first = values[0]
    return first, last


def baselines_of(run: RunRecord) -> dict[str, float]:
    """The baselines to beat, by name."""
    found = run.summary.get("baselines")
    pairs = found.items() if isinstance(found, dict) else []
    return {str(name): number for name, value in pairs if (number := finite_number(value)) is not None}


def _read_text(path: Path, complaints: list[str]) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace", opener=regular) as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        complaints.append(f"{path.name} cannot be read ({error.strerror}).")
        return None


def _read_blocks(path: Path, complaints: list[str]) -> Iterator[list[dict[str, Any]]]:
    bad = 0
    try:
        for records, damaged in read_blocks(path):
            bad += damaged
            yield records
    except FileNotFoundError:
        return
    except OSError as error:
        complaints.append(f"{path.name} cannot be read ({error.strerror}).")
    if bad:
        complaints.append(f"{path.name}: {bad} line{'s' if bad > 1 else ''} could not be read.")


def _read_object(path: Path, complaints: list[str]) -> dict[str, Any]:
    text = _read_text(path, complaints)
    if text is None:
        return {}
    found = parse_object(text)
    if found is None:
        complaints.append(f"{path.name} is not a JSON object.")
        return {}
    return found


def _read_settings(path: Path, card: dict[str, Any], complaints: list[str]) -> list[SettingLine]:
    """config.yaml as text: its comments hold the panels and the defaults, which YAML itself would drop."""
    text = _read_text(path, complaints)
    if text is None:
        settings = card.get("settings")
        pairs = settings.items() if isinstance(settings, dict) else []
        return [SettingLine(str(name), json.dumps(value, ensure_ascii=False), "", None) for name, value in pairs]
    lines, panel = [], ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"# (.+)", line):
            panel = heading[1]
        elif found := _SETTING_LINE.fullmatch(line):
            lines.append(SettingLine(found[1], _without_quotes(found[2]), panel, found[3], not line.endswith(NOT_READ)))
        elif lines and line.strip():  # a value that goes on: a list item, a folded text
            last = lines[-1]
            lines[-1] = replace(last, value=f"{last.value}\n{line}".strip())
    public = card.get("settings")  # a recipe's own texts may hold a key, and pages are passed on: the card leaves them out
    unread = card.get("not_read")
    shown = {**public, **(unread if isinstance(unread, dict) else {})} if isinstance(public, dict) else None
    return lines if shown is None else [line for line in lines if line.name in shown]


def _without_quotes(value: str) -> str:
    for quote in "'\"":
        if len(value) > 1 and value[0] == value[-1] == quote:
            return value[1:-1].replace(quote * 2, quote)
    return value


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
        steps = array("d", columns["step"])
        for name, column in columns.items():
            if name not in NOT_METRICS:
                series.setdefault(name, Series()).add(steps, column)
