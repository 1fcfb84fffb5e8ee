"""The journal of a sweep, sweep.jsonl: what was asked for, each trial as it starts and as it ends. The only truth of it."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit.config import Refusal
from toolkit.sweeps.space import Point
from toolkit.system.files import make_folder, sync
from toolkit.system.json_lines import append_line, parse_object

JOURNAL, LOCK = "sweep.jsonl", ".sweep.lock"


@dataclass(frozen=True)
class Plan:
    """What a sweep was started with; all that its proposals and its trials depend on."""

    recipe: str
    recipe_digest: str
    words: list[str]  # the recipe's own flags
    search: list[str]
    strategy: str
    seed: int
    trials: int
    metric: str
    maximize: bool
    placement: list[str] = field(default_factory=list)  # --processes and --accelerate-config
    folder: str = ""  # in which it was started, to which relative paths belong
    optuna: str | None = None


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: its value, or the reason why it has none. `same_as`: the trial that had these settings before."""

    value: float | None
    reason: str = ""
    code: int = 0
    seconds: float = 0.0
    same_as: int | None = None


@dataclass
class Trial:
    """A trial of the journal; without an outcome it runs, or was interrupted."""

    number: int
    settings: Point
    outcome: Outcome | None = None


def trial_folder(folder: Path, number: int) -> Path:
    """The run directory of a trial."""
    return folder / "trials" / f"{number:04d}"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Be the only process that runs this sweep. The lock is the operating system's: a killed process leaves none behind.

    Raises:
        Refusal: another process runs it.
    """
    from filelock import FileLock, Timeout

    make_folder(folder)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise Refusal(f"{folder}: another process runs this sweep; `toolkit sweep status {folder}` lists it.") from None
    try:
        yield
    finally:
        lock.release()


def repair(folder: Path) -> None:
    """Cut a last line that a crash left torn, so that the next one does not follow it; for who holds the sweep."""
    path = folder / JOURNAL
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
        sync(path)


def read_journal(folder: Path) -> tuple[Plan | None, dict[int, Trial]]:
    """The plan and the trials by number; (None, {}) where nothing was written yet. A torn last line is left out.

    Raises:
        Refusal: a line is no record of a sweep.
    """
    path = folder / JOURNAL
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if path.exists() else []
    plan: Plan | None = None
    trials: dict[int, Trial] = {}
    for number, line in enumerate(lines, 1):
        record = parse_object(line)
        try:
            if record is None:
                raise ValueError("no JSON object")
            kind = record.pop("kind")
            if kind == "plan":
                plan = Plan(**record)
            elif kind == "start":
                trials[record["number"]] = Trial(record["number"], record["settings"])
            else:
                trial = trials[record.pop("number")]
                trial.outcome = Outcome(**record)
        except (KeyError, TypeError, ValueError) as error:
            raise Refusal(f"{path}:{number}: is no record of a sweep ({error}). Take another --sweep-dir.") from None
    return plan, trials


def write_plan(folder: Path, plan: Plan) -> None:
    """Write down what the sweep is; a later plan replaces an earlier one (more trials, say)."""
    _append(folder, {"kind": "plan", **asdict(plan)})


def write_start(folder: Path, number: int, settings: Point) -> None:
    """Write down the settings of a trial, before it starts."""
    _append(folder, {"kind": "start", "number": number, "settings": dict(settings)})


def write_end(folder: Path, number: int, outcome: Outcome) -> None:
    """Write down how a trial ended."""
    _append(folder, {"kind": "end", "number": number, **asdict(outcome)})


def _append(folder: Path, record: Mapping[str, Any]) -> None:
    append_line(folder / JOURNAL, dict(record))
    sync(folder / JOURNAL)
    sync(folder)
