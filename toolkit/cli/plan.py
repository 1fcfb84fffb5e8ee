"""toolkit plan: the memory, the time and the cost of a run, before it is started."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.command_line.placement import ConfigFile, Processes
from toolkit.command_line.recipe_file import Recipe, find_accelerate_config, recipe_and_options, without_flags
from toolkit.system.console import BOLD, GREEN, RED, as_typed, say, show_moving_line
from toolkit.system.progress import progress, with_progress

if TYPE_CHECKING:
    from toolkit.config import Settings
    from toolkit.diagnostics.devices import Device
    from toolkit.diagnostics.plan import Plan


def plan(
    context: typer.Context,
    recipe: Recipe,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[FLAGS]", help="The recipe's own, as you would train it.")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="h100, a100, l4, rtx-4090 ..., ml.g5.xlarge ..., a GPU of 24gb, mac-32gb, cpu-64gb. Several may be given."
        ),
    ] = None,
    largest: Annotated[bool, typer.Option("--largest", help="Find the largest micro-batch that fits.")] = False,
    measure: Annotated[int, typer.Option(help="Take N steps here, to estimate how long all of them will.", min=0)] = 0,
    step_seconds: Annotated[float | None, typer.Option(help="How long a step takes, in place of --measure.")] = None,
    price: Annotated[float | None, typer.Option(help="What an hour of the machine costs.")] = None,
    processes: Processes = None,
    accelerate_config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the memory that a recipe needs, without its weights and without a GPU, and whether it fits.

    The recipe itself takes two steps on tensors without contents, with the longest micro-batch of its data. Of several ranks
    (--processes) the first is planned. Completions of grpo and ppo are as long as they may be.

    Ends with 0 when the run fits on the first device, with 1 when it doesn't, with 2 when there is no plan.
    """
    script, words, values = recipe_and_options(context, recipe, flags)
    for name in ("step_seconds", "price"):
        if values[name] is not None and not 0 < values[name] < float("inf"):  # NaN is not either
            raise typer.BadParameter(f"{values[name]:g}: must be above 0.", param_hint=f"--{name.replace('_', '-')}")
    if values["price"] is not None and not (values["measure"] or values["step_seconds"]):
        raise typer.BadParameter("has no effect without --measure or --step-seconds.", param_hint="--price")
    if values["measure"] and values["step_seconds"]:
        raise typer.BadParameter("is given, so no steps are taken: remove --measure.", param_hint="--step-seconds")
    from toolkit.command_line.recipe import errors_refused, read_recipe
    from toolkit.config import Refusal
    from toolkit.config.reading import values_of
    from toolkit.diagnostics.devices import find_device

    devices = [find_device(name) for name in values["device"] or ["this"]]  # before torch is imported: one may be misspelled
    from toolkit.diagnostics.fitting import needed
    from toolkit.diagnostics.plan import plan as make_plan
    from toolkit.distributed.accelerate_config import read_accelerate_config

    name = values["accelerate_config"]
    launched = read_accelerate_config(find_accelerate_config(name)) if name else None
    ranks = values["processes"] or (launched and launched.processes) or 1
    ranks *= launched.machines if launched else 1
    environment = launched.environment if launched else {}
    if ranks > 1 and values["measure"]:
        measured = as_typed("toolkit", "profile", recipe, *words, *_placed(values))
        raise Refusal(f"--measure: times one process, and the plan is of {ranks}. Give --step-seconds, which {measured} finds.")
    place = Path(os.path.abspath(script))
    main, config = read_recipe(place, words)
    if values["measure"] and values_of(config).get("push_to_hub"):
        raise Refusal("--measure takes steps of a real run, and with --push-to-hub it would make a repository: leave that out.")

    made: list[tuple[Any, Plan]] = []  # a search comes back to what was planned first

    def planned(config: "Settings", device: "Device", sparing: bool) -> "Plan":
        of = (config, device.kind, device.ampere, sparing)
        if not any(other == of for other, _ in made):
            with errors_refused(place):
                found = make_plan(main, config, device.kind, ranks, environment, ampere=device.ampere, sparing=sparing)
            made.append((of, found))
        return next(plan for other, plan in made if other == of)

    def make(config: "Settings", device: "Device" = devices[0]) -> "Plan":
        plan = planned(config, device, False)
        is_short = device.kind == "cpu" and needed(plan, device) > device.memory
        return planned(config, device, True) if is_short and plan.may_spare else plan

    say("reading the data, and planning two steps ...", error=True)
    plans = [(each, make(config, each)) for each in devices]
    first = plans[0][1]
    seconds = values["step_seconds"]
    if values["measure"]:
        seconds = _measured(script, words, values["measure"], evaluates=values_of(config)["eval_strategy"] != "no")
    best = _largest(config, devices[0], make) if values["largest"] else None
    fits = needed(first, devices[0]) <= devices[0].memory
    if values["as_json"]:
        shown = {**vars(first), "peak": first.peak, "step_seconds": seconds, "largest_micro_batch": best}
        shown["cost"] = first.steps * seconds / 3600 * values["price"] if seconds and values["price"] else None
        sizes = {each.name: {"memory": each.memory, "needed": needed(plan, each)} for each, plan in plans}
        say(json.dumps({**shown, "devices": sizes}, indent=1))
        raise typer.Exit(0 if fits else 1)
    _show(recipe, first, devices[0])
    for each, plan in plans:
        _show_fit(plan, each)
    if values["largest"]:
        has_all = best is not None and 0 < first.examples <= best
        say(f"largest micro-batch on {devices[0].name}: {best or 'none'}{' (all examples that there are)' * has_all}")
    if not fits and not best:
        _show_alternatives(config, devices[0], make, ["toolkit", "train", recipe, *_placed(values)], words)
    if seconds:
        _show_time(first.steps, seconds, values["price"])
    raise typer.Exit(0 if fits else 1)


