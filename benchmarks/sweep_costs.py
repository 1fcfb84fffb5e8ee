"""What sweeps cost: `python -m benchmarks.sweep_costs asha|asha-sft|halving|overhead`.

asha: ASHA over a grid of 27 settings of recipes/accelerated.py next to the whole grid, and its winner next to the same settings
trained alone; its first rung lies in the warm-up. asha-sft: the same with recipes/sft.py, whose warm-up is over by then.
halving: the steps that the runs of 27 trials print, each trained step once. overhead: CPU seconds of a sweep and of its trials'
own processes, and of a trial until `main`.
"""

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.sweeps import ROOT, start
from toolkit.sweeps.journal import Job, Plan, read_journal
from toolkit.sweeps.outcomes import trial_folder
from toolkit.sweeps.results import best_trials, result_of, steps_used, trials_of
from toolkit.sweeps.storage import open_journal
from toolkit.sweeps.trials import commands_of
from toolkit.system.json_lines import read_lines

RECIPE = str(ROOT / "recipes" / "accelerated.py")
GRID = [
    "--search", "learning_rate=1e-4,2e-4,5e-4,1e-3,2e-3,5e-3,1e-2,2e-2,5e-2", "--search", "optim=adamw_torch,muon,sgd",
    "--strategy", "grid", "--use-cpu", "--logging-steps", "1", "--eval-strategy", "steps", "--max-steps", "162",
]  # fmt: skip
CLASSIFY = [RECIPE, *GRID, "--eval-steps", "6"], ["--rungs", "12,36,162", "--reduction", "4"]
SFT = [
    str(ROOT / "recipes" / "sft.py"), *GRID, "--eval-steps", "9", "--model", "nano-llama", "--warmup-steps", "6",
    "--max-train-examples", "700", "--max-eval-examples", "60", "--num-samples", "0",
], ["--rungs", "9,36,162", "--reduction", "3"]  # fmt: skip
SMALL = [
    "--use-cpu", "--max-train-examples", "96", "--max-eval-examples", "40", "--hidden-size", "16", "--num-hidden-layers", "1",
]  # fmt: skip
TIMED = """
import atexit, json, os, time
def _write(name, value):
    with open("cpu.jsonl", "a") as file:
        file.write(json.dumps({"pid": os.getpid(), name: value}) + "\\n")
atexit.register(lambda: _write("whole", time.process_time()))
"""


def swept(words: list[str], folder: Path) -> tuple[Plan, list[Job]]:
    """A sweep, to its end."""
    assert start(words, folder).wait(7200) == 0
    plan, jobs = read_journal(open_journal(folder))
    assert plan
    return plan, jobs


def steps_printed(folder: Path) -> int:
    """The lines of a step in the logs of all trials, to which each life of a run adds its own."""
    return sum(len(re.findall(r"^step \d+/\d+  .*\bloss", log.read_text(), re.M)) for log in folder.glob("trials/*/log.txt"))


def alone(plan: Plan, jobs: list[Job], folder: Path) -> str:
    """The best trial's weights next to those of the same settings trained alone, by the command that the sweep shows."""
    place, trial = folder.parent / "alone", best_trials(list(trials_of(jobs).values()), plan)[0]
    words = [sys.executable, "-m", *commands_of(plan, jobs, trial.number)[0], "--output-dir", str(place)]
    subprocess.run(words, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    files = [next((run / "model").rglob("model.safetensors")) for run in (trial_folder(folder, trial.number), place)]
    return f"the winner alone has {'the same bits' if files[0].read_bytes() == files[1].read_bytes() else 'OTHER bits'}"


def asha(place: Path, grid: list[str], rungs: list[str]) -> None:
    """By eval_loss; the grid in a shuffled order. Some 40 minutes of CPU."""
    plan, jobs = swept(grid, place / "grid" / "s")
    best = best_trials(list(trials_of(jobs).values()), plan)[0]
    whole, value = steps_used(jobs), result_of(best, plan).values[0]
    print(f"grid: {len(jobs)} trials, {whole} steps; best {value:.4f} with {dict(best.settings)}", flush=True)
    folder = place / "asha" / "s"
    plan, jobs = swept([*grid, "--prune", "asha", *rungs], folder)
    found = best_trials(list(trials_of(jobs).values()), plan)[0]
    loss, used, printed = result_of(found, plan).values[0], steps_used(jobs), steps_printed(folder)
    print(f"asha: {used} steps ({used / whole:.1%}), {printed} printed; best {loss:.4f} ({loss / value - 1:+.2%})", end=" ")
    print(f"with {dict(found.settings)}; {alone(plan, jobs, folder)}")


def halving(place: Path) -> None:
    """27 trials, a third of them from 2 steps to 6, 18 and 54."""
    words = [RECIPE, "--search", "learning_rate=log:1e-4..1e-1", "--trials", "27", "--prune", "halving", "--rungs", "2,6,18,54"]
    folder = place / "halving" / "s"
    plan, jobs = swept([*words, "--logging-steps", "1", *SMALL], folder)
    distinct = 27 * 2 + 9 * 4 + 3 * 12 + 1 * 36
    used, printed = steps_used(jobs), steps_printed(folder)
    print(f"halving: {len(jobs)} jobs, {used} steps, {printed} printed; distinct ones {distinct}; {alone(plan, jobs, folder)}")


def overhead(place: Path) -> None:
    """Five trials of the recipe's own length: some 20 minutes of CPU."""
    text = Path(RECIPE).read_text(encoding="utf-8").replace("import toolkit as tk\n", f"import toolkit as tk\n{TIMED}", 1)
    head = "def main(config: Config) -> tk.Summary:\n"
    (place / "timed.py").write_text(text.replace(head, f'{head}    _write("main", time.process_time())\n', 1), encoding="utf-8")
    os.chdir(place)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    _, jobs = swept(["timed.py", "--search", "learning_rate=log:1e-4..1e-2", "--trials", "5", "--use-cpu"], place / "o" / "s")
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    all_of_it = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = read_lines(Path("cpu.jsonl"))
    until_main = {line["pid"]: line["main"] for line in lines if "main" in line}  # the sweep too has imported the recipe
    trials = [line["whole"] for line in lines if "whole" in line and line["pid"] in until_main]
    seconds = sum(job.outcome.seconds for job in jobs if job.outcome)
    print(f"CPU: {all_of_it:.1f} s, of the trials' processes {sum(trials):.1f} s ({all_of_it / sum(trials) - 1:+.1%})")
    print(f"wall: {wall:.1f} s, of the trials {seconds:.1f} s ({wall / seconds - 1:+.1%})")
    print("CPU seconds of a trial until main: " + ", ".join(f"{each:.2f}" for each in until_main.values()), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        do = {
            "asha": lambda place: asha(place, *CLASSIFY), "asha-sft": lambda place: asha(place, *SFT), "halving": halving,
            "overhead": overhead,
        }  # fmt: skip
        do[sys.argv[1]](Path(temporary))
