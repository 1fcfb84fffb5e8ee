"""toolkit sweep: many runs of a recipe with settings that a strategy proposes; what came out of them."""

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli.sweep_plan import (
    PRUNERS,
    SweepOptions,
    base_of,
    check_agent,
    check_given,
    check_times,
    check_trials,
    make_plan,
)
from toolkit.command_line.placement import ConfigFile, Processes
from toolkit.command_line.reading import read_command_line
from toolkit.command_line.recipe import config_class_of_file
from toolkit.command_line.recipe_file import Flags, Recipe, find_recipe, split_options, sweep_folder
from toolkit.config import Refusal, settings_of
from toolkit.config.places import place_to_write, unwritable
from toolkit.config.reading import values_of
from toolkit.distributed.launch import signals_collected, threads_of_a_rank
from toolkit.sweeps.addresses import address_of, found_elsewhere, recipe_digest
from toolkit.sweeps.journal import Job, Journal, Outcome, Plan, other_fields, read_journal
from toolkit.sweeps.loop import Stopped, Sweep, run_sweep
from toolkit.sweeps.outcomes import trial_folder
from toolkit.sweeps.page import sweep_page
from toolkit.sweeps.results import best_trials, result_of, trials_of
from toolkit.sweeps.schedule import brackets_of, make_schedule, planned_steps, rung_counts, trials_in
from toolkit.sweeps.shown import Live, count_line, point_of, seed_lines, status_lines, trial_line
from toolkit.sweeps.space import Point, Proposal, read_space
from toolkit.sweeps.storage import open_journal
from toolkit.sweeps.strategies import STRATEGIES, count_points
from toolkit.sweeps.trials import Recipe as RecipeTrials, commands_of, flags_of, fork_run, shown_command
from toolkit.sweeps.wandb_agent import run_agent
from toolkit.sweeps.zygote import Zygote
from toolkit.system.console import as_typed, say
from toolkit.system.standard_streams import outlive_the_log

# What can be done with the directory of a sweep, and the options that each of it takes.
ACTIONS = {
    "status": {"storage"}, "best": {"storage"}, "report": {"storage", "output"},
    "continue": {"storage", "trials", "parallel", "slots", "budget_steps", "budget_hours", "hang_minutes"},
}  # fmt: skip
OF_AN_AGENT = {"wandb", "trials", "sweep_dir"}
NOT_OF_A_RECIPE = {"output"}


