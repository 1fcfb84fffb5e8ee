"""toolkit sweep: many runs of a recipe with settings that a strategy proposes; what came out of them."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli.command_line import read_command_line
from toolkit.cli.placement import ConfigFile, Processes, placement_of
from toolkit.cli.recipe import config_class_of_file
from toolkit.cli.recipe_file import Recipe, find_recipe, split_options
from toolkit.config import Refusal, Settings, check_together, settings_of
from toolkit.config.reading import values_of
from toolkit.config.setting import nearest
from toolkit.metrics.direction import greater_is_better
from toolkit.runs.copies import text_hash
from toolkit.sweeps.journal import JOURNAL, Plan, Trial, read_journal, trial_folder
from toolkit.sweeps.loop import best_of, run_sweep, show_point, value_of
from toolkit.sweeps.space import Dimension, read_space
from toolkit.sweeps.strategies import STRATEGIES, grid_size, make_strategy
from toolkit.sweeps.trials import Stopped, flags_of, run_trial, shown_command
from toolkit.sweeps.zygote import Zygote
from toolkit.system.console import as_typed, say

_OURS = ("output_dir", "overwrite_output_dir", "resume", "resume_from", "metric_for_best_model", "greater_is_better")
_BY_OPTUNA = ("tpe", "gp", "cmaes")


def sweep(
    context: typer.Context,
    recipe: Recipe,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[FLAGS]", help="The recipe's own, which are the same in every trial.")
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUES", help="A setting to search: log:1e-5..1e-3, float:, int:, logint:, or a,b,c."),
    ] = None,
    strategy: Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(STRATEGIES)}.")] = "random",
    trials: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Trials. Default: 20; of a grid all points.", show_default=False)
    ] = None,
    sweep_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where it is written. Default: sweeps/RECIPE.", show_default=False)
    ] = None,
    sweep_seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the proposals; the recipe's is --seed.")] = 0,
    processes: Processes = None,
    accelerate_config: ConfigFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the space and the first trial; start nothing.")] = False,
) -> None:
    """Search settings of a recipe: every trial is an ordinary run under DIR/trials, judged by --metric-for-best-model.

    The same command again, or `toolkit sweep continue DIR [--trials N]`, goes on where a sweep was stopped or killed. `toolkit
    sweep status DIR` lists its trials, `toolkit sweep best DIR` prints the best one as a command.

    Ends with 0 when all trials have ended, failed ones included, with 1 when none has a value, with 75 or 130 when a signal
    stopped it.
    """
    words, searched = _take_searches(flags or [])
    dry_run, words = dry_run or "--dry-run" in words, [word for word in words if word != "--dry-run"]
    words, values = split_options(context, words)
    if recipe in ("status", "best", "continue"):
        if not words:
            raise Refusal(f"toolkit sweep {recipe}: give the directory of a sweep, as in `toolkit sweep {recipe} sweeps/sft`.")
        _of_directory(recipe, Path(words[0]), values["trials"])
        return
    script = find_recipe(recipe, context.command_path)
    plan = _plan(script, words, [*(values["search"] or []), *searched], values)
    folder = Path(values["sweep_dir"] or Path("sweeps") / Path(script).stem)
    if dry_run:
        _show_plan(plan, folder)
    else:
        _run(plan, folder)


def _plan(script: str, words: list[str], search: list[str], values: Mapping[str, Any]) -> Plan:
    """What is asked for, checked against the recipe as far as that goes without starting a trial."""
    space = read_space(search)
    placement = placement_of({**values, "nodes": None, "node_rank": None, "main_address": None, "main_port": None})
    config_class = config_class_of_file(Path(script))
    metric, given = _check_on_recipe(config_class, words, space)
    maximize = greater_is_better(metric, given)
    strategy = values["strategy"]
    make_strategy(strategy, space, values["sweep_seed"], maximize)
    trials = values["trials"]
    if strategy == "grid":
        trials = min(trials or grid_size(space), grid_size(space))
    return Plan(
        recipe=script, recipe_digest=text_hash(Path(script).read_text(encoding="utf-8")), words=words, search=search,
        strategy=strategy, seed=values["sweep_seed"], trials=trials or 20, metric=metric, maximize=maximize,
        placement=list(placement.typed), folder=os.getcwd(),
        optuna=_version("optuna") if strategy in _BY_OPTUNA else None,
    )  # fmt: skip


def _check_on_recipe(config_class: type[Settings], words: list[str], space: Sequence[Dimension]) -> tuple[str, bool | None]:
    """The metric that decides, and whether more of it is better where that was given; a trial's refusal before it starts."""
    settings = settings_of(config_class)
    for dimension in space:
        if dimension.name not in settings:
            near = nearest(dimension.name, settings)
            raise Refusal(f"--search {dimension.name}: no setting of this recipe.{f' Did you mean {near}?' if near else ''}")
        if dimension.name in _OURS:
            raise Refusal(f"--search {dimension.name}: the sweep decides that one itself. Leave it out.")
    typed = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    for name in typed:
        if name in _OURS[:4]:
            raise Refusal(f"--{name.replace('_', '-')}: each trial has its own. The sweep's place is --sweep-dir DIR.")
        if name in {dimension.name for dimension in space}:
            raise Refusal(f"--{name.replace('_', '-')}: is searched and given. Leave out one of both.")
    base = {dimension.name: dimension.ends()[0] for dimension in space}
    for dimension in space:
        for value in dimension.ends():
            config = read_command_line(config_class, [*words, *flags_of(base | {dimension.name: value})], {})
            check_together(config)
    found = values_of(config)
    return found.get("metric_for_best_model") or "eval_loss", found.get("greater_is_better")


