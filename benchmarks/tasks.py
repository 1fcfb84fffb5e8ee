"""Everyday tasks next to transformers' Trainer and sentence-transformers: CPU seconds a step, memory, the loss at the start.

    python benchmarks/tasks.py --pairs 5
    python benchmarks/tasks.py --tasks masked_lm --flags --pairs 1
    python benchmarks/tasks.py --tasks masked_lm --search --pairs 1

Ours is the recipe's own `main`, with AdamW in float32 as the peers have it and with batches of as many examples. The peers do
what transformers' example scripts do (Trainer, Seq2SeqTrainer) and what sentence-transformers' documentation does, with their
defaults and with the flags that save work; --flags measures what each brings, --search which to take. Both begin with the same
weights, from a file, and read the same rows (`benchmarks/task_rows.py`). That the work is the same is checked first: the loss
of a few rows at the start, without dropout. Timed are the steps after the warm-up, in CPU seconds with all that lies between
them (collating, logging). Memory is the most that the process held until its last step, libraries included.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flag_search import Flags, best_flags, named, settings_of
from side_by_side import ITS_FLOOR, OURS
from task_job import BATCHES, CHECKED_ROWS, MAX_LENGTHS, ROWS_A_STEP, Job, StepWatch
from task_peers import PEERS
from task_rows import write_inputs

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
DEFAULTS, BEST = "peer, its defaults", "peer, best flags"
STEPS = {
    "token_classification": 12, "question_answering": 8, "seq2seq": 6, "masked_lm": 6, "embedding": 4, "reranker": 4,
    "multiple_choice": 6, "classification": 12, "classification_of_documents": 6,
}  # fmt: skip
OUR_SETTINGS: dict[str, dict[str, Any]] = {
    "question_answering": {"doc_stride": Job.doc_stride},
    "seq2seq": {"max_target_length": Job.max_target_length},
    "masked_lm": {"mlm_probability": Job.mlm_probability},
    "embedding": {"per_device_train_batch_size": 16, "global_batch_size": BATCHES["embedding"], "temperature": 0.05},
}
OURS_IN_A_CHECK: dict[str, dict[str, Any]] = {
    "masked_lm": {"packing": False, "mlm_probability": 1 - 1e-9, "mask_replace_prob": 1.0, "random_replace_prob": 0.0},
}
RECIPE_OF = {"classification": "accelerated", "classification_of_documents": "accelerated"}  # where it has another name
ACCUMULATED = {
    "one example at a time": {"per_device_train_batch_size": 1}, "four examples at a time": {"per_device_train_batch_size": 4},
}  # fmt: skip
BY_LENGTH = {"train_sampling_strategy": "group_by_length"}
EVERYWHERE: dict[str, dict[str, Any]] = {
    "eager attention": {"attn_implementation": "eager"}, "two loader processes": {"dataloader_num_workers": 2},
}  # fmt: skip
FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "token_classification": {"lengths grouped": BY_LENGTH, **ACCUMULATED},
    "question_answering": {
        "padded to the longest": {"pad_to_max_length": False}, "lengths grouped": BY_LENGTH,
        **ACCUMULATED,
    },
    "seq2seq": {"lengths grouped": BY_LENGTH, **ACCUMULATED},
    "masked_lm": {"line by line": {"line_by_line": True}, "lengths grouped": BY_LENGTH, **ACCUMULATED},
    "embedding": {f"mini-batches of {size}": {"mini_batch_size": size} for size in (8, 16, 64)},
    "reranker": {f"mini-batches of {size}": {"mini_batch_size": size} for size in (4, 16, 64)},
    "multiple_choice": ACCUMULATED,
    "classification": {"lengths grouped": BY_LENGTH, **ACCUMULATED},
    "classification_of_documents": {"lengths grouped": BY_LENGTH, **ACCUMULATED},
}
GROUPED_IN_FOURS = "lengths grouped + four examples at a time"
HELPFUL = {  # as --search found them
    "token_classification": f"{GROUPED_IN_FOURS} + eager attention",
    "question_answering": "padded to the longest + one example at a time + lengths grouped",
    "seq2seq": GROUPED_IN_FOURS, "masked_lm": None, "embedding": "mini-batches of 8 + eager attention",
    "reranker": "mini-batches of 4",
    "multiple_choice": "one example at a time + eager attention", "classification": f"{GROUPED_IN_FOURS} + eager attention",
    "classification_of_documents": "one example at a time + lengths grouped + two loader processes",
}  # fmt: skip


def ours(job: Job, at_a_time: int | None = None) -> None:
    """The recipe's `main`, with a look at the clock after each step; a batch whole, or some of its examples at a time."""
    import toolkit as tk

    spec = importlib.util.spec_from_file_location(job.task, RECIPES / f"{RECIPE_OF.get(job.task, job.task)}.py")
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    sys.modules[job.task] = recipe
    spec.loader.exec_module(recipe)
    train_step = tk.train_step

    def watched(*args: Any, **kwargs: Any) -> Any:
        metrics = train_step(*args, **kwargs)
        if job.is_check:
            job.losses.append(float(metrics["loss"]))
        job.watch.step_done()
        return metrics

    tk.train_step = watched  # type: ignore[assignment]
    in_parts = {"per_device_train_batch_size": at_a_time, "global_batch_size": job.batch} if at_a_time else {}
    how_long = {"num_train_epochs": 1.0} if job.is_check else {"max_steps": job.steps + job.warm_up}
    recipe.main(recipe.Config(**{
        "model": job.model, "dataset": str(job.rows), "output_dir": str(job.folder / "output"), "max_length": job.max_length,
        "per_device_train_batch_size": 64 if job.is_check else job.batch, "optim": "adamw_torch",
        "learning_rate": job.learning_rate, "weight_decay": 0.0, "lr_scheduler_type": "linear", "warmup_steps": 0.0,
        "eval_strategy": "no", "eval_fraction": 0.0, "eval_on_start": False, "save_strategy": "no", "use_cpu": True,
        "bf16": False, **how_long,
        **OUR_SETTINGS.get(job.task, {}), **(OURS_IN_A_CHECK.get(job.task, {}) if job.is_check else {}), **in_parts,
    }))  # fmt: skip


