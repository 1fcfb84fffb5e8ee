"""How a trial of a recipe ended, from what its process left behind."""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.distributed.launch import REFUSED
from toolkit.sweeps import outcomes, trials
from toolkit.sweeps.journal import Job, Objective, Outcome, Plan
from toolkit.sweeps.outcomes import curve_of, read_outcome, trial_folder
from toolkit.sweeps.trials import Recipe
from toolkit.system import json_lines

PLAN = Plan("r.py", "digest", [], ["rate=float:0..1"], "random", 0, 10, [Objective("eval_loss")])


class Ended:
    """A process that has ended."""

    pid, returncode = 1 << 30, 1  # no process has this number

    def poll(self) -> int:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode

    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


class Printing(Recipe):
    """A recipe whose process prints and fails."""

    text = ""

    def spawn(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> Ended:
        with open(log, "a") as file:
            file.write(self.text)
        return Ended()


def outcome(folder: Path, text: str) -> Outcome | None:
    recipe = type("Now", (Printing,), {"text": text})(folder, PLAN, True, [{}])
    return recipe.start(Job(0, 0, {"rate": 0.5}), 0, None).poll()


@pytest.mark.parametrize("before", ["OSError: [Errno 28] No space left on device\n", "torch.OutOfMemoryError: CUDA out of memory.\n"])
def test_an_earlier_attempt_does_not_say_why_this_one_failed(before: str, tmp_path: Path) -> None:
    """A full disk, whose trial goes on when there is room. Fails when: _printed in trials.py reads the log from its beginning."""
    log = trial_folder(tmp_path, 0) / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text(before)
    found = outcome(tmp_path, "ValueError: the rate is bad\n")
    assert found is not None
    assert found.reason == "ValueError: the rate is bad"


def test_a_micro_batch_that_was_halved_is_no_reason(tmp_path: Path) -> None:
    """After which the run went on. Fails when: _is_out_of_memory in trials.py takes every line with these words."""
    halved = "out of memory with 16 examples in a micro-batch: continuing with 8, and 2 of them a step\n"
    found = outcome(tmp_path, halved + "ValueError: the rate is bad\n")
    assert found is not None
    assert found.reason == "ValueError: the rate is bad"
    found = outcome(tmp_path, halved + "torch.OutOfMemoryError: CUDA out of memory.\n")
    assert found is not None
    assert found.reason.startswith("out of memory: torch")


@pytest.mark.parametrize(
    ("summary", "value"),
    [('{"eval_loss": 0.5}', 0.5), ('{"eval_loss": 1' + "0" * 400 + "}", None), ('{"eval_loss": "low"}', None), ('{"eval_loss": [0.5]}', None),
     ('{"eval_loss": 0.5, "best": {"name": "eval_loss"}}', None), ('{"eval_loss": 0.5, "best": {"name": "eval_loss", "value": "low"}}', None)],
)  # fmt: skip
def test_a_metric_that_is_no_number_fails_the_trial_alone(summary: str, value: float | None, tmp_path: Path) -> None:
    """In the summary of a recipe of one's own, and in its metrics. Fails when: _number in outcomes.py lets an OverflowError through."""
    (tmp_path / "summary.json").write_text(summary)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "other": 1' + "0" * 400 + "}\n")
    found = read_outcome(tmp_path, PLAN)
    assert found.values.get("eval_loss") == value
    assert found.reason == ("" if value else "eval_loss is not finite")
    assert curve_of(tmp_path, "other") == []


def test_the_evaluation_before_training_is_no_trials_best(tmp_path: Path) -> None:
    """At a rung, too, where trials that got worse would be as good as one another. Fails when: `_curve` takes step 0."""
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "eval_loss": {loss}}}\n' for step, loss in ((0, 1.0), (2, 3.0), (4, 2.0))))
    assert read_outcome(tmp_path, PLAN, until=2).values == {"eval_loss": 3.0}
    assert read_outcome(tmp_path, PLAN).values == {"eval_loss": 2.0}


@pytest.mark.parametrize(("logged", "saved", "step"), [(0, 0, 0), (30, 20, 30), (20, 25, 25)])
def test_a_killed_trial_has_the_steps_that_its_files_know_of(logged: int, saved: int, step: int, tmp_path: Path) -> None:
    """It writes no summary; a budget of steps counts them. Fails when: poll in trials.py takes the summary's alone."""
    run = trial_folder(tmp_path, 0)
    (run / f"checkpoints/step-{saved}").mkdir(parents=True)
    (run / "metrics.jsonl").write_text(f'{{"step": {logged}, "loss": 1.0}}\n')
    found = outcome(tmp_path, "ValueError: the rate is bad\n")
    assert found is not None
    assert found.step == step


