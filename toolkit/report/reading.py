"""What a run has left in its directory, read for the report. Any file may be missing or cut off: what is there is shown."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from toolkit.config import Refusal
from toolkit.config.files import NOT_READ
from toolkit.report.numbers import finite_number
from toolkit.report.series import NOT_METRICS, Points, Series, add_events, todays_names
from toolkit.system.json_lines import parse_object, read_blocks

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
    """A run as its files tell it."""

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
        kept += map(_renamed, events) if keep_events else []
    series = {name: found for name, found in series.items() if found.steps}
    kept.sort(key=itemgetter("step"))
    samples = [sample for records in _read_blocks(directory / "samples.jsonl", complaints) for sample in records]
    summary = _renamed(_read_object(directory / "summary.json", complaints))
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


def _renamed(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics by today's names."""
    new = todays_names(metrics)
    return {new.get(name, name): value for name, value in metrics.items()} if new else metrics


def _read_text(path: Path, complaints: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
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
