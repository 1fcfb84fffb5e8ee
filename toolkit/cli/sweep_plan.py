"""The plan of a sweep, from what was typed; checked against the recipe as far as that goes without starting a trial."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import typer

from toolkit.command_line.placement import placement_of
from toolkit.command_line.reading import read_command_line
from toolkit.command_line.recipe import config_class_of_file
from toolkit.config import AdapterConfig, DataConfig, ModelConfig, Refusal, Settings, check_together, settings_of
from toolkit.config.reading import values_of
from toolkit.config.setting import did_you_mean, flag_of
from toolkit.metrics.direction import greater_is_better
from toolkit.sweeps.addresses import recipe_digest
from toolkit.sweeps.journal import Objective, Plan
from toolkit.sweeps.results import read_constraint
from toolkit.sweeps.schedule import BY_RUNGS, brackets_of, check_rungs
from toolkit.sweeps.space import Dimension, read_space, searches_in_file
from toolkit.sweeps.strategies import BY_OPTUNA, count_points, make_strategy
from toolkit.sweeps.trials import flags_of

PRUNERS = ("none", "median", *BY_RUNGS)
_OURS = ("output_dir", "overwrite_output_dir", "resume", "resume_from", "stop_at_step")
_TRIALS = 20


@dataclass(frozen=True)
class SweepOptions:
    """The options of `toolkit sweep`, by their names."""

    search: Sequence[str] = ()
    strategy: str = "random"
    trials: int | None = None
    sweep_seed: int = 0
    objective: Sequence[str] = ()
    constraint: Sequence[str] = ()
    parallel: int | None = None
    seeds: int = 1
    prune: str = "none"
    rungs: str | None = None
    reduction: int = 3
    budget_steps: int | None = None
    budget_hours: float | None = None
    hang_minutes: float | None = None
    processes: int | None = None
    accelerate_config: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SweepOptions:
        """From the values of the command's options; what was not given has its default."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known and value is not None})


def make_plan(script: str, words: Sequence[str], options: SweepOptions) -> Plan:
    """The plan of a sweep over a recipe file with these flags of its own.

    Raises:
        Refusal: something in it cannot be meant.
    """
    searches = [line for text in options.search for line in (searches_in_file(Path(text)) if _is_file(text) else [text])]
    space = read_space(searches)
    placement = placement_of({
        "processes": options.processes, "accelerate_config": options.accelerate_config,
        "nodes": None, "node_rank": None, "main_address": None, "main_port": None,
    })  # fmt: skip
    config_class = config_class_of_file(Path(script))
    if options.prune not in PRUNERS:
        raise Refusal(f"--prune {options.prune}: there are {', '.join(PRUNERS)}.")
    _check_names(config_class, words, space, options)
    _check_options(space, options)
    points = count_points(options.strategy, space, repeats=options.prune == "pbt")
    trials = options.trials or (points if points and options.strategy == "grid" else _TRIALS)
    trials = min(trials, points or trials)
    words, rungs, trials = _with_evaluations(config_class, list(words), space, options, trials)
    values = values_of(_check_on_recipe(config_class, words, space))
    objectives = _objectives(options, values)
    _check_measured(config_class, [*words, *flags_of(base_of(space))], objectives if options.objective else [])
    if options.prune == "pbt":
        _check_population(config_class, space, options, trials)
    make_strategy(options.strategy, space, options.sweep_seed, [each.maximize for each in objectives])
    for each in options.constraint:
        read_constraint(each)
    if len(objectives) > 1 and options.prune != "none":
        raise Refusal(f"--prune {options.prune}: compares trials by one objective; leave it out, or give one --objective.")
    return Plan(
        recipe=script, recipe_digest=recipe_digest(Path(script)), words=words, search=searches,
        strategy=options.strategy, seed=options.sweep_seed, trials=trials, objectives=objectives,
        constraints=list(options.constraint), parallel=options.parallel or 1, seeds=options.seeds, prune=options.prune,
        rungs=rungs, reduction=options.reduction, budget_steps=options.budget_steps, budget_hours=options.budget_hours,
        hang_minutes=options.hang_minutes, placement=list(placement.typed), folder=os.getcwd(),
    )  # fmt: skip


def check_given(context: typer.Context, values: dict[str, Any], used: Collection[str], where: str) -> None:
    """The command's own options; `used`: those that have an effect; `where` is for the message.

    Raises:
        Refusal: one that was given is empty, or has none.
    """
    for option in context.command.params:
        value = values[str(option.name)]
        if option.param_type_name != "option" or value in (None, [], (), option.default):
            continue
        if value == "":
            raise Refusal(f"{option.opts[0]}: is empty. Write its value, or leave it out.")
        if option.name not in used:
            raise Refusal(f"{option.opts[0]}: has no effect with {where}. Leave it out.")


