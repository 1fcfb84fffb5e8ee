"""The loop of a sweep: claim a job, run it, write down its end; from the journal on, in as many processes as there are."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.config import Refusal
from toolkit.distributed.launch import REFUSED, TRY_AGAIN
from toolkit.sweeps.journal import (
    Job,
    Journal,
    Outcome,
    Plan,
    again_record,
    differing,
    end_record,
    named_record,
    other_fields,
    plan_record,
    read_journal,
    start_record,
    take_in,
)
from toolkit.sweeps.pruning import pruner_of
from toolkit.sweeps.results import result_of, spent_budget, steps_used
from toolkit.sweeps.schedule import Schedule, make_schedule
from toolkit.sweeps.space import Nothing, Point
from toolkit.sweeps.trials import Running, Start
from toolkit.sweeps.workers import Liveness

_POLL_SECONDS, _WAIT_SECONDS = 0.02, 0.5  # between looks at running jobs; and at what other processes write down


class Stopped(Exception):
    """A signal stopped the sweep, or a full disk; it continues with the jobs that have not ended."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass
class Sweep:
    """A sweep as this process has it: what the journal held when it was last read, given to the schedule in its order.

    The n-th job is proposed from the results of the first n - `parallel` ones, however many have ended: so the proposals do not
    depend on which of the jobs at a time is faster, nor on how many processes run them.

    Attributes:
        address: of settings, what determines the result of a trial.
        elsewhere: the outcome of an address at a step in another sweep.
        fork: makes a trial's run directory of another trial's, which is not running; called again after a kill.
    """

    journal: Journal
    plan: Plan
    liveness: Liveness
    address: Callable[[Point], str] = lambda settings: ""
    elsewhere: Callable[[str, int | None], Outcome | None] = lambda address, until: None
    fork: Callable[[int, int], None] = lambda trial, parent: None
    jobs: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._read_records, self._told = 0, 0
        self._schedule: Schedule = make_schedule(self.plan)

    def open(self) -> None:
        """Write the plan, or compare it with the one that the journal holds.

        Raises:
            Refusal: that is of another sweep, or it can't be read.
        """
        with self.journal.exclusive():
            plan, _ = read_journal(self.journal)
            check_same(plan, self.plan)
            if plan != self.plan:
                self.journal.append(plan_record(self.plan))
        self.read()

    def read(self) -> None:
        """Take in what was written since the last look, by whichever process."""
        for record in self.journal.records(self._read_records):
            self._read_records += 1
            with named_record(self._read_records):
                if job := take_in(record, self.jobs):
                    self._tell_first(job.told)
                    self._schedule.accept(job)

    def claim(self) -> Job | Nothing:
        """A job for this process: one that a dead process has left, or a new one. Nothing yet, where results are missing."""
        with self.journal.exclusive():
            self.read()
            for job in self.jobs:
                if job.outcome is None and (claimed := self._take_over(job)):
                    return claimed
            while True:
                job_or_not = self._propose()
                if not isinstance(job_or_not, Job):
                    return job_or_not
                if job_or_not.outcome is None and job_or_not.same is None:
                    return job_or_not

    def end(self, number: int, outcome: Outcome) -> None:
        """Write down how a job of this process has ended; not over a value of another one, which took this one for dead."""
        with self.journal.exclusive():
            self.read()
            if not result_of(self.jobs[number], self.plan).values:
                self.journal.append(end_record(number, outcome))
        self.read()

    def told_to(self, job: Job) -> Sequence[Job]:
        """The jobs whose results a job was proposed from."""
        return self.jobs[: job.told]

    def _take_over(self, job: Job) -> Job | None:
        if job.same is not None:
            source = self.jobs[job.same].outcome
            if source is None:
                return None
            if result_of(self.jobs[job.same], self.plan).values:
                self.journal.append(end_record(job.number, _copied(source, job.same)))
                self.read()
                return None
            job.same = None  # it failed: this one tries again
        elif self.liveness.lives(job.worker):
            return None
        job.worker = self.liveness.me
        self.journal.append(again_record(job))
        return job

    def _propose(self) -> Job | Nothing:
        looks_back = self._schedule.learns or self.plan.prune == "median" or self.plan.budget_steps is not None
        if looks_back and not self._tell_first(len(self.jobs) - self.plan.parallel + 1):
            return Nothing.YET
        if self._is_over_budget():
            return Nothing.YET if any(job.outcome is None for job in self.jobs) else Nothing.MORE
        while (found := self._schedule.next()) is Nothing.YET:
            if not self._tell_first(self._told + 1):
                return Nothing.YET
        if isinstance(found, Nothing):
            return Nothing.YET if any(job.outcome is None for job in self.jobs) else Nothing.MORE
        job = Job(len(self.jobs), found.trial, found.settings, found.until, self._told, found.parent, self.liveness.me)
        job.address = self.address(found.settings)
        if job.parent:
            parent, step = job.parent
            origin = next(each for each in self.jobs if each.trial == parent)
            if job.address:
                job.address = hashlib.sha256(f"{job.address} {origin.address} {step}".encode()).hexdigest()[:32]
            self.fork(job.trial, origin.trial if origin.same is None else self.jobs[origin.same].trial)
        known = self._equal(job)
        job.same = known.number if known else None
        self.journal.append(start_record(job))
        other = None if known else self.elsewhere(job.address, job.until)
        if known and known.outcome and result_of(known, self.plan).values:
            other = _copied(known.outcome, known.number)
        if other:
            self.journal.append(end_record(job.number, other))
        self.read()
        return self.jobs[job.number]

    def _equal(self, job: Job) -> Job | None:
        """An earlier job that computes the same; one that failed is tried again, one that was pruned may go on."""
        # Whether a trial is pruned depends on those before it too: only the results its proposal had may stand for it.
        others = self.jobs[: self._told] if self.plan.prune == "median" else self.jobs
        for other in others:
            is_same_point = dict(other.settings) == dict(job.settings) or (other.address == job.address != "")  # 1 and 1.0
            is_equal = is_same_point and (other.until, other.parent) == (job.until, job.parent)
            outcome = other.outcome
            stands = outcome is None or (result_of(other, self.plan).values and not outcome.pruned)
            if is_equal and other.same is None and stands:
                return other
        return None

    def _is_over_budget(self) -> bool:
        """Whether the steps or hours are used up; of what the next proposal may have, so always at the same job."""
        return bool(spent_budget(self.plan, self.jobs, steps_used(self.jobs[: self._told])))

    def _tell_first(self, count: int) -> bool:
        """Give the schedule the results of the first jobs, in order; False where one has not ended."""
        while self._told < min(count, len(self.jobs)):
            if self.jobs[self._told].outcome is None:
                return False
            self._schedule.tell(self.jobs[self._told])
            self._told += 1
        return self._told >= count


