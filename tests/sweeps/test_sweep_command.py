"""toolkit sweep as a user types it, with a recipe that computes a formula in place of training."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.sweeps.journal import JOURNAL, Job, JournalFile, read_journal

RECIPE = '''
"""A recipe without a model."""
import json, time
from dataclasses import dataclass
from pathlib import Path
from toolkit.cli.recipe import run_recipe
from toolkit.config import OutputConfig, Refusal, setting

@dataclass(frozen=True)
class Config(OutputConfig):
    rate: float = setting(1.0, "A rate.", least=0.0)
    wait: float = setting(0.0, "Seconds.")
    kind: str = setting("a", "A kind.", choices=("a", "b", "bad"))

def main(config: Config) -> None:
    folder = Path(config.output_dir)
    (folder / "config.yaml").write_text("rate: 1")
    with open(folder.parent / "started.txt", "a") as file:
        file.write(folder.name + "\\n")
    time.sleep(config.wait)
    if config.kind == "bad":
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
    (folder / "summary.json").write_text(json.dumps({"eval_loss": (config.rate - 0.25) ** 2}))

if __name__ == "__main__":
    run_recipe(main)
'''


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "formula.py"
    path.write_text(RECIPE)
    return path


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "toolkit", "sweep", *map(str, words)]


def jobs_of(folder: Path) -> list[Job]:
    return read_journal(JournalFile(folder))[1]


def value_of(job: Job) -> float | None:
    return job.outcome.values.get("eval_loss") if job.outcome else None


def sweep(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=120, cwd=cwd)


def test_trials_are_runs_and_the_best_is_a_command(recipe: Path, tmp_path: Path) -> None:
    """The best against the formula of the recipe; a failed trial has its reason, and ends nothing.

    Fails when: loop.py takes the largest value where less is better.
    """
    done = sweep("formula.py", "--search", "rate=0,0.2,1", "--search", "kind=a,bad", "--strategy", "grid", "--sweep-dir", "s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "toolkit train formula.py --rate 0.2 --kind a"
    trials = jobs_of(tmp_path / "s")
    assert [value_of(trials[number]) for number in (0, 2, 4)] == pytest.approx([0.0625, 0.0025, 0.5625])
    reasons = [trials[number].outcome.reason for number in (1, 3, 5)]  # type: ignore[union-attr]
    assert all(reason.startswith("out of memory: ") for reason in reasons)
    assert sweep("best", "s", cwd=tmp_path).stdout.splitlines()[-1] == "toolkit train formula.py --rate 0.2 --kind a"
    assert "6 of 6 trials have ended, 3 with a value" in sweep("status", "s", cwd=tmp_path).stdout
    before = (tmp_path / "s" / "trials" / "started.txt").read_text()
    assert sweep("continue", "s", cwd=tmp_path).returncode == 0
    assert (tmp_path / "s" / "trials" / "started.txt").read_text() == before


@pytest.mark.parametrize(
    ("words", "says"),
    [([], "nothing is searched"), (["--search", "rat=1,2"], "rate"), (["--search", "rate=-1,2"], "--rate"), (["--search", "kind=a,c"], "--kind"),
     (["--search", "rate=1,2", "--rate", "1"], "searched and given"), (["--search", "rate=1,2", "--output-dir", "x"], "--sweep-dir"),
     (["--search", "rate=float:0..1", "--strategy", "grid"], "is a range"), (["--search", "rate=1,2", "--strategy", "best"], "--strategy")],
)  # fmt: skip
@pytest.mark.fast(2)
def test_what_cannot_be_meant_is_refused_before_a_trial(words: list[str], says: str, recipe: Path, tmp_path: Path) -> None:
    """Fails when: _check_on_recipe in cli/sweep.py tries the first end of a range only."""
    done = sweep("formula.py", *words, "--sweep-dir", "s", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_sweep_killed_again_and_again_ends_with_the_same_trials(recipe: Path, tmp_path: Path) -> None:
    """SIGKILL to the sweep at six moments, then continued: equal settings and values, every trial ended once.

    Fails when: loop.py runs a trial whose end is in the journal.
    """
    words = ["formula.py", "--search", "rate=float:0..1", "--trials", "6", "--wait", "0.4", "--sweep-dir"]
    assert sweep(*words, "whole", cwd=tmp_path).returncode == 0
    for moment in range(6):
        running = subprocess.Popen(command(*words, "cut"), cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL)
        time.sleep(1.0 + 0.35 * moment)
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert sweep(*words, "cut", cwd=tmp_path).returncode == 0
    found = [[(job.trial, job.settings, value_of(job)) for job in jobs_of(tmp_path / each)] for each in ("whole", "cut")]
    assert found[0] == found[1]
    lines = (tmp_path / "cut" / JOURNAL).read_text().splitlines()
    assert sum('"kind": "end"' in line for line in lines) == 6