def _placed(values: dict[str, Any]) -> list[str]:
    """The options by which a command starts as many ranks."""
    options = {"--processes": values["processes"], "--accelerate-config": values["accelerate_config"]}
    return [word for option, value in options.items() if value for word in (option, str(value))]


def _largest(config: "Settings", device: "Device", make: Any) -> int | None:
    from toolkit.diagnostics.fitting import largest_micro_batch

    with progress("Planning micro-batches", "plans") as add:

        def count(changed: "Settings") -> "Plan":
            plan = make(changed)
            add(1)
            return plan

        found = largest_micro_batch(config, device, count)
    return found[0] if found else None


def _show(recipe: str, plan: "Plan", device: "Device") -> None:
    from toolkit.diagnostics.devices import beyond_tensors
    from toolkit.report.numbers import show_count

    accumulated = f", {plan.accumulation} of them a step" if plan.accumulation > 1 else ""
    half = f", computed in {plan.precision}" if plan.precision != "no" else ""
    counts = f"{show_count(plan.parameters)} parameters, {show_count(plan.trained)} of them trained{half}"
    say(f"{recipe}: {plan.model}, {counts}", style=BOLD)
    if plan.engine:
        say(f"one of {plan.ranks} rank(s): {plan.engine}")
    steps = f"{plan.steps:,} step{'s' * (plan.steps != 1)}"
    say(f"longest micro-batch: {plan.micro_batch} examples, {plan.tokens:,} tokens{accumulated}; {steps}")
    process, margin = beyond_tensors(device, plan)
    rows = [(part, size) for part, size in plan.parts.items() if size >= 0.001 * plan.peak]
    rows += [("= tensors at the peak", plan.peak), ("process without them", process), ("margin for the allocator", margin)]
    for name, size in rows:
        say(f"  {name:<26}{_gib(size):>12}")
    for note in plan.notes:
        say(note)


def _show_fit(plan: "Plan", device: "Device") -> None:
    from toolkit.diagnostics.fitting import needed

    wanted = needed(plan, device)
    what = f"{device.name}: needs {_gib(wanted)} of {_gib(device.memory)}"
    shared = f" (all {plan.ranks} ranks)" if plan.ranks > 1 and device.kind == "cpu" else ""
    many = f" (each of {device.count})" if device.count > 1 else shared
    if wanted <= device.memory:
        say(f"fits        {what}{many}, {_gib(device.memory - wanted)} left", style=GREEN)
    else:
        say(f"too large   {what}{many}", style=RED)


def _show_alternatives(config: "Settings", device: "Device", make: Any, train: list[str], words: list[str]) -> None:
    from toolkit.config.setting import settings_of
    from toolkit.diagnostics.fitting import alternatives, needed

    say("looking for what fits, the cheapest first ...", error=True)
    tried: list[tuple[int, str]] = []
    for changes, plan in with_progress(alternatives(config, device, make), "Planning", "settings", None, lambda _: 1):
        size, flags = needed(plan, device), [word for name, value in changes.items() for word in _as_flag(name, value)]
        tried.append((size, " ".join(flags) or "what is given"))
        if size <= device.memory:
            if sys.stderr.isatty():
                show_moving_line()  # the bar is there
            say(f"  {_gib(size)} with {' '.join(flags)}")
            say(f"    {as_typed(*train, *without_flags(words, changes, settings_of(type(config))), *flags)}")
    least, flags_of_least = min(tried)
    if least > device.memory:
        say(f"  none of the {len(tried)} that were tried fits. The least is {_gib(least)}, with {flags_of_least}.")
        say("  Take a smaller model, a shorter --max-length or a larger device, or shard it.")


def _as_flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value is True else [flag, str(value)]


def _show_time(steps: int, seconds: float, price: float | None) -> None:
    from toolkit.report.numbers import show_seconds

    cost = f", {steps * seconds / 3600 * price:,.2f} at {price:,.2f} an hour" if price else ""
    say(f"{steps:,} steps of {show_seconds(seconds)}: {show_seconds(steps * seconds)}{cost}; evaluating and saving come on top")


def _measured(script: str, words: list[str], steps: int, *, evaluates: bool) -> float:
    """Seconds of a step here: the median of `steps` after the first two, or of those that a shorter run has."""
    import itertools
    import statistics
    import subprocess

    from toolkit.config import Refusal
    from toolkit.system.files import temporary_folder
    from toolkit.system.json_lines import read_lines

    never = str(10**9)  # steps
    say(f"taking {steps + 2} steps here ...", error=True)
    with temporary_folder("plan") as folder:
        alone = ["--output-dir", str(folder), "--overwrite-output-dir", "--stop-at-step", str(steps + 2), "--report-to", "none"]
        # Where a strategy isn't "no" already, "no" would contradict settings that are about evaluations or checkpoints.
        alone += ["--logging-strategy", "steps", "--logging-steps", "1", "--save-strategy", "steps", "--save-steps", never]
        if evaluates:
            alone += ["--eval-strategy", "steps", "--eval-steps", never, "--no-eval-on-start"]
        command = [sys.executable, script, *words, *alone]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            assert run.stdout is not None
            lines = with_progress(run.stdout, "Measuring", "steps", steps + 2, lambda line: line.startswith("step "))
            printed = "".join(lines)
        times = [line["time"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line]
    if len(times) < 2:
        said = " ".join(printed.split())[-400:]
        raise Refusal(f"--measure {steps}: no two steps were taken here to be timed. The run's last lines: {said}")
    times = times[1:] if len(times) > 2 else times
    return statistics.median(after - before for before, after in itertools.pairwise(times))


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
