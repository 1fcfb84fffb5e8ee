"""SIGTERM and SIGINT at random moments: the step is finished, saved, exit code 75; a deadline is kept."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from toolkit.training.signals import StopSignal, signals_noted

BERT = ["--model", "tiny-bert", "--dropout", "0.1", "--save-strategy", "no"]


def signaled(tiny, *flags: str, number: int, after: float, again: float | None = None, **more):
    """A run that gets a signal N seconds after its first step, perhaps once more; and the seconds it took to end."""
    signaled: list[float] = []
    metrics = tiny.folder / "out/metrics.jsonl"

    def send(pid: int) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size) and Path(f"/proc/{pid}").exists():
            time.sleep(0.002)
        time.sleep(after)
        os.kill(pid, number)
        signaled.append(time.monotonic())
        if again is not None:
            time.sleep(again)
            os.kill(pid, number)

    run = tiny(*flags, while_running=send, **more)
    return run, time.monotonic() - signaled[0]


@pytest.mark.fast(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_a_random_moment_ends_the_run_exactly(tiny, tally, chance, count, resumed_from, number: int) -> None:
    """Fails when: the signal interrupts a step, the save is left out, or the code is that of a failure."""
    whole, ill = tiny.reference(*BERT), {"step_seconds": 0.05}
    line, seconds = tally("F9", f"{signal.Signals(number).name} at a random moment, resumed"), []
    for _ in range(count(2, 30)):
        tiny.fresh()
        after = chance.uniform(0, 0.9)
        stopped, took = signaled(tiny, *BERT, number=number, after=after, ill=ill)
        seconds.append(took)
        with line.trial(f"after {after:.3f} s"):
            assert stopped.code == 75, stopped.out
            last_step = stopped.curve[-1][0]
            assert json.loads((stopped.folder / "summary.json").read_text())["status"] == "interrupted"
            assert "--resume" in stopped.out
            resumed = tiny(*BERT, "--resume")
            assert resumed.code == 0, resumed.out
            assert resumed_from(resumed) == last_step, "a step was lost"
            assert resumed.outcome == whole.outcome
    line.measured = f"{sorted(seconds)[len(seconds) // 2]:.2f} s from the signal to the end (median), {max(seconds):.2f} s at most"
    line.check()


@pytest.mark.fast(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_run_at_once(tiny, tally, count, number: int) -> None:
    """In a step of three seconds. Fails when: the first handler stays."""
    line = tally("F9", f"second {signal.Signals(number).name} during a step of 3 s: leaves at once")
    for _ in range(count(1, 5)):
        tiny.fresh()
        # a second one that comes before the first is handled is one with it, to the system
        ended, took = signaled(tiny, *BERT, number=number, after=0.3, again=1.0, ill={"step_seconds": 3})
        with line.trial():
            assert ended.code in (-number, 130), ended.out
            assert took < 2.5, took
    line.check()


def test_a_second_signal_ends_a_run_that_was_begun_with_sigint_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script's `&` begins one; but not the first one's echo, which Slurm and a launcher make of one signal.

    Fails when: what was there before the first signal is put back, or two signals within a moment leave at once.
    """
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stop = StopSignal()
        with signals_noted(stop):
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.number == signal.SIGINT
            os.kill(os.getpid(), signal.SIGTERM)
            assert not raised
            monkeypatch.setattr("toolkit.training.signals.ECHO_SECONDS", 0.0)
            os.kill(os.getpid(), signal.SIGTERM)
            assert raised == [signal.SIGTERM]
        raised.clear()
        monkeypatch.undo()
        monkeypatch.setattr(signal, "raise_signal", raised.append)
        with signals_noted(StopSignal()):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)  # pressed twice
            assert raised == [signal.SIGINT]
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


SLOW = {"a step": {"step_seconds": 20}, "an evaluation": {"eval_seconds": 20}}


@pytest.mark.fast(1)
@pytest.mark.parametrize("what", SLOW)
def test_a_deadline_is_kept_when_something_is_slow(tiny, tally, chance, count, what: str) -> None:
    """`--stop-deadline 3` while something takes 20 s. After an evaluation nothing is lost, after a step that step.

    Fails when: the alarm is not set, or an evaluation that was cut off is not made up for.
    """
    flags = ["--save-steps", "4", "--stop-deadline", "3", "--eval-strategy", "steps", "--eval-steps", "6"]
    whole, line = tiny.reference(*flags), tally("F9", f"--stop-deadline 3 during {what} of 20 s")
    for _ in range(count(1, 5)):
        folder = tiny.fresh()
        signaled: list[float] = []

        def send(pid: int, folder: Path = folder, signaled: list[float] = signaled) -> None:
            metrics = folder / "metrics.jsonl"
            steps = 6 if what == "an evaluation" else 1
            while not (metrics.exists() and metrics.read_text().count("\n") >= steps) and Path(f"/proc/{pid}").exists():
                time.sleep(0.002)
                if what == "a step" and (folder / "run.json").exists():
                    break
            time.sleep(0.5)
            os.kill(pid, signal.SIGTERM)
            signaled.append(time.monotonic())

        stopped = tiny(*flags, while_running=send, ill=SLOW[what])
        took = time.monotonic() - signaled[0]
        with line.trial():
            assert stopped.code == 75, stopped.out
            assert took < 8, took  # of 20 s
            resumed = tiny(*flags, "--resume")
            assert resumed.code == 0, resumed.out
            assert resumed.outcome == whole.outcome
            evaluated = [[event["step"] for event in run.metrics if "eval_loss" in event] for run in (whole, resumed)]
            assert evaluated[0] == evaluated[1]
    line.check()


@pytest.mark.slow
def test_a_deadline_is_kept_when_the_signal_comes_during_a_save(tiny, tally) -> None:
    """A save of 1.5 s, then steps of 20 s. Fails when: an alarm that came during the save is not set again."""
    line = tally("F9", "--stop-deadline 3 when the alarm comes during a save, before steps of 20 s")
    folder = tiny.fresh()

    def send(pid: int) -> None:
        while not (folder / "metrics.jsonl").exists() and Path(f"/proc/{pid}").exists():
            time.sleep(0.002)
        time.sleep(0.3)
        os.kill(pid, signal.SIGTERM)
        signaled.append(time.monotonic())

    signaled: list[float] = []
    flags = ["--save-steps", "1", "--stop-deadline", "3"]
    ill = {"step_seconds": 20, "fast_steps": 1}
    stopped = tiny(*flags, while_running=send, plan={"slow_save": 2.5}, ill=ill, timeout=60)
    took = time.monotonic() - signaled[0]
    with line.trial():
        assert stopped.code == 75, stopped.out
        assert took < 10, took  # of 20 s: the save can't be cut short; the step after it can
    line.check()