def _run(plan: Plan, folder: Path) -> None:
    options = dict(zip(plan.placement[::2], plan.placement[1::2], strict=True))
    placement = placement_of({
        "processes": int(options["--processes"]) if "--processes" in options else None,
        "accelerate_config": options.get("--accelerate-config"),
        "nodes": None, "node_rank": None, "main_address": None, "main_port": None,
    })  # fmt: skip
    can_resume = "resume" in settings_of(config_class_of_file(Path(plan.recipe)))
    judged = f"{'more' if plan.maximize else 'less'} {plan.metric} is better"
    say(f"{plan.trials} trials of {plan.recipe} by {plan.strategy} in {folder}; {judged}")
    # Forks of a process with threads or a GPU may hang: on Linux alone, and not where Accelerate is to set up the process.
    can_fork = sys.platform == "linux" and not plan.placement
    try:
        with Zygote() if can_fork else contextlib.nullcontext() as zygote:
            start = partial(
                run_trial, folder.absolute(), plan, can_resume=can_resume, processes=placement.processes,
                environment=placement.environment, zygote=zygote,
            )  # fmt: skip
            trials = run_sweep(folder, plan, start, lambda trial: say(_line(trial, plan)))
    except Stopped as stopped:
        say(f"{stopped}; go on with: {as_typed('toolkit', 'sweep', 'continue', str(folder))}", error=True)
        raise typer.Exit(stopped.code) from None
    _show_best(plan, trials)


def _of_directory(action: str, folder: Path, trials: int | None) -> None:
    if not (folder / JOURNAL).is_file():
        raise Refusal(f"{folder}: is no directory of a sweep; it has no {JOURNAL}.")
    plan, found = read_journal(folder)
    if plan is None:
        raise Refusal(f"{folder}: the sweep was stopped before it began. Start it again.")
    if action == "status":
        for trial in found.values():
            say(_line(trial, plan))
        ended = sum(trial.outcome is not None for trial in found.values())
        with_value = sum(value_of(trial) is not None for trial in found.values())
        say(f"{ended} of {plan.trials} trials have ended, {with_value} with a value")
    elif action == "best":
        _show_best(plan, found, folder)
    else:
        here = folder.absolute()
        os.chdir(plan.folder)  # relative paths among the recipe's flags
        digest = text_hash(Path(plan.recipe).read_text(encoding="utf-8")) if Path(plan.recipe).is_file() else "missing"
        optuna = _version("optuna") if plan.strategy in _BY_OPTUNA else None
        _run(replace(plan, recipe_digest=digest, optuna=optuna, trials=trials or plan.trials), here)


def _show_best(plan: Plan, trials: Mapping[int, Trial], folder: Path | None = None) -> None:
    best = best_of(trials, plan.maximize)
    if best is None:
        say("no trial has a value", error=True)
        raise typer.Exit(1)
    say(f"best: {_line(best, plan)}")
    if folder:
        say(f"run directory: {trial_folder(folder, _computed(best))}")
    say(as_typed(*shown_command(plan, best.settings)))


def _computed(trial: Trial) -> int:
    same = trial.outcome.same_as if trial.outcome else None
    return trial.number if same is None else same


def _line(trial: Trial, plan: Plan) -> str:
    outcome, value = trial.outcome, value_of(trial)
    if outcome is None:
        how = "not ended"
    elif value is None:
        how = f"failed ({outcome.reason})"
    else:
        how = f"{plan.metric} {value:.6g}" + ("" if outcome.same_as is None else f" (that of trial {outcome.same_as})")
    return f"trial {trial.number:04d}  {how}  {show_point(trial.settings)}"


def _show_plan(plan: Plan, folder: Path) -> None:
    space = read_space(plan.search)
    say(f"{plan.trials} trials of {plan.recipe} by {plan.strategy}, seed {plan.seed}, in {folder}")
    say(f"judged by {plan.metric}: {'more' if plan.maximize else 'less'} is better")
    for dimension in space:
        kind = ", logarithmic" if dimension.is_log else ""
        span = ", ".join(dimension.choices) or f"{dimension.low} to {dimension.high}{kind}"
        say(f"  {dimension.name}: {span}")
    strategy = make_strategy(plan.strategy, space, plan.seed, plan.maximize)
    first = strategy.ask(0)
    say(f"first trial: {as_typed(*shown_command(plan, first or {}))}")


def _take_searches(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without --search and its values, and these."""
    kept, searched, rest = list[str](), list[str](), list(words)
    while rest:
        word = rest.pop(0)
        if word == "--search":
            if not rest:
                raise typer.BadParameter("a value must follow.", param_hint="--search")
            searched.append(rest.pop(0))
        elif word.startswith("--search="):
            searched.append(word.removeprefix("--search="))
        else:
            kept.append(word)
    return kept, searched


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
