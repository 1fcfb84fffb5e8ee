"""Sweeps that are killed, and strategies next to Optuna's own: `python -m benchmarks.sweeps kills|workers|strategies|pruners`.

kills: 20 sweeps of a real recipe, each killed two to four times at random moments (the sweep, its group, the process that forks
trials, a trial, all of them; the journal's last line cut), then continued; all jobs, values and weights next to an untouched
sweep's.
workers: 200 trials by two processes on one folder, and on one SQLite database, one of which is killed again and again.
strategies: the best value after equal trials, by the same seeds, on functions whose minimum is 0.
pruners: the same with trials of 27 steps that are stopped early, and the steps they took.
"""

import contextlib
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import toolkit as tk
from toolkit.sweeps.journal import JOURNAL, read_journal
from toolkit.sweeps.results import best_trials, trials_of
from toolkit.sweeps.storage import open_journal

ROOT = Path(__file__).parents[1]
REAL = [
    str(ROOT / "recipes" / "accelerated.py"),
    "--search", "learning_rate=log:1e-3..1e-1", "--search", "weight_decay=float:0..0.2",
    "--strategy", "tpe", "--trials", "6", "--parallel", "2", "--max-train-examples", "96", "--max-eval-examples", "40",
    "--use-cpu", "--hidden-size", "16", "--num-hidden-layers", "1", "--max-steps", "8",
    "--eval-strategy", "steps", "--eval-steps", "4", "--save-strategy", "steps", "--save-steps", "2",
]  # fmt: skip
FORMULA = """
import json
from dataclasses import dataclass
from pathlib import Path
from toolkit.command_line.recipe import run_recipe
from toolkit.config import OutputConfig, setting

@dataclass(frozen=True)
class Config(OutputConfig):
    rate: float = setting(1.0, "A rate.", least=0.0)

def main(config: Config) -> None:
    (Path(config.output_dir) / "summary.json").write_text(json.dumps({"eval_loss": (config.rate - 0.25) ** 2}))

if __name__ == "__main__":
    run_recipe(main)
"""


def start(words: list[str], folder: Path, database: Path | None = None) -> subprocess.Popen[bytes]:
    """A sweep in a process group of its own; each has a parent folder of its own, so that none takes another's results."""
    more = ["--storage", f"sqlite:///{database}"] if database else []
    folder.parent.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "toolkit", "sweep", *words, "--sweep-dir", str(folder), *more], start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def came_to(folder: Path) -> list[Any]:
    """All jobs with values and curves, the numbers of those that ended, each once, the best trial, and the weights."""
    journal = open_journal(folder)
    plan, jobs = read_journal(journal)
    assert plan
    rows = [(job.trial, dict(job.settings), job.until, job.outcome and (job.outcome.values, job.outcome.curve)) for job in jobs]
    ends = sorted(record["number"] for record in journal.records(0) if record["kind"] == "end")
    weights = [next(model.rglob("model.safetensors")).read_bytes() for model in sorted(folder.glob("trials/*/model"))]
    return [rows, ends, best_trials(list(trials_of(jobs).values()), plan)[0].number, weights]


def kill(process: subprocess.Popen[bytes], way: str, draws: random.Random) -> None:
    """One of the ways; where only a part is killed, the sweep may go on by itself."""
    below = psutil.Process(process.pid).children(recursive=True)
    pids = {"sweep": [process.pid], "all": [process.pid, *(each.pid for each in below)]}.get(way)
    if pids is None and way in ("zygote", "trial"):
        pids = [below[0].pid if way == "zygote" else draws.choice(below[1:] or below).pid] if below else []
    for pid in pids or []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if pids is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(300)


def kills(place: Path, trials: int = 20) -> None:
    """So many sweeps."""
    began = time.monotonic()
    assert start(REAL, place / "whole" / "s").wait(600) == 0
    took, whole, same = time.monotonic() - began, came_to(place / "whole" / "s"), 0
    for number in range(trials):
        draws, ways, folder = random.Random(number), [], place / str(number) / "s"
        database = place / f"{number}.db" if number % 4 == 3 else None
        for _ in range(draws.randint(2, 4)):
            process = start(REAL, folder, database)
            try:
                process.wait(draws.uniform(1.5, 0.55 * took))
                break
            except subprocess.TimeoutExpired:
                ways.append(draws.choice(["group", "sweep", "zygote", "trial", "torn", "all"]))
                kill(process, ways[-1], draws)
            if ways[-1] == "torn" and (folder / JOURNAL).exists():
                content = (folder / JOURNAL).read_bytes()
                os.truncate(folder / JOURNAL, draws.randint(content[:-1].rfind(b"\n") + 1, len(content)))
        assert start(REAL, folder, database).wait(600) == 0
        is_same = came_to(folder) == whole
        same += is_same
        print(f"{number:2}  {' '.join(ways) or 'not killed':40} {'same' if is_same else 'OTHER'}", flush=True)
    print(f"{same} of {trials} ended with the same trials, values and weights")