def flags_of(task: str) -> Flags:
    return {**FLAGS[task], **EVERYWHERE}


def run_side(job: Job, name: str) -> None:
    """Ours, `ours, N at a time`, the peer's defaults, its best flags, or those that are named: `peer, a + b`."""
    if name.startswith(OURS):
        at_a_time = name.removeprefix(OURS).removesuffix("at a time").strip(", ")
        return ours(job, int(at_a_time) if at_a_time else None)
    flags = HELPFUL[job.task] if name == BEST else None if name == DEFAULTS else name.removeprefix("peer, ")
    PEERS[job.task](job, **(settings_of(flags, flags_of(job.task)) if flags else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=[*PEERS], default=[*PEERS])
    parser.add_argument("--pairs", type=int, default=5, help="runs of each side; medians are shown")
    parser.add_argument("--steps", type=int, help="steps that are timed; default: by task")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before these")
    parser.add_argument("--flags", action="store_true", help="the peer's defaults, and next to them each of its flags alone")
    parser.add_argument("--search", action="store_true", help="finds the peer's best flags, one after the other")
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help="`ours, 4 at a time`, `peer, a + b` ...")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)  # one run, in a process of its own
    parser.add_argument("--check", action="store_true", help="only compare the loss at the start")
    settings = parser.parse_args()
    if settings.run:
        _run_one(settings)
        return
    for task in settings.tasks:
        _compare(task, settings)
    print(f"\n{_circumstances()}")