def check_agent(words: Sequence[str], sweep: str) -> None:
    """The W&B sweep that is named, and the recipe's flags next to it.

    Raises:
        Refusal: it is no name of one, or a flag is what each trial has of its own.
    """
    if sweep.count("/") != 2:
        raise Refusal(f"--wandb {sweep}: write ENTITY/PROJECT/ID, as in the sweep's address.")
    if ours := [name for name in _typed(words) if name in _OURS]:
        raise Refusal(f"{flag_of(ours[0])}: each trial has its own. The sweep's place is --sweep-dir DIR.")


def base_of(space: Sequence[Dimension]) -> dict[str, Any]:
    """A point of the space: the first choice, or the lower end, of each dimension that applies."""
    point: dict[str, Any] = {}
    for dimension in space:
        if dimension.applies(point):
            point[dimension.name] = dimension.ends()[0]
    return point


def _is_file(text: str) -> bool:
    return "=" not in text and text.endswith((".yaml", ".yml"))


def _check_names(config_class: type[Settings], words: Sequence[str], space: Sequence[Dimension], options: SweepOptions) -> None:
    settings = settings_of(config_class)
    names = {dimension.name for dimension in space}
    for name in names:
        if name not in settings:
            raise Refusal(f"--search {name}: no setting of this recipe.{did_you_mean(name, settings)}")
        if name in (*_OURS, "allow_change", "metric_for_best_model", "greater_is_better"):
            raise Refusal(f"--search {name}: the sweep decides that one itself. Leave it out.")
    for name in _typed(words):
        if name in _OURS:
            raise Refusal(f"{flag_of(name)}: each trial has its own. The sweep's place is --sweep-dir DIR.")
        if name in names:
            raise Refusal(f"{flag_of(name)}: is searched and given. Leave out one of both.")
    if options.seeds > 1 and ("seed" not in settings or "seed" in names):
        raise Refusal(f"--seeds {options.seeds}: {'seed is searched' if 'seed' in names else 'this recipe has no --seed'}.")
    if options.prune != "none" and "stop_at_step" not in settings:
        raise Refusal(f"--prune {options.prune}: this recipe cannot stop and go on; it has no --stop-at-step.")


def _check_options(space: Sequence[Dimension], options: SweepOptions) -> None:
    """The options that have no effect, or none that could be meant, next to the others."""
    if options.prune not in BY_RUNGS and (options.rungs is not None or options.reduction != SweepOptions.reduction):
        given = f"--rungs {options.rungs}" if options.rungs is not None else f"--reduction {options.reduction}"
        raise Refusal(f"{given}: has no effect without --prune {', '.join(BY_RUNGS[:-1])} or {BY_RUNGS[-1]}.")
    if options.prune in BY_RUNGS and any(dimension.name == "max_steps" for dimension in space):
        raise Refusal(f"--search max_steps: with --prune {options.prune} the last of --rungs is the length of every trial.")
    check_times(options.budget_hours, options.hang_minutes)


def check_trials(prune: str, trials: int | None) -> None:
    """Refuse a number of trials that was given where it follows from other settings."""
    if prune == "hyperband" and trials:
        raise Refusal(f"--trials {trials}: of Hyperband follows from its rungs. Leave it out.")


def check_times(budget_hours: float | None, hang_minutes: float | None) -> None:
    """Raises:
        Refusal: one of them is no length of time.
    """
    for flag, value in (("--budget-hours", budget_hours), ("--hang-minutes", hang_minutes)):
        if value is not None and not 0 < value < math.inf:
            raise Refusal(f"{flag} {value:g}: a number of {flag.rpartition('-')[2]} above 0 is expected, such as 1.5.")


def _check_on_recipe(config_class: type[Settings], words: Sequence[str], space: Sequence[Dimension]) -> Settings:
    """The settings of a trial; what the recipe's rules refuse of any end or choice is refused before there is one."""
    config = read_command_line(config_class, [*words, *flags_of(base_of(space))], {})
    for dimension in space:
        for value in dimension.ends():
            point = {**base_of(space), **{name: values[0] for name, values in dimension.when}, dimension.name: value}
            check_together(read_command_line(config_class, [*words, *flags_of(point)], {}))
    return config


def _check_population(config_class: type[Settings], space: Sequence[Dimension], options: SweepOptions, trials: int) -> None:
    """A fork goes on with its parent's weights, optimizer and data, so only what these do not depend on is searched."""
    if options.strategy in BY_OPTUNA:
        raise Refusal(f"--prune pbt: draws its first members by random, quasirandom or grid, and not by {options.strategy}.")
    if trials < 2:
        raise Refusal(f"--trials {trials}: a population has 2 members or more.")
    if options.constraint:
        raise Refusal("--prune pbt: supports no constraints. Leave out --constraint.")
    fixed = settings_of(DataConfig).keys() | settings_of(ModelConfig).keys() | settings_of(AdapterConfig).keys()
    fixed = fixed - {"dropout", "attention_dropout", "lora_dropout"} | {"optim", "seed", "max_steps", "num_train_epochs"}
    for dimension in space:
        if dimension.name in fixed:
            raise Refusal(
                f"--search {dimension.name}: a fork goes on from the checkpoint of another member, which has its own. "
                "--prune pbt searches settings of the optimizer and the loss, such as learning_rate."
            )