def workers(place: Path, trials: int = 200) -> None:
    """Two processes, two trials at a time in each."""
    (place / "formula.py").write_text(FORMULA)
    words = [str(place / "formula.py"), "--search", "rate=float:0..1", "--trials", str(trials), "--parallel", "4"]
    assert start(words, place / "whole" / "s").wait(1500) == 0
    whole = came_to(place / "whole" / "s")
    for kind in ("folder", "database"):
        draws, killed, folder = random.Random(kind), 0, place / kind / "s"
        database = place / "s.db" if kind == "database" else None
        running = [start([*words, "--slots", "2"], folder, database) for _ in range(2)]
        while running := [each for each in running if each.poll() is None]:
            time.sleep(draws.uniform(3, 12))
            victim = draws.choice(running)
            if killed < 20 and victim.poll() is None:
                kill(victim, draws.choice(["group", "sweep"]), draws)
                killed += 1
                running.append(start([*words, "--slots", "2"], folder, database))
        print(f"{trials} trials on one {kind}, {killed} kills: {'same' if came_to(folder) == whole else 'OTHER'}", flush=True)


def branin(point: dict[str, float]) -> float:
    """Less its minimum, on the unit square."""
    x, y = point["x"] * 15 - 5, point["y"] * 15
    bowl = (y - 5.1 / (4 * math.pi**2) * x * x + 5 / math.pi * x - 6) ** 2
    return bowl + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10 - 0.397887


def rosenbrock(point: dict[str, float]) -> float:
    """On the unit square."""
    x, y = point["x"] * 4 - 2, point["y"] * 4 - 2
    return (1 - x) ** 2 + 100 * (y - x * x) ** 2


def curve(point: dict[str, float], step: int) -> float:
    """Branin's value as a run of 27 steps would come to it: from above, at a rate of the point's own, and there at the end."""
    rate = 2 + 6 * point["x"]
    return branin(point) + 100 * (math.exp(-step / rate) - math.exp(-27 / rate))


def pruners(place: Path) -> None:
    """The median of the best values at step 27, and the mean steps of a sweep, each step of a trial counted once."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kinds: dict[str, Callable[[], Any]] = {
        "none": optuna.pruners.NopPruner, "median": lambda: optuna.pruners.MedianPruner(5, 4),  # not at the first evaluation
        "asha": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=3, reduction_factor=3),
        "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=3, max_resource=27, reduction_factor=3),
    }  # fmt: skip
    space, rungs, seeds = {"x": "float:0..1", "y": "float:0..1"}, [3, 9, 27], 40

    def trained(settings: dict[str, float], trial: tk.FunctionTrial) -> float:
        for step in rungs:
            if step <= (trial.until or 27):
                trial.report(step, curve(settings, step))
        return curve(settings, trial.until or 27)

    for name in ("none", "median", "halving", "asha", "hyperband"):
        ours, theirs, steps, their_steps, count = [], [], 0, 0, 27
        for seed in range(seeds):
            how = {} if name in ("none", "median") else {"rungs": rungs}
            trials = tk.sweep(trained, space, trials=27, seed=seed, prune=name, **how)
            count = len(trials)  # of Hyperband fewer: they follow from its rungs
            ours.append(trials[0].outcome.values["value"])
            steps += sum(trial.outcome.step for trial in trials)
            if name not in kinds:
                continue
            taken = []

            def objective(trial: Any, taken: list[int] = taken) -> float:
                point = {axis: trial.suggest_float(axis, 0, 1) for axis in "xy"}
                for step in rungs:
                    taken.append(step if step == 3 else step - step // 3)
                    trial.report(curve(point, step), step)
                    if trial.should_prune():
                        raise optuna.TrialPruned
                return curve(point, 27)

            study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed), pruner=kinds[name](), study_name="s")
            study.optimize(objective, n_trials=count)
            theirs.append(study.best_value)
            their_steps += sum(taken)
        peer = f"  Optuna {statistics.median(theirs):.2f} in {their_steps / seeds:.0f}" if theirs else ""
        mine = f"best {statistics.median(ours):.2f} in {steps / seeds:.0f} steps"
        print(f"{name:9}  {count} trials, {seeds} seeds: {mine}{peer}", flush=True)


def strategies(place: Path) -> None:
    """The median of the best values over seeds."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    samplers: dict[str, Callable[..., Any]] = {
        "random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler, "cmaes": optuna.samplers.CmaEsSampler,
        "gp": optuna.samplers.GPSampler,
    }  # fmt: skip
    for function in (branin, rosenbrock):
        for name, sampler in samplers.items():
            trials, seeds = (20, 5) if name == "gp" else (30, 40)
            ours, theirs = [], []
            for seed in range(seeds):
                space = {"x": "float:0..1", "y": "float:0..1"}
                found = tk.sweep(function, space, trials=trials, strategy=name, seed=seed)[0].outcome
                ours.append(found.values["value"] if found else math.inf)
                study = optuna.create_study(sampler=sampler(seed=seed))
                study.optimize(lambda trial, f=function: f({x: trial.suggest_float(x, 0, 1) for x in "xy"}), n_trials=trials)
                theirs.append(study.best_value)
            both = f"{statistics.median(ours):.4f}  Optuna {statistics.median(theirs):.4f}"
            print(f"{function.__name__:10}  {name:6}  {trials} trials, {seeds} seeds: median of the best {both}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        {"kills": kills, "workers": workers, "strategies": strategies, "pruners": pruners}[sys.argv[1]](Path(temporary))
