"""Which process of a sweep lives, and what one that was taken for dead may write down."""

import os
from pathlib import Path

import psutil
import pytest

from toolkit.sweeps import workers
from toolkit.sweeps.journal import Job, JournalFile, Objective, Outcome, Plan, read_journal
from toolkit.sweeps.loop import Sweep
from toolkit.sweeps.workers import Liveness


def test_a_clock_that_is_set_makes_nobody_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel moves the time of its boot with the clock, by a second now and then where NTP slews it; psutil adds that to a
    process's start. Fails when: _started in workers.py does not take it off again."""
    liveness = Liveness(lambda worker: None, lambda worker, beat: None)
    machine, _, started, number = liveness.me.rsplit(":", 3)
    other = f"{machine}:{os.getppid()}:{workers._started(os.getppid())}:{number}"
    assert liveness.lives(other)
    before = psutil.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: before + 1)
    assert psutil.boot_time() == before + 1
    assert liveness.lives(other)
    assert not liveness.lives(f"{machine}:{os.getppid()}:{started}:{number}")


@pytest.mark.parametrize("value_first", [True, False])
def test_a_value_stays_whoever_ends_a_trial_last(value_first: bool, tmp_path: Path) -> None:
    """Two machines train one trial when the first was silent for a while, and the second one to begin is refused its directory.
    Fails when: end in loop.py writes over a value."""
    asked = Plan("r.py", "digest", [], ["x=float:0..1"], "random", 0, 1, [Objective("eval_loss")])
    first, second = (Sweep(journal, asked, journal.liveness()) for journal in (JournalFile(tmp_path), JournalFile(tmp_path)))
    claimed = []
    for worker in (first, second):
        worker.open()
        claimed.append(worker.claim())
        worker.liveness.close()
    assert [isinstance(job, Job) and job.number for job in claimed] == [0, 0]
    value, failure = Outcome({"eval_loss": 0.5}), Outcome(reason="refused: the directory is in use", code=2)
    for worker, outcome in zip((first, second), (value, failure) if value_first else (failure, value), strict=True):
        worker.end(0, outcome)
        assert worker.jobs[0].outcome is not None
    (job,) = read_journal(JournalFile(tmp_path))[1]
    assert job.outcome is not None
    assert job.outcome.values == {"eval_loss": 0.5}
