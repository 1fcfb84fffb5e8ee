"""The runs below a directory, a line each: what each has come to, from its files and its lock; of metrics the last are read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from toolkit.metrics.direction import greater_is_better
from toolkit.report.numbers import finite_number
from toolkit.runs.directory import LOCK, OWNER, is_locked
from toolkit.system.console import one_line
from toolkit.system.files import regular
from toolkit.system.json_lines import MOST_BYTES, parse_object, read_object

SWEEP_JOURNAL = "sweep.jsonl"
STATUSES = ("running", "finished", "stopped early", "interrupted", "diverged", "failed", "died", "sweep")
_MARKS = ("run.json", "metrics.jsonl", "summary.json", OWNER)  # that only a run writes
_TAIL = 1 << 16  # bytes of metrics.jsonl that are read


@dataclass(frozen=True)
class RunLine:
    """A run, or a sweep with its trials. `seconds` of training, `device_seconds` times the processes, `began` as Unix time."""

    directory: Path
    name: str  # its path below the directory that was searched
    recipe: str = ""
    status: str = ""
    note: str = ""  # why it failed, from where it can be resumed, or how many trials
    steps: int | None = None
    planned: int | None = None
    metric: str = ""
    best: float | None = None
    last: float | None = None
    greater_is_better: bool = False
    seconds: float | None = None
    device_seconds: float | None = None
    began: float | None = None


def list_runs(root: Path, *, trials: bool = False) -> list[RunLine]:
    """The runs in and below a directory, by name; a sweep is one line, and with `trials` one for each of its runs."""
    found = []
    for folder, is_sweep in _folders(root, trials):
        name = "." if folder == root else folder.relative_to(root).as_posix()
        found.append(_sweep_line(folder, name) if is_sweep else run_line(folder, name))
    return sorted(found, key=lambda each: each.name)


def run_line(folder: Path, name: str) -> RunLine:
    """What is in a run's files, each of which may be missing or damaged."""
    card, summary, owner = (read_object(folder / each) for each in ("run.json", "summary.json", OWNER))
    end, layout = (part if isinstance(part := card.get(each), dict) else {} for each in ("end", "layout"))
    events, status = _last_events(folder / "metrics.jsonl"), _status(folder, card, summary, owner)
    ended = bool(end) or (not card and bool(summary))
    metric, best, last = _metric(summary if ended else {}, events)
    step = finite_number(summary.get("steps")) if ended else finite_number(events[-1].get("step")) if events else None
    recipe = card.get("recipe")
    seconds = next((event["time"] for event in reversed(events) if "time" in event), None)
    seconds = end.get("wall_seconds", summary.get("seconds")) if ended else seconds
    return RunLine(
        folder, name,
        recipe=str(recipe.get("file") or "").removesuffix(".py") if isinstance(recipe, dict) else "",
        status=status, note=_note(folder, status, summary, owner),
        steps=None if step is None else int(step), planned=_whole(layout.get("steps")),
        metric=metric, best=best, last=last, greater_is_better=greater_is_better(metric) if metric else False,
        seconds=finite_number(seconds), device_seconds=finite_number(end.get("device_seconds")), began=_began(folder, card),
    )  # fmt: skip


def _folders(root: Path, trials: bool) -> Iterator[tuple[Path, bool]]:
    """(folder, whether it is a sweep's) of each run; what is inside of a run is not searched, nor are hidden folders."""
    for path, names, files in os.walk(root):
        folder, names[:] = Path(path), sorted(name for name in names if not name.startswith("."))
        if SWEEP_JOURNAL in files and not trials:
            names.clear()
            yield folder, True
        elif any(mark in files for mark in _MARKS) or ("config.yaml" in files and "checkpoints" in names):
            names.clear()
            yield folder, False


def _status(folder: Path, card: dict[str, Any], summary: dict[str, Any], owner: dict[str, Any]) -> str:
    """The end that it wrote; without one it runs while the lock is held, and has failed or died where it is not."""
    if is_locked(folder):
        return "running"
    end = card.get("end")
    written = end.get("status") if isinstance(end, dict) else None if card else summary.get("status")
    return written if isinstance(written, str) else "failed" if owner.get("failed") else "died"


