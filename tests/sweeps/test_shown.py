"""What a sweep shows while it runs, on a terminal."""

import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit.sweeps.journal import Job, Objective, Outcome, Plan
from toolkit.sweeps.outcomes import trial_folder
from toolkit.sweeps.shown import Live, seconds_left, status_lines

PLAN = Plan("r.py", "digest", [], ["rate=float:0..1"], "random", 0, 10, [Objective("eval_loss")], parallel=2)


def job(number: int, value: float | None = None, seconds: float = 90.0, **more: object) -> Job:
    outcome = None if value is None else Outcome({"eval_loss": value}, seconds=seconds, step=10, **more)  # type: ignore[arg-type]
    return Job(number, number, {"rate": 0.5}, outcome=outcome)


def logs(folder: Path, trial: int, steps: int | None, *lines: dict[str, float]) -> None:
    """The files of a run of that many steps."""
    run = trial_folder(folder, trial)
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if steps:
        (run / "run.json").write_text(json.dumps({"layout": {"steps": steps}}))


def test_the_live_line_has_what_runs_the_best_and_the_time_left(tmp_path: Path) -> None:
    """Two of ten trials run, one of them with evaluations and half done; three have ended, one of which was computed before and
    took no time: the five to come take 90 s each, the two that run 45 s and 90 s, two at a time.

    Fails when: seconds_left in progress.py counts the copied trial's time, a running trial as one to come, or not the slots; or
    reached_by takes the first evaluation.
    """
    logs(tmp_path, 3, 10, {"step": 2, "eval_loss": 1 / 2}, {"step": 4, "eval_loss": 1 / 4}, {"step": 5, "loss": 1.0})
    jobs = [job(0, 0.5), job(1, 0.125), job(2, 0.5, seconds=0.0, same_as=0), job(3), job(4)]
    shown = Live(tmp_path, PLAN, 2).line(jobs[3:], jobs)
    assert shown == "runs 0003 0.2500 at 5/10, 0004 | best eval_loss 0.1250 (0001) | 3 ended of 10, about 5 min left"
    assert seconds_left(PLAN, jobs, tmp_path, 2) == (5 * 90 + 45 + 90) / 2
    assert Live(tmp_path, PLAN, 2).line(jobs[4:], jobs[3:]) == "runs 0004 | no value yet | 0 ended of 10"


def test_the_time_left_ends_with_the_trials(tmp_path: Path) -> None:
    """The last trial of ten at nine tenths, alone in two slots: 9 s of 90; as many hours or steps as a budget has, where that is less.

    Fails when: seconds_left in progress.py shares one trial out to two slots, or knows no budget.
    """
    jobs = [*(job(number, 0.5) for number in range(9)), job(9)]
    logs(tmp_path, 9, 10, {"step": 9, "loss": 1.0})
    assert seconds_left(PLAN, jobs, tmp_path, 2) == pytest.approx(9)
    few = jobs[:2]
    assert seconds_left(PLAN, few, tmp_path, 1) == 8 * 90
    assert seconds_left(replace(PLAN, budget_steps=40), few, tmp_path, 1) == 2 * 90  # 20 steps of 9 s each are left
    assert seconds_left(replace(PLAN, budget_hours=0.05), few, tmp_path, 1) == 0.05 * 3600 * 2 - 180
    assert seconds_left(replace(PLAN, budget_steps=10), few, tmp_path, 1) == 0


def test_with_rungs_the_time_left_is_that_of_the_steps(tmp_path: Path) -> None:
    """Nine trials to step 10, three to 30, one to 90: 90 + 60 + 60 steps. Eight have taken 10 steps in 90 s each, the ninth 5.

    Fails when: planned_steps in schedule.py counts each rung from step 0, or seconds_left the steps of the job that runs as to come.
    """
    plan = replace(PLAN, trials=9, prune="halving", rungs=[10, 30, 90])
    jobs = [*(job(number, 0.5) for number in range(8)), job(8)]
    for each in jobs:
        each.until = 10
    logs(tmp_path, 8, 90, {"step": 5, "loss": 1.0})
    assert seconds_left(plan, jobs, tmp_path, 1) == pytest.approx((5 + 60 + 60) * 9)
    jobs[8].outcome = jobs[0].outcome
    jobs.append(Job(9, 3, {"rate": 0.5}, until=30, told=9))
    logs(tmp_path, 3, 90, {"step": 25, "eval_loss": 0.5})
    assert seconds_left(plan, jobs, tmp_path, 1) == pytest.approx((5 + 40 + 60) * 9)
    line = next(line for line in status_lines(plan, jobs, tmp_path, lambda worker: True) if line.startswith("trial 0003"))
    assert re.search(r"\(goes on, .*\b25 of 30, eval_loss 0\.5000\)", line)


def test_status_has_where_a_trial_is_and_the_time_left_while_a_worker_lives(tmp_path: Path) -> None:
    """Fails when: status_lines in shown.py leaves out what a trial has done, or the time; or says it of a sweep that stands still."""
    jobs = [job(0, 0.5), job(1)]
    logs(tmp_path, 1, 10, {"step": 5, "eval_loss": 0.25})
    for is_alive in (True, False):
        *_, trial, last = status_lines(PLAN, jobs, tmp_path, lambda worker, alive=is_alive: alive)  # type: ignore[misc]
        assert re.search(r"not ended, .*\b5 of 10, eval_loss 0\.2500", trial)
        assert re.match(r"1 of 10 trials .*\b1 with a value; 10 steps ", last)
        assert re.findall(r"\d+ min left", last) == (["13 min left"] if is_alive else [])


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