def _objectives(options: SweepOptions, values: Mapping[str, Any]) -> list[Objective]:
    if not options.objective:
        metric = values.get("metric_for_best_model") or "eval_loss"
        return [Objective(metric, greater_is_better(metric, values.get("greater_is_better")))]
    found = []
    for text in options.objective:
        metric, colon, direction = text.partition(":")
        if not metric or (direction not in ("max", "min") and (colon or not metric.startswith("eval_"))):
            name = metric or "METRIC"
            raise Refusal(f"--objective {text}: write {name}:max or {name}:min.")
        found.append(Objective(metric, direction == "max" if colon else greater_is_better(metric)))
    metrics = [objective.metric for objective in found]
    for metric in metrics:
        if metrics.count(metric) > 1:
            raise Refusal(f"--objective {metric}: given {metrics.count(metric)} times. Give each metric once.")
    return found


def _check_measured(config_class: type[Settings], words: Sequence[str], objectives: Sequence[Objective]) -> None:
    """An objective that is evaluated passes the rules for --metric-for-best-model, where the recipe has those."""
    if "metric_for_best_model" not in settings_of(config_class) or "metric_for_best_model" in _typed(words):
        return
    for each in objectives:
        if each.metric.startswith("eval_"):
            try:
                check_together(read_command_line(config_class, [*words, "--metric-for-best-model", each.metric], {}))
            except Refusal as refusal:
                raise Refusal(f"--objective {each.metric}: {refusal}") from None


def _with_evaluations(
    config_class: type[Settings], words: list[str], space: Sequence[Dimension], options: SweepOptions, trials: int
) -> tuple[list[str], list[int], int]:
    """The recipe's flags with evaluations at the steps where trials are compared, these steps, and the number of trials."""
    if options.prune == "none":
        return words, [], trials
    if options.seeds > 1:
        raise Refusal(f"--seeds {options.seeds}: trials that are pruned are not repeated. Leave out --prune, or --seeds.")
    values = values_of(read_command_line(config_class, [*words, *flags_of(base_of(space))], {}))
    most = values.get("max_steps")
    if options.rungs and "max_steps" in values and most == settings_of(config_class)["max_steps"].default:
        most = None  # the recipe's own length gives way to the last rung
    rungs = _rungs(options, trials, most) if options.prune in BY_RUNGS else []
    if rungs and (most is None or most < 0):
        words = [*words, "--max-steps", str(rungs[-1])]
    check_trials(options.prune, options.trials)
    if options.prune == "hyperband":
        plan = Plan("", "", [], [], "", 0, 0, [], prune="hyperband", rungs=rungs, reduction=options.reduction)
        trials = sum(count for count, _ in brackets_of(plan))
    given = _typed(words)
    every = values["eval_steps"]
    if values.get("eval_strategy") != "steps":
        if "eval_strategy" in given:
            raise Refusal(f"--prune {options.prune}: compares trials at steps; write --eval-strategy steps.")
        words = [*words, "--eval-strategy", "steps"]
    if "eval_steps" not in given:
        every = math.gcd(*rungs) if rungs else max(1, (most or 0) // 10)
        if not rungs and (most is None or most < 2):
            raise Refusal(f"--prune {options.prune}: give --eval-steps N, at which trials are compared.")
        words = [*words, "--eval-steps", str(every)]
    if uneven := [rung for rung in rungs[:-1] if rung % every]:
        raise Refusal(f"--rungs: nothing is evaluated at step {uneven[0]} with --eval-steps {every}.")
    return words, rungs, trials


def _rungs(options: SweepOptions, trials: int, most: int | None) -> list[int]:
    """The given steps; without them the whole length, and a `reduction`-th of each before it, for as many as trials allow."""
    if options.rungs is None:
        if most is None or most < options.reduction:
            raise Refusal(f"--prune {options.prune}: give --rungs, such as 30,90,270, or --max-steps.")
        rungs, reduction = [most], options.reduction
        while len(rungs) < 4 and reduction ** len(rungs) <= max(trials, reduction) and rungs[0] >= reduction:
            rungs.insert(0, rungs[0] // reduction)
        return rungs
    try:
        rungs = [int(text) for text in options.rungs.split(",")]
    except ValueError:
        rungs = []
    check_rungs(rungs, f"--rungs {options.rungs}")
    if most is not None and most > 0 and most != rungs[-1]:
        raise Refusal(f"--rungs {options.rungs}: the last one must be --max-steps {most}, a whole run.")
    return rungs


def _typed(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
