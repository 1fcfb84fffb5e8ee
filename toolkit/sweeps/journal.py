"""The journal of a sweep: its plan, each job as it starts and as it ends. The only truth of it.

A job trains one trial up to a step, or to its end. Where nothing is pruned by rungs, a trial is one job.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from toolkit.config import Refusal
from toolkit.sweeps.records import made_of
from toolkit.sweeps.space import Point
from toolkit.sweeps.workers import Liveness, beats_in
from toolkit.system.console import as_typed
from toolkit.system.files import make_folder, regular, sync
from toolkit.system.json_lines import append_line, parse_object

JOURNAL, LOCK = "sweep.jsonl", ".sweep.lock"
_LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class Objective:
    """A metric that decides, and whether more of it is better."""

    metric: str
    maximize: bool = False


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
    objectives: list[Objective]
    constraints: list[str] = field(default_factory=list)  # such as parameters<=1e6
    parallel: int = 1  # trials at a time, in all processes: a proposal is given the results of those before
    seeds: int = 1  # trials of each point, which differ in their seed
    prune: str = "none"
    rungs: list[int] = field(default_factory=list)  # steps at which trials are compared; the last one is a whole run
    reduction: int = 3  # one of this many goes on to the next rung
    budget_steps: int | None = None
    budget_hours: float | None = None
    hang_minutes: float | None = None  # after which a trial that writes nothing is killed
    placement: list[str] = field(default_factory=list)  # --processes and --accelerate-config
    folder: str = ""  # in which it was started, to which relative paths belong


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the values of its metrics by name, or the reason why it has none.

    `step`: steps of the run by then. `curve`: (step, value) of the first objective at each evaluation so far. `same_as`: where
    the same was computed before: the number of a job, or a run directory of another sweep.
    """

    values: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    code: int = 0
    seconds: float = 0.0
    step: int = 0
    pruned: bool = False
    curve: list[tuple[int, float]] = field(default_factory=list)
    same_as: int | str | None = None


@dataclass
class Job:
    """One training of a trial; without an outcome it runs, or was interrupted.

    `until`: the step at which it stops; None at the end of the run. `told`: how many jobs' results its proposal had, the
    first ones. `parent`: the (trial, step) whose checkpoint the trial began with. `same`: an earlier job that computes the
    same, and computes it for both.
    """

    number: int
    trial: int
    settings: Point
    until: int | None = None
    told: int = 0
    parent: tuple[int, int] | None = None
    worker: str = ""
    same: int | None = None
    address: str = ""
    outcome: Outcome | None = None


class Journal(Protocol):
    """Where the records are: a file, or a table of a database."""

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """A block in which no other process appends."""
        ...

    def records(self, since: int) -> Sequence[Mapping[str, Any]]:
        """The records from a number on, in order; a torn last one is left out."""
        ...

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record, durably when the exclusive block ends."""
        ...

    def liveness(self) -> Liveness:
        """Which of the processes that share it live."""
        ...


class JournalFile:
    """The journal in SWEEP/sweep.jsonl. The lock is the operating system's: a killed process leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / JOURNAL
        self._offset = self._lines = 0

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        from filelock import FileLock, Timeout

        make_folder(self._folder)
        lock = FileLock(self._folder / LOCK)
        try:
            lock.acquire(timeout=_LOCK_SECONDS)
        except Timeout:
            raise Refusal(f"{self._folder}: another process has held the journal's lock for {_LOCK_SECONDS:.0f} s.") from None
        try:
            self._repair()
            yield
        finally:
            lock.release()

    def records(self, since: int) -> Sequence[Mapping[str, Any]]:
        """Those from a number on, which must be where the last call has ended, or 0."""
        if since != self._lines:
            self._offset = self._lines = 0
        content, whole = self._unread()
        found = []
        for line in content[:whole].decode(errors="replace").split("\n")[:-1]:
            self._lines += 1
            record = parse_object(line)
            if record is None:
                cut = as_typed("sed", "-i", f"{self._lines},$d", self._path)
                raise Refusal(
                    f"{self._path}:{self._lines}: is no record of a sweep (no JSON). The trials before it stay if it and the "
                    f"lines behind it are cut off, as in: {cut}"
                )
            found.append(record)
        self._offset += whole
        return found

    def append(self, record: Mapping[str, Any]) -> None:
        is_new = not self._path.exists()
        append_line(self._path, dict(record))
        sync(self._path)
        if is_new:
            sync(self._folder)

    def liveness(self) -> Liveness:
        """Of workers by files of the sweep's directory."""
        return beats_in(self._folder / "workers")

    def _repair(self) -> None:
        """Cut a last line that a crash left torn, so that the next one does not follow it."""
        content, whole = self._unread()
        if whole < len(content):
            os.truncate(self._path, self._offset + whole)
            sync(self._path)

    def _unread(self) -> tuple[bytes, int]:
        """What follows the records that were read, and how many bytes of it are whole lines."""
        content = b""
        if self._path.exists():
            with open(self._path, "rb", opener=regular) as file:
                file.seek(self._offset)
                content = file.read()
        return content, content.rfind(b"\n") + 1