def sweep(
    context: typer.Context,
    recipe: Recipe,
    flags: Flags = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES", help="A setting to search: log:1e-5..1e-3, float:, int:, logint:, or a,b,c; or a YAML."
        ),
    ] = None,
    strategy: Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(STRATEGIES)}.")] = "random",
    trials: Annotated[int | None, typer.Option(metavar="N", min=1, help="Trials. Default: 20; of a grid all points.")] = None,
    sweep_dir: Annotated[str | None, typer.Option(metavar="DIR", help="Where it is written. Default: sweeps/RECIPE.")] = None,
    sweep_seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the proposals; the recipe's is --seed.")] = 0,
    objective: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:max|min", help="What decides; several give a Pareto front. Default: --metric-for-best-model."
        ),
    ] = None,
    constraint: Annotated[
        list[str] | None, typer.Option(metavar="METRIC<=X", help="A limit of the best trial, such as peak_memory_gb<=8.")
    ] = None,
    prune: Annotated[
        str, typer.Option(metavar="NAME", help=f"Stop the worse trials early: one of {', '.join(PRUNERS)}.")
    ] = "none",
    rungs: Annotated[
        str | None, typer.Option(metavar="N,N,N", help="Steps at which trials are compared; the last one is a whole run.")
    ] = None,
    reduction: Annotated[int, typer.Option(metavar="N", min=2, help="Of N trials at a rung one goes on.")] = 3,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="Trials of each point, with different seeds.")] = 1,
    parallel: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Trials at a time, in all processes. Default: 1.")
    ] = None,
    slots: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of these in this process. Default: all.")] = None,
    budget_steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Start no trial after N steps of all trials.")
    ] = None,
    budget_hours: Annotated[float | None, typer.Option(metavar="H", min=0.0, help="Start no trial after H hours.")] = None,
    hang_minutes: Annotated[
        float | None,
        typer.Option(metavar="M", min=0.0, help="Kill a trial that writes nothing for M minutes; the third time it fails."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A database for the journal, such as sqlite:///sweeps.db, without a common folder."),
    ] = None,
    wandb: Annotated[
        str | None,
        typer.Option(metavar="ENTITY/PROJECT/ID", help="Be an agent of this W&B sweep, which has the space and the strategy."),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="The page of report. Default: DIR/report.html.")] = None,
    processes: Processes = None,
    accelerate_config: ConfigFile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the space, the cost and the first trial; start nothing.")
    ] = False,
) -> None:
    """Search settings of a recipe: every trial is an ordinary run under DIR/trials, judged by --metric-for-best-model.

    The same command again, or `toolkit sweep continue DIR [--trials N]`, goes on where a sweep was stopped or killed, or helps
    one that runs. `toolkit sweep status DIR` lists its trials, `toolkit sweep best DIR` prints the best one as a command,
    `toolkit sweep report DIR` writes a page about it.

    Ends with 0 when all trials have ended, failed ones included, with 1 when none has a value, with 75 or 130 when a signal
    stopped it.
    """
    words, values = split_options(context, flags or [])
    if recipe in ACTIONS:
        check_given(context, values, ACTIONS[recipe], f"`toolkit sweep {recipe}`")
        if len(words) != 1:
            raise Refusal(f"toolkit sweep {recipe}: give the directory of one sweep: `toolkit sweep {recipe} sweeps/sft`.")
        _of_directory(recipe, Path(words[0]), values)
        return
    script = find_recipe(recipe, context.command_path)
    folder = sweep_folder(script, values["sweep_dir"])
    if values["wandb"] is not None:
        check_given(context, values, OF_AN_AGENT, "--wandb, where the W&B sweep decides")
        check_agent(words, values["wandb"])
        run_agent(values["wandb"], script, words, folder, settings_of(config_class_of_file(Path(script))), values["trials"])
        return
    check_given(context, values, values.keys() - NOT_OF_A_RECIPE, "a recipe")
    plan = make_plan(script, words, SweepOptions.of(values))
    if values["dry_run"]:
        place_to_write(folder, "--sweep-dir")
        _show_plan(plan, folder)
    else:
        _run(plan, folder, open_journal(folder, values["storage"]), values["slots"])