def _note(folder: Path, status: str, summary: dict[str, Any], owner: dict[str, Any]) -> str:
    """Why a run failed, as far as it is recorded, and from where it can be continued."""
    if status in ("running", "finished", "stopped early"):
        return ""
    warnings = summary.get("warnings")
    said = owner.get("failed") or ""
    if status == "diverged" and isinstance(warnings, list) and warnings:
        said = warnings[-1]
    log = folder / "log.txt"  # of a sweep's trial
    if not said and status in ("failed", "died") and log.is_file():
        said = next((line for line in reversed(_tail(log)) if line.strip()), "")
    step = _resumable_from(folder)
    resumable = f"resumable from step {step}" if step is not None else ""
    return "; ".join(filter(None, (resumable, one_line(str(said), 200))))


def _resumable_from(folder: Path) -> int | None:
    from toolkit.checkpoint import list_checkpoints, verify_checkpoint

    checkpoints = reversed(list_checkpoints(folder / "checkpoints"))
    return next((int(path.name[5:]) for path in checkpoints if not verify_checkpoint(path, contents=False)), None)


def _metric(summary: dict[str, Any], events: list[dict[str, Any]]) -> tuple[str, float | None, float | None]:
    """(name, best, last) of the metric that decides which weights are best; without an evaluation, of the last loss."""
    best = summary.get("best")
    if isinstance(best, dict) and isinstance(name := best.get("name"), str):
        return name, finite_number(best.get("value")), finite_number(summary.get(name))
    values_of = ((name, finite_number(value)) for event in events for name, value in event.items())
    logged = [(name, value) for name, value in values_of if value is not None]
    for name in ("eval_loss", *(name for name, _ in logged if name.startswith("eval_")), "loss"):
        if values := [value for each, value in logged if each == name]:
            return name, max(values) if greater_is_better(name) else min(values), values[-1]
    return ("loss", None, finite_number(summary.get("train_loss"))) if "train_loss" in summary else ("", None, None)


def _sweep_line(folder: Path, name: str) -> RunLine:
    """A sweep by its journal: how many of its jobs have ended, and the best value of those that its trials have."""
    records = [record for line in _tail(folder / SWEEP_JOURNAL, MOST_BYTES) if (record := parse_object(line)) is not None]
    ended = sum(record.get("kind") == "end" for record in records)
    started = sum(record.get("kind") == "start" for record in records)
    runs = [path for path in (folder / "trials").glob("*") if path.is_dir()]
    lines = [run_line(path, path.name) for path in runs]
    values = [(-each.best if each.greater_is_better else each.best, each) for each in lines if each.best is not None]
    best = [each for _, each in sorted(values, key=lambda pair: pair[0])[:1]]
    seconds = [each.seconds for each in lines if each.seconds is not None]
    began = [each.began for each in lines if each.began is not None]
    return RunLine(
        folder, name, recipe=lines[0].recipe if lines else "",
        status="running" if any(each.status == "running" for each in lines) else "sweep",
        note=f"{len(runs)} trials, {ended} of {started} jobs ended",
        metric=best[0].metric if best else "", best=best[0].best if best else None,
        greater_is_better=best[0].greater_is_better if best else False,
        seconds=sum(seconds) if seconds else None, began=min(began) if began else None,
        device_seconds=sum(each.device_seconds or 0.0 for each in lines) or None,
    )  # fmt: skip


def _began(folder: Path, card: dict[str, Any]) -> float | None:
    started = card.get("started")
    try:
        return datetime.fromisoformat(started["date"]).timestamp()  # type: ignore[index]
    except (KeyError, TypeError, ValueError, OverflowError):
        times = [path.stat().st_mtime for name in (LOCK, OWNER, "config.yaml", "run.json") if (path := folder / name).exists()]
        return min(times, default=None)


def age(line: RunLine) -> float | None:
    """Seconds since the run began, or was last resumed."""
    return None if line.began is None else max(0.0, time.time() - line.began)


def _last_events(path: Path) -> list[dict[str, Any]]:
    events = (event for line in _tail(path) if (event := parse_object(line)) is not None)
    return [event for event in events if finite_number(event.get("step")) is not None]


def _tail(path: Path, most: int = _TAIL) -> list[str]:
    """The last lines of a file, the first of them perhaps cut."""
    try:
        with open(path, "rb", opener=regular) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _whole(value: Any) -> int | None:
    number = finite_number(value)
    return None if number is None else int(number)