def plan_record(plan: Plan) -> dict[str, Any]:
    """What the sweep is; a later one replaces it (more trials, for instance)."""
    return {"kind": "plan", **asdict(plan)}


def start_record(job: Job) -> dict[str, Any]:
    """A job and its settings, before it starts."""
    return {"kind": "start", **{name: value for name, value in asdict(job).items() if name != "outcome"}}


def again_record(job: Job) -> dict[str, Any]:
    """An interrupted job that another process continues."""
    return {"kind": "again", "number": job.number, "worker": job.worker}


def end_record(number: int, outcome: Outcome) -> dict[str, Any]:
    """How a job ended."""
    return {"kind": "end", "number": number, **asdict(outcome)}


def plan_of(record: Mapping[str, Any]) -> Plan:
    """The plan that a record holds."""
    objectives = [made_of(Objective, each) for each in record["objectives"]]
    plan = made_of(Plan, {**record, "objectives": objectives}, "kind")
    if min(plan.trials, plan.parallel, plan.seeds, len(objectives), plan.reduction - 1) < 1:
        raise ValueError("a number below 1")
    return plan


def take_in(record: Mapping[str, Any], jobs: list[Job]) -> Job | None:
    """Add a record of the jobs; the job that it starts, if any."""
    match record["kind"]:
        case "start":
            job = made_of(Job, record, "kind")
            is_known = job.same is None or 0 <= job.same < job.number
            if job.number != len(jobs) or job.trial < 0 or not 0 <= job.told <= job.number or not is_known:
                raise ValueError(f"job {job.number} after {len(jobs)} others")
            job.parent = (job.parent[0], job.parent[1]) if job.parent else None
            jobs.append(job)
            return job
        case "again":
            _numbered(record, jobs).worker = str(record["worker"])
        case "end":
            outcome = made_of(Outcome, record, "kind", "number")
            _numbered(record, jobs).outcome = replace(outcome, curve=[(step, float(value)) for step, value in outcome.curve])
        case kind if kind != "plan":
            raise ValueError(f"kind {kind}")
    return None


def _numbered(record: Mapping[str, Any], jobs: Sequence[Job]) -> Job:
    if record["number"] not in range(len(jobs)):
        raise ValueError(f"job {record['number']}, which has not begun")
    return jobs[record["number"]]


def read_journal(journal: Journal) -> tuple[Plan | None, list[Job]]:
    """The plan and the jobs in order; (None, []) where nothing was written yet.

    Raises:
        Refusal: a record is none of a sweep.
    """
    plan: Plan | None = None
    jobs: list[Job] = []
    for line, record in enumerate(journal.records(0), 1):
        with named_record(line):
            if record["kind"] == "plan":
                plan = plan_of(record)
            take_in(record, jobs)
    return plan, jobs


@contextlib.contextmanager
def named_record(line: int) -> Iterator[None]:
    """A block that reads a record; what is wrong with it is a refusal with its number."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Refusal(f"{JOURNAL}:{line}: is no record of a sweep ({error}). Take another --sweep-dir.") from None


def other_fields(before: Plan, now: Plan) -> list[str]:
    """The fields in which two plans differ, of those that may not change while a sweep goes on."""
    may_change = ("trials", "folder", "parallel", "budget_steps", "budget_hours", "hang_minutes")
    names = [each.name for each in fields(Plan) if each.name not in may_change]
    return [name for name in names if getattr(before, name) != getattr(now, name)]


def differing(one: object, other: object) -> tuple[object, object]:
    """Two values, of lists of words those from the first one that differs to the last one."""
    if not isinstance(one, Sequence) or not isinstance(other, Sequence) or isinstance(one, str) or isinstance(other, str):
        return one, other
    alike = [a == b for a, b in zip(one, other, strict=False)]
    start = alike.index(False) if False in alike else len(alike)
    back = [a == b for a, b in zip(one[start:][::-1], other[start:][::-1], strict=False)]
    end = back.index(False) if False in back else len(back)
    shown = [" ".join(map(str, words[start : len(words) - end])) or "nothing" for words in (one, other)]
    return shown[0], shown[1]