def test_a_full_disk_fails_no_trial(tmp_path: Path) -> None:
    """Fails when: poll in trials.py does not ask _is_out_of_space."""
    with pytest.raises(OSError, match="No space left"):
        outcome(tmp_path, "OSError: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, REFUSED)])
def test_a_signal_while_a_trial_starts_fails_no_trial(number: int, code: int, tmp_path: Path) -> None:
    """Ctrl-C in the middle of an import ends Python with code 1; a refusal is one in any case.

    Fails when: poll in trials.py takes every other code after a signal for a failure.
    """
    recipe = type("Slow", (Printing,), {"text": "KeyboardInterrupt\n"})(tmp_path, PLAN, True, [{}])
    trial = recipe.start(Job(0, 0, {"rate": 0.5}), 0, None)
    trial._process.returncode = code  # type: ignore[union-attr, misc]
    trial.interrupt(number)
    found = trial.poll()
    assert (found and found.code, trial.interrupted()) == ((REFUSED, None) if code == REFUSED else (None, code))


HANGS = """import faulthandler, signal, sys, threading
faulthandler.enable()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] == "deaf": signal.signal(signal.SIGABRT, signal.SIG_IGN)
print("begun", flush=True)
def waits_for_ever(): threading.Event().wait()
waits_for_ever()"""
WRITES = """import pathlib, sys, time
for step in range(8):
    time.sleep(0.2)
    with open(sys.argv[1] + "/metrics.jsonl", "a") as file: file.write(f'{{"step": {step}, "eval_loss": 1.0}}\\n')"""


class Running(Recipe):
    """A recipe whose trials run a program of one line."""

    program: Sequence[str] = ()

    def spawn(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with open(log, "ab") as file:
            return subprocess.Popen([sys.executable, "-c", *self.program], stdout=file, stderr=file, start_new_session=True)


def watched(folder: Path, *program: str) -> Outcome:
    recipe = type("Now", (Running,), {"program": program})(folder, replace(PLAN, hang_minutes=0.01), True, [{}])
    trial = recipe.start(Job(0, 0, {"rate": 0.5}), 0, None)
    until = time.monotonic() + 30
    try:
        while (found := trial.poll()) is None and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        trial.interrupt(signal.SIGKILL)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["listening", "deaf"])
def test_a_trial_that_hangs_is_killed_and_fails_with_the_place(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose code is in a deadlock and hears no SIGTERM, nor perhaps SIGABRT. Each attempt goes on where the one before was.

    Fails when: _end_a_hang in trials.py sends no SIGABRT, no SIGKILL after it, or is not called.
    """
    monkeypatch.setattr(trials, "_LAST_WORDS_SECONDS", 0.2)
    found = watched(tmp_path, HANGS, kind)
    log = (trial_folder(tmp_path, 0) / "log.txt").read_text()
    assert log.count("begun") == 3
    assert log.count("waits_for_ever") == (3 if kind == "listening" else 0)
    assert found.code == 128 + (signal.SIGABRT if kind == "listening" else signal.SIGKILL)
    assert "0.01 minutes, 3 times" in found.reason


def test_a_trial_that_writes_does_not_hang(tmp_path: Path) -> None:
    """It prints nothing, and takes longer than a silence may. Fails when: _end_a_hang looks at the log alone."""
    assert watched(tmp_path, WRITES, str(trial_folder(tmp_path, 0))).values == {"eval_loss": 1.0}


def test_the_log_of_a_run_is_read_again_only_when_it_has_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: each look reads all of it, what was found is kept for good, or a caller's list is the one that is kept."""
    reads: list[Path] = []
    monkeypatch.setattr(outcomes, "read_lines", lambda path: (reads.append(path), json_lines.read_lines(path))[1])
    assert outcomes.progress_of(tmp_path, "loss") == (0, [])
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1, "loss": 2.0}\n')
    for _ in range(3):
        step, curve = outcomes.progress_of(tmp_path, "loss")
        assert (step, curve) == (1, [(1, 2.0)])
        curve.clear()
    assert len(reads) == 1
    log.write_text(log.read_text() + '{"step": 2, "loss": 1.0}\n')
    assert outcomes.progress_of(tmp_path, "loss") == (2, [(1, 2.0), (2, 1.0)])
