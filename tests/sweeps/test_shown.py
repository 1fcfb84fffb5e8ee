"""What a sweep shows while it runs, on a terminal."""

import io
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit.sweeps.journal import Job, Objective, Outcome, Plan
from toolkit.sweeps.shown import Live
from toolkit.sweeps.trials import trial_folder

PLAN = Plan("r.py", "digest", [], ["rate=float:0..1"], "random", 0, 10, [Objective("eval_loss")], parallel=2)


def job(number: int, value: float | None = None, seconds: float = 90.0, **more: object) -> Job:
    outcome = None if value is None else Outcome({"eval_loss": value}, seconds=seconds, step=10, **more)  # type: ignore[arg-type]
    return Job(number, number, {"rate": 0.5}, outcome=outcome)


def test_the_live_line_has_what_runs_the_best_and_the_time_left(tmp_path: Path) -> None:
    """Two of ten trials run, one with evaluations; three have ended, one of which was computed before and took no time: the
    other seven take 90 s each, two at a time.

    Fails when: line in shown.py counts the copied trial's time, forgets the slots, or shows the first evaluation.
    """
    run = trial_folder(tmp_path, 3)
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "eval_loss": 1 / step}) + "\n" for step in (2, 4)))
    jobs = [job(0, 0.5), job(1, 0.125), job(2, 0.5, seconds=0.0, same_as=0), job(3), job(4)]
    shown = Live(tmp_path, PLAN, 2).line(jobs[3:], jobs)
    assert shown == "runs 0003 0.2500 at 4, 0004 | best eval_loss 0.1250 (0001) | 3 ended of 10, about 5 min left"
    assert Live(tmp_path, PLAN, 2).line(jobs[4:], jobs[3:]) == "runs 0004 | no value yet | 0 ended"


def test_the_live_line_is_written_over_once_a_second_and_on_a_terminal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And taken away before a line that stays. Fails when: show in shown.py asks no terminal, or writes at every look."""
    for is_terminal in (False, True):
        terminal = io.StringIO()
        monkeypatch.setattr(terminal, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr("sys.stderr", terminal)
        live, now = Live(tmp_path, PLAN, 2), time.monotonic() + 1000
        for seconds in (0.0, 0.1, 0.9, 1.1):
            monkeypatch.setattr("toolkit.sweeps.shown.time", SimpleNamespace(monotonic=lambda at=now + seconds: at))
            live.show({0: (job(4), None)}, [job(4)])  # type: ignore[dict-item]
        assert terminal.getvalue().count("runs 0004") == (2 if is_terminal else 0)
        live.clear()
        assert terminal.getvalue().endswith("\r\x1b[2K" if is_terminal else "")
