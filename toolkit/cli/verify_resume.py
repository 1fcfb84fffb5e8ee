"""toolkit verify-resume: whether a recipe that is killed and resumed ends as if it had never been."""

import sys
import time
from itertools import pairwise
from pathlib import Path

import typer

from toolkit.command_line.placement import ConfigFile, Placement, Processes, placement_of
from toolkit.command_line.recipe_file import Flags, Recipe, recipe_and_options
from toolkit.config import Refusal, read_config_file
from toolkit.config.setting import flag_of
from toolkit.distributed.launch import launch, started_ranks
from toolkit.system.console import say
from toolkit.system.files import TEMPORARY, temporary_folder

# Settings that are refused without evaluations.
_OF_EVALUATION = (
    "eval_strategy", "evaluation_strategy", "do_eval", "eval_steps", "eval_on_start", "eval_delay", "eval_split",
    "dataset_test_split", "max_eval_examples", "per_device_eval_batch_size", "num_samples", "metrics", "sample_max_new_tokens",
    "sample_temperature", "load_best_model_at_end", "early_stopping_patience",
)  # fmt: skip
# What makes a run short and its resume worth a look; left out where the user gives one of the names.
_DEFAULTS = (
    (("max_steps", "num_train_epochs"), ["--max-steps", "8"]),
    (("save_strategy", "save_steps"), ["--save-strategy", "steps", "--save-steps", "2"]),
    (("logging_strategy", "logging_steps"), ["--logging-steps", "1"]),
)
_OURS = ("output_dir", "overwrite_output_dir", "resume", "resume_from")
_POLL_SECONDS = 0.002


def verify_resume(
    context: typer.Context, recipe: Recipe, flags: Flags = None, processes: Processes = None,
    accelerate_config: ConfigFile = None,
) -> None:  # fmt: skip
    """Run a recipe twice in temporary directories, once uninterrupted and once killed and resumed, and compare the bits.

    A few steps with a checkpoint every other one, unless the recipe's flags set others: --max-steps 8 --save-strategy
    steps --save-steps 2 --logging-steps 1, and --eval-strategy no where no flag and no line of --config is about
    evaluations. SIGKILL comes after a step in the middle. Compared are the final checkpoints and the model directories
    (every tensor bit for bit, every other file), every logged metric, the samples and the summary; what was compared is
    printed.

    Ends with 0 when they are identical, with 1 when they differ; then the directories are kept.
    """
    script, words, values = recipe_and_options(context, recipe, flags)
    placement = placement_of(values)
    command = [sys.executable, script, *_with_defaults(words)]
    with temporary_folder("verify-resume") as folder:
        whole, resumed = folder / "uninterrupted", folder / "resumed"
        say("1 of 3: uninterrupted")
        _run([*command, "--output-dir", str(whole)], placement, folder / "uninterrupted.txt")
        step = _step_to_kill_at(whole)
        say(f"2 of 3: the same, killed after step {step}")
        _run_and_kill([*command, "--output-dir", str(resumed)], placement, folder / "killed.txt", resumed, step)
        start = _newest_whole_step(resumed)
        say(f"3 of 3: resumed from step {start}")
        _run([*command, "--output-dir", str(resumed), "--resume"], placement, folder / "resumed.txt")
        differences, compared = _differences(whole, resumed, start), _what_was_compared(whole)
        if not differences:
            say("\n  ".join(["identical", *compared]))
            return
        kept = folder.rename(folder.with_name(folder.name.removeprefix(TEMPORARY)))
        for log in kept.glob("*.txt"):
            log.write_bytes(log.read_bytes().replace(bytes(folder), bytes(kept)))
        say("\n  ".join(["different", *differences, f"kept in {kept}"]))
        say("\n  ".join(["compared", *compared]))
        raise typer.Exit(1)


def _with_defaults(words: list[str]) -> list[str]:
    given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    for name in _OURS:
        if name in given:
            raise typer.BadParameter("the runs are made from scratch in temporary directories.", param_hint=flag_of(name))
    defaults = [flag for names, flags in _DEFAULTS if not given.intersection(names) for flag in flags]
    written = {key.replace("-", "_"): value for file in _config_files(words) for key, value in read_config_file(file).items()}
    if "push_to_hub" in given or written.get("push_to_hub"):
        raise typer.BadParameter("the runs are trials: nothing of them goes to the Hub.", param_hint="--push-to-hub")
    evaluates = not (given | written.keys()).isdisjoint(_OF_EVALUATION)
    return [*words, *defaults, *([] if evaluates else ["--eval-strategy", "no"])]


def _config_files(words: list[str]) -> list[str]:
    typed = [(*word.partition("="), following) for word, following in pairwise([*words, ""])]
    return [value if equals else following for flag, equals, value, following in typed if flag == "--config"]