def _run(plan: Plan, folder: Path, journal: Journal, slots: int | None) -> None:
    outlive_the_log()
    slots = slots or plan.parallel
    config_class = config_class_of_file(Path(plan.recipe))
    names = settings_of(config_class)
    where = f"{trials_in(plan)} trials of {plan.recipe} by {plan.strategy} in {folder}"
    judged = [f"{'more' if each.maximize else 'less'} {each.metric} is better" for each in plan.objectives]
    say(f"{where}; {'; '.join(judged)}")
    folder = folder.absolute()
    # Forks of a process with threads or a GPU may hang: on Linux alone, and not where Accelerate is to set up the process.
    can_fork = sys.platform == "linux" and not plan.placement
    threads = {} if slots == 1 or os.environ.get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": str(threads_of_a_rank(slots))}

    def address(settings: Point) -> str:
        return address_of(read_command_line(config_class, [*plan.words, *flags_of(settings)], {}), plan)

    def elsewhere(address: str, until: int | None) -> Outcome | None:
        return None if plan.prune == "pbt" else found_elsewhere(folder, address, until)  # whose checkpoints may be gone

    state = Sweep(journal, plan, journal.liveness(), address, elsewhere, lambda trial, parent: fork_run(folder, trial, parent))
    live = Live(folder, plan, slots)
    before, jobs = read_journal(journal)
    host = state.liveness.me.partition("/")[0]
    ours = [job for job in jobs if job.address and not job.parent and job.worker.partition("/")[0] == host]
    if before and ours and not other_fields(before, plan) and address(ours[-1].settings) != ours[-1].address:
        say(
            "WARNING: the data (files by size and time), the toolkit, packages, OMP_NUM_THREADS or --parallel have changed "
            "since the last trial started: trials before and after may not compare. In another --sweep-dir all are alike.",
            error=True,
        )

    def ended(job: Job) -> None:
        live.say(trial_line(trials_of(state.jobs[: job.number + 1])[job.trial], plan))

    try:
        with Zygote(threads) if can_fork else contextlib.nullcontext() as zygote:
            environments = [{**threads, **_gpus_of(slot, slots)} for slot in range(slots)]
            recipe = RecipeTrials(folder, plan, "resume" in names, environments, zygote)
            received: list[int] = []
            with signals_collected(received):
                run_sweep(state, recipe.start, slots, ended, lambda running: live.show(running, state.jobs), received)
    except Stopped as stopped:
        live.clear()
        say(f"{stopped}; go on with: {as_typed('toolkit', 'sweep', 'continue', str(folder))}", error=True)
        raise typer.Exit(stopped.code) from None
    live.clear()
    say(count_line(plan, state.jobs))
    _show_best(plan, state.jobs, folder)