def check_same(before: Plan | None, now: Plan) -> None:
    """Compare the plan that a journal holds, if any, with another.

    Raises:
        Refusal: they are of two sweeps.
    """
    if before is not None and (others := other_fields(before, now)):
        old, new = differing(*(getattr(each, others[0]) for each in (before, now)))
        what = {"recipe_digest": "text of its recipe", "words": "set of the recipe's flags"}.get(others[0], others[0])
        kept = "type `toolkit sweep continue DIR` for that one"  # which keeps all else, and reads the recipe that is there now
        way = f"put the text back that {now.recipe} had" if others[0] == "recipe_digest" else kept
        raise Refusal(
            f"--sweep-dir: holds a sweep with another {what.replace('_', ' ')} ({old}; now {new}). "
            f"Take another --sweep-dir, or {way}."
        )


def run_sweep(
    sweep: Sweep, start: Start, slots: int = 1, ended: Callable[[Job], None] = lambda job: None,
    shown: Callable[[Mapping[int, tuple[Job, Running]]], None] = lambda running: None, received: Sequence[int] = (),
) -> list[Job]:  # fmt: skip
    """Run the jobs of a sweep until there are no more, `slots` at a time; the jobs in order.

    A signal in `received` goes on to all running jobs; the sweep ends when they have. Where the journal cannot be written no
    more jobs start: what the running ones come to is in their run directories, and is written down when the sweep continues.

    Args:
        start: starts a job in a slot.
        ended: called with each job of this process that has ended.
        shown: called now and then with the running jobs by slot.
        received: grows by each stop signal of this process.

    Raises:
        Stopped: by a signal, or a full disk.
        Refusal: the journal is one of another sweep, or a trial did not log what is judged by.
    """
    try:
        sweep.open()
    except OSError as error:
        raise Stopped(1, _said_by(error)) from error
    running: dict[int, tuple[Job, Running]] = {}
    forwarded, code, full, looked, left = 0, 0, "", -_WAIT_SECONDS, Nothing.YET
    with _closed_at_the_end(running, sweep.liveness):
        while True:
            for number in received[forwarded:]:
                for _, process in running.values():
                    process.interrupt(number if forwarded < 2 else signal.SIGKILL)
                forwarded += 1
            try:
                for slot, (job, process) in list(running.items()):
                    try:
                        outcome, interrupted = process.poll(), process.interrupted()
                    except OSError:
                        del running[slot]
                        raise
                    except Refusal as refusal:  # it did not log a metric; where others did, that is its own affair
                        if not any(result_of(each, sweep.plan).values for each in sweep.jobs):
                            raise
                        outcome, interrupted = Outcome(reason=str(refusal), code=REFUSED), None
                    if outcome is None and interrupted is None:
                        continue
                    del running[slot]
                    looked = -_WAIT_SECONDS
                    if outcome is None:
                        code = 130 if interrupted == 130 else TRY_AGAIN  # it may not have come as far as to answer a signal
                        continue
                    sweep.end(job.number, outcome)
                    ended(sweep.jobs[job.number])
                while not (received or code or full) and len(running) < slots and time.monotonic() - looked >= _WAIT_SECONDS:
                    claimed = sweep.claim()
                    if isinstance(claimed, Nothing):
                        left, looked = claimed, time.monotonic()
                        break
                    slot = min(set(range(slots)) - running.keys())
                    running[slot] = (claimed, start(claimed, slot, pruner_of(sweep.plan, sweep.told_to(claimed))))
                sweep.liveness.beat()
            except OSError as error:
                full = full or _said_by(error)
            if not running and (received or code or full):
                raise Stopped(code or (1 if full else TRY_AGAIN), full or "stopped by a signal")
            if not running and left is Nothing.MORE:
                return sweep.jobs
            shown(running)
            time.sleep(_POLL_SECONDS)


def _said_by(error: OSError) -> str:
    """The place where it is known, and what is wrong with it."""
    return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}"


def _copied(outcome: Outcome, source: int) -> Outcome:
    return dataclasses.replace(outcome, same_as=source if outcome.same_as is None else outcome.same_as, seconds=0.0)


@contextlib.contextmanager
def _closed_at_the_end(running: Mapping[int, tuple[Job, Running]], liveness: Liveness) -> Iterator[None]:
    """What still runs when the block ends, because of an error in it, is killed; the worker is one no more."""
    try:
        yield
    finally:
        for _, process in running.values():
            process.interrupt(signal.SIGKILL)
        liveness.close()