def _run(command: list[str], placement: Placement, log: Path) -> None:
    with open(log, "wb") as file:
        code = launch(command, placement.processes, placement.nodes, environment=placement.environment, log=file)
    if code != 0:
        _fail(log, code)


def _run_and_kill(command: list[str], placement: Placement, log: Path, output_dir: Path, step: int) -> None:
    """Start the recipe, and kill every rank once the step is in metrics.jsonl and some checkpoint is there to resume from."""
    from toolkit.checkpoint import list_checkpoints
    from toolkit.runs.differences import logged_losses

    def is_time() -> bool:
        losses = logged_losses(output_dir)
        return bool(losses) and losses[-1][0] >= step and bool(list_checkpoints(output_dir / "checkpoints"))

    with (
        open(log, "wb") as file,
        started_ranks(command, placement.processes, placement.nodes, environment=placement.environment, log=file) as ranks,
    ):
        while not is_time() and not any(rank.poll() is not None for rank in ranks.values()):
            time.sleep(_POLL_SECONDS)
        codes = [rank.poll() for rank in ranks.values()]
    # Whoever still ran was killed where the block ended.
    if failed := next((code for code in codes if code), None):
        _fail(log, failed)
    if 0 in codes:
        raise Refusal(
            f"the run ended before it could be killed after step {step} with a checkpoint to resume from. "
            "Take more steps (--max-steps 40) or save more often (--save-steps 1)."
        )


def _step_to_kill_at(output_dir: Path) -> int:
    """The logged step nearest to the middle, at which no checkpoint is written if there is such a one."""
    from toolkit.runs.differences import logged_losses

    steps = [step for step, _ in logged_losses(output_dir)]
    if len(steps) < 3:
        raise Refusal(f"{len(steps)} losses were logged, too few to stop between them: take more steps, or --logging-steps 1.")
    settings = read_config_file(output_dir / "config.yaml")
    every = settings["save_steps"] if settings.get("save_strategy") == "steps" else steps[-1]
    middle = (steps[-1] + 1) / 2
    return min(steps[1:-1], key=lambda step: (step % every == 0, step < every, abs(step - middle), -step))


def _newest_whole_step(output_dir: Path) -> int:
    from toolkit.checkpoint import latest_checkpoint

    newest = latest_checkpoint(output_dir / "checkpoints", say)
    if newest is None:
        raise Refusal("no whole checkpoint was left by the killed run: save more often, as with --save-steps 1.")
    return int(newest.name.removeprefix("step-"))


def _differences(whole: Path, resumed: Path, start: int) -> list[str]:
    from toolkit.runs.differences import (
        directory_differences,
        first_checkpoint_difference,
        metric_differences,
        summary_differences,
    )
    from toolkit.system.json_lines import read_lines

    found = []
    for name, (step, one, other) in metric_differences(whole, resumed).items():
        found.append(f"metrics.jsonl: {name} differs first at step {step}: {one} uninterrupted, {other} resumed")
        if name == "loss" and step <= start:
            found.append(f"that is before the resume at step {start}: the recipe does not repeat itself even uninterrupted")
    checkpoint = first_checkpoint_difference(whole, resumed)
    found += [f"first tensor that differs: {checkpoint}"] if checkpoint else []
    found += [f"model/: {difference}" for difference in directory_differences(whole / "model", resumed / "model")]
    samples = [read_lines(each / "samples.jsonl") for each in (whole, resumed)]
    found += [] if samples[0] == samples[1] else ["samples.jsonl: the texts differ"]
    return [*found, *(f"summary.json: {difference}" for difference in summary_differences(whole, resumed))]


def _what_was_compared(whole: Path) -> list[str]:
    """One line for each of the places that were compared, with what is in it; and what was not there to compare."""
    from toolkit.checkpoint import list_checkpoints
    from toolkit.runs.differences import logged_metrics, read_summary
    from toolkit.system.json_lines import read_lines

    files = sorted(path.relative_to(whole).as_posix() for path in (whole / "model").rglob("*") if path.is_file())
    metrics, values = logged_metrics(whole), read_summary(whole)
    steps = len({step for series in metrics.values() for step, _ in series})
    samples = read_lines(whole / "samples.jsonl")
    evaluated = any(name.startswith("eval_") for name in metrics)
    return [
        f"{list_checkpoints(whole / 'checkpoints')[-1].name}: model and optimizer, bit for bit",
        f"model/: {', '.join(name.removeprefix('model/') for name in files)}" if files else "no model/ was written",
        f"metrics.jsonl: {', '.join(metrics)}, of {steps} steps" + ("" if evaluated else "; no evaluation was logged"),
        *([f"samples.jsonl: {len(samples)} texts"] if samples else []),
        f"summary.json: {', '.join(values)}" if values else "no summary.json was written",
    ]


def _fail(log: Path, code: int) -> None:
    """End as the recipe did, with the end of what it printed."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    say("\n".join(lines[-20:]), error=True)
    raise typer.Exit(code if code > 0 else 128 - code)