def _gpus_of(slot: int, slots: int) -> dict[str, str]:
    """The GPUs of a slot, where there are several slots: its share of those that are visible, one at least."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = given.split(",") if given is not None else [path.name[6:] for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
    found = [each for each in found if each.strip()]
    if slots == 1 or not found:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(found[slot::slots] or [found[slot % len(found)]])}


def _of_directory(action: str, folder: Path, values: dict[str, Any]) -> None:
    here = folder.absolute()
    if action == "continue":
        folder = here  # it goes on in another folder, see below
    journal = open_journal(folder, values["storage"], must_exist=True)
    plan, jobs = read_journal(journal)
    if plan is None:
        raise Refusal(f"{folder}: the sweep was stopped before it began. Start it again.")
    if action == "status":
        for line in status_lines(plan, jobs, folder, journal.liveness().lives):
            say(line)
    elif action == "report":
        target = place_to_write(values["output"], "--output", is_file=True) if values["output"] else folder / "report.html"
        try:
            target.write_text(sweep_page(folder, plan, jobs, target), encoding="utf-8")
        except OSError as error:  # such as a full disk
            raise unwritable(target, "--output", error) from error
        say(target)
    elif action == "best":
        _show_best(plan, jobs, folder)
    else:
        if not os.path.isdir(plan.folder):
            raise Refusal(
                f"{folder}: was begun in {plan.folder}, which is not here, and to which the paths of its flags belong. In the "
                "folder that has its recipe and data, type the command it was begun with, and --sweep-dir."
            )
        os.chdir(plan.folder)
        digest = recipe_digest(Path(plan.recipe)) if Path(plan.recipe).is_file() else "missing"
        check_times(values["budget_hours"], values["hang_minutes"])
        check_trials(plan.prune, values["trials"])
        may_change = ("trials", "parallel", "budget_steps", "budget_hours", "hang_minutes")
        changed = {name: values[name] for name in may_change if values[name] is not None}
        points = count_points(plan.strategy, read_space(plan.search), repeats=plan.prune == "pbt")
        if points and "trials" in changed:
            changed["trials"] = min(changed["trials"], points)
        _run(replace(plan, recipe_digest=digest, **changed), here, journal, values["slots"])


def _show_best(plan: Plan, jobs: Sequence[Job], folder: Path) -> None:
    best = best_trials(list(trials_of(jobs).values()), plan)
    if not best:
        say("no trial has a value", error=True)
        raise typer.Exit(1)
    if plan.seeds > 1:
        say(f"best by the mean of {plan.seeds} seeds: {seed_lines(plan, jobs)[0]}")
    if len(best) > 1:
        say(f"{len(best)} trials on the Pareto front:")
    for trial in best:
        say(f"best: {trial_line(trial, plan)}" if len(best) == 1 else trial_line(trial, plan))
        equal = sum(result_of(each, plan).values == result_of(trial, plan).values for each in trials_of(jobs).values())
        if equal > 1 and len(best) == 1 and plan.seeds == 1:
            say(f"{equal} trials have this value; the first of them is shown")
        same = trial.outcome.same_as if trial.outcome else None
        computed = trial.number if same is None or isinstance(same, str) else jobs[same].trial
        place = same if isinstance(same, str) else trial_folder(folder, computed)
        host = "" if os.path.exists(place) else next(job.worker for job in jobs if job.trial == computed).partition("/")[0]
        say(f"run directory: {place}" + (f", which is where a worker on {host} trained it and not here" if host else ""))
        if plan.folder and Path(plan.folder).is_dir() and not Path(plan.folder).samefile(Path.cwd()):
            say(as_typed("cd", plan.folder))  # where relative paths among the flags hold
        if plan.prune == "pbt":
            for command in commands_of(plan, jobs, trial.number):
                say(as_typed(*command))
        else:
            say(as_typed(*shown_command(plan, point_of(plan, trial.settings))))


def _show_plan(plan: Plan, folder: Path) -> None:
    space = read_space(plan.search)
    say(f"{trials_in(plan)} trials of {plan.recipe} by {plan.strategy}, seed {plan.seed}, in {folder}")
    for each in plan.objectives:
        say(f"judged by {each.metric}: {'more' if each.maximize else 'less'} is better")
    for constraint in plan.constraints:
        say(f"within {constraint}")
    for dimension in space:
        kind = ", logarithmic" if dimension.is_log else ""
        span = ", ".join(dimension.choices) or f"{dimension.low} to {dimension.high}{kind}"
        when = "".join(f", where {name} is {' or '.join(values)}" for name, values in dimension.when)
        say(f"  {dimension.name}: {span}{when}")
    for line in _cost(plan):
        say(line)
    first = make_schedule(plan).next()
    settings = first.settings if isinstance(first, Proposal) else base_of(space)
    say(f"first trial: {as_typed(*shown_command(plan, settings))}")


def _cost(plan: Plan) -> list[str]:
    """The steps that the plan will train, as far as they are known beforehand."""
    words = [*plan.words, *flags_of(base_of(read_space(plan.search)))]
    config = read_command_line(config_class_of_file(Path(plan.recipe)), words, {})
    most = values_of(config).get("max_steps")
    if plan.prune == "pbt":
        return [f"cost: {planned_steps(plan)} steps, {plan.trials} members to step {plan.rungs[-1]}"]
    if plan.rungs:
        about = "about" if plan.prune == "asha" else "at most"  # it takes a trial on before all are known
        lines = []
        for count, rungs in brackets_of(plan):
            counts = zip(rung_counts(count, rungs, plan.reduction), rungs, strict=True)
            lines.append("  " + ", ".join(f"{left} to step {rung}" for left, rung in counts))
        whole = trials_in(plan) * plan.rungs[-1]
        return [f"cost: {about} {planned_steps(plan)} steps, of {whole} without --prune", *lines]
    if most is None or most < 1:
        return [f"cost: {trials_in(plan)} whole runs; --max-steps bounds them"]
    most_of_all = "at most " if plan.prune != "none" else ""
    return [f"cost: {most_of_all}{trials_in(plan) * most} steps, {trials_in(plan)} times {most}"]