def _compare(task: str, settings: argparse.Namespace) -> None:
    steps = settings.steps or STEPS[task]
    usual = [OURS, OURS + ITS_FLOOR, DEFAULTS, *([BEST] if HELPFUL[task] else [])]
    alone = [DEFAULTS, *[f"peer, {name}" for name in flags_of(task)]]
    names = settings.sides or (alone if settings.flags else usual)
    with tempfile.TemporaryDirectory() as temporary:
        shared = Path(temporary, "shared")
        shared.mkdir()
        # of the warm-up too: a batch that lies across two epochs has rows of any length, with their padding
        write_inputs(task, shared, (steps + settings.warm_up) * ROWS_A_STEP.get(task, BATCHES[task]))
        lines = (shared / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (shared / "check.jsonl").write_text("".join(lines[:CHECKED_ROWS]), encoding="utf-8")
        if settings.check or not (settings.flags or settings.search or settings.sides):
            flags = [*_flags(settings, steps), "--check"]
            started = {name: _in_a_process(task, name, shared, flags) for name in (OURS, DEFAULTS)}
            losses = {name: statistics.mean(run["losses"]) for name, run in started.items() if run}
            print(f"\n{task}: loss at the start {losses}", flush=True)
        if settings.check:
            return
        results: dict[str, list[dict[str, Any]]] = {}

        def measure(name: str) -> None:
            measured = _in_a_process(task, name, shared, _flags(settings, steps))
            print(f"{task}  {name}  {measured or 'failed'}", file=sys.stderr, flush=True)
            results.setdefault(name, []).extend([measured] if measured else [])

        def seconds_of(flags: tuple[str, ...]) -> float | None:
            name = f"peer, {named(flags)}" if flags else DEFAULTS
            for _ in range(settings.pairs):
                measure(name)
            return _median(results[name], "seconds") or None

        if settings.search:
            print(f"\n{task}: the peer's best flags are {named(best_flags(flags_of(task), seconds_of)) or 'its defaults'}")
        for number in range(0 if settings.search else settings.pairs):
            for name in names if number % 2 == 0 else reversed(names):
                measure(name)
    print(f"\n{_table(task, results)}", flush=True)


def _flags(settings: argparse.Namespace, steps: int) -> list[str]:
    return ["--steps", str(steps), "--warm-up", str(settings.warm_up)]


def _in_a_process(task: str, name: str, shared: Path, flags: list[str]) -> dict[str, Any]:
    folder = shared.parent / "run"
    shutil.copytree(shared, folder)  # of its own, so that no side finds what another one has cached next to the rows
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "home"),
    }  # fmt: skip
    command = [sys.executable, __file__, "--run", str(folder), "--tasks", task, "--sides", name, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    shutil.rmtree(folder)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    reason = [line for line in done.stderr.splitlines() if line.strip()] or ["?"]
    print(f"{name} failed: {reason[-1][:300]}", file=sys.stderr, flush=True)
    return {}


def _run_one(settings: argparse.Namespace) -> None:
    """One run; what it took goes out as the last line."""
    watch = StepWatch("cpu", warm_up=settings.warm_up)
    job = Job(settings.run, settings.tasks[0], settings.steps, settings.warm_up, settings.check, watch)
    name = settings.sides[0]
    if name.endswith(ITS_FLOOR):
        from floor import Recorder

        recorder = watch.recorder = Recorder()
        with recorder:
            run_side(job, name.removesuffix(ITS_FLOOR))
        print(f"\n{json.dumps({'seconds': recorder.seconds() / job.steps, 'steps': watch.steps, **recorder.held})}")
        return
    run_side(job, name)
    measured = {"seconds": watch.seconds / job.steps, "peak GB": watch.peak, "steps": watch.steps}
    print(f"\n{json.dumps({**measured, **({'losses': job.losses} if job.is_check else {})})}")


def _table(task: str, results: dict[str, list[dict[str, Any]]]) -> str:
    """Medians as Markdown with what the runs lie between, and how many times ours they are."""
    lines = [f"| {task} | CPU s a step | least to most | peak GB | peer / ours | runs |", "| --- " * 6 + "|"]
    own = _median(results.get(OURS, []), "seconds")
    for side, runs in results.items():
        seconds = sorted(run["seconds"] for run in runs)
        if not seconds:
            lines.append(f"| {side} | failed | | | | 0 |")
            continue
        middle = _median(runs, "seconds")
        memory = ", ".join(f"{_median(runs, name):.2f} {name.removesuffix(' GB')}" for name in runs[0] if name.endswith(" GB"))
        ratio = f"{middle / own:.2f}" if own and side != OURS else ""
        lines.append(
            f"| {side} | {middle:.3g} | {seconds[0]:.3g} to {seconds[-1]:.3g} | {memory} | {ratio} | {len(runs)} |"
        )
    return "\n".join(lines)


def _median(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.median(run[name] for run in runs) if runs else 0.0


def _circumstances() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "sentence-transformers", "accelerate"))
    return (
        f"`python {' '.join(sys.argv)}`, {date.today()}; float32, one thread. Python {platform.python_version()}, {packages}; "
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}. Tokens at most: {MAX_LENGTHS}; batches: {BATCHES}."
    )


if __name__ == "__main__":
    main()
