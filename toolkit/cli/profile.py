"""toolkit profile: where the time of a step goes, and what to change first."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.command_line.placement import ConfigFile, MainAddress, MainPort, NodeCount, NodeRank, Processes, placement_of
from toolkit.command_line.recipe_file import Flags, Recipe, recipe_and_options
from toolkit.distributed.launch import launch
from toolkit.system.console import BOLD, say, write
from toolkit.system.progress import progress

if TYPE_CHECKING:
    from toolkit.diagnostics.profile import Profile


def profile(
    context: typer.Context,
    recipe: Recipe,
    flags: Flags = None,
    steps: Annotated[int, typer.Option(help="How many steps are timed.", min=3)] = 10,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace (ui.perfetto.dev shows it).")] = None,
    memory: Annotated[Path | None, typer.Option(help="Write a snapshot of CUDA's memory (pytorch.org/memory_viz).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    processes: Processes = None,
    accelerate_config: ConfigFile = None,
    nodes: NodeCount = None,
    node_rank: NodeRank = None,
    main_address: MainAddress = None,
    main_port: MainPort = None,
) -> None:
    """Train a recipe for a few steps and show where their time goes: data, forward, backward, clipping, optimizer.

    Without evaluation; nothing is left behind but what is requested. Three steps come before those that are timed, and three
    after them (one, where it is long), under torch's profiler, for the longest operations; then a checkpoint is written
    and timed. Several ranks (--processes, or started by accelerate launch) have one table, with the communication that no
    computation hides.
    """
    script, words, values = recipe_and_options(context, recipe, flags)
    placement = placement_of(values)
    if placement.processes * placement.nodes.count > 1 or placement.environment:
        command = [sys.executable, "-m", "toolkit", "profile", script, *_own_options(values), *words]
        raise typer.Exit(launch(command, placement.processes, placement.nodes, environment=placement.environment))
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it writes lines of its own, of level 5 (torch 2.13)
    import torch

    from toolkit.command_line.recipe import errors_refused, read_recipe
    from toolkit.config import Refusal
    from toolkit.config.places import place_to_write
    from toolkit.config.reading import values_of
    from toolkit.diagnostics.advice import first_change
    from toolkit.diagnostics.profile import WARM_UP, profile as make_profile

    if values["memory"] and not torch.cuda.is_available():
        raise Refusal("--memory: torch records the memory of CUDA devices alone. `toolkit plan` shows that of a CPU.")
    trace, memory = (
        of_rank(place_to_write(path, option, is_file=True), os.environ) if path else None
        for option, path in (("--trace", values["trace"]), ("--memory", values["memory"]))
    )
    for path in (trace, memory):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    place = Path(os.path.abspath(script))
    main, config = read_recipe(place, words)
    is_first = os.environ.get("RANK", "0") == "0"
    shown = _shown(WARM_UP + values["steps"]) if is_first else nullcontext(lambda number: None)
    with errors_refused(place), shown as step_done:
        found = make_profile(main, config, values["steps"], trace, memory, step_done)
    advice = first_change(found, values_of(config))
    if is_first and values["as_json"]:
        say(json.dumps({**asdict(found), "first": advice}, indent=1))
    elif is_first:
        _show(script, found)
        say(advice, style=BOLD)
    for path in (trace, memory):
        if path is not None and not path.is_file():  # torch is silent about it
            path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)  # what torch left
            raise Refusal(f"{path} could not be written: is the disk full?")


@contextmanager
def _shown(total: int) -> Iterator[Callable[[int], None]]:
    """What to call after each step: a bar, and a word of what follows the last; the recipe's own output is hidden meanwhile."""
    say("training for a few steps ...", error=True)
    screen = sys.stderr
    with ExitStack() as bar:
        add = bar.enter_context(progress("Timing steps", "steps", total))

        def step_done(number: int) -> None:
            add(1)
            if number == total:
                bar.close()
                write("looking for the longest operations ...\n", screen)

        yield step_done


def of_rank(path: Path, environment: Mapping[str, str]) -> Path:
    """A file of this rank's own where there are several: trace.json is trace-rank0.json then."""
    several = int(environment.get("WORLD_SIZE", "1")) > 1
    return path.with_name(f"{path.stem}-rank{environment['RANK']}{path.suffix}") if several else path


def _own_options(values: Mapping[str, Any]) -> list[str]:
    """The options of this command, as each rank is given them."""
    named = [f"--{name}={values[name]}" for name in ("steps", "trace", "memory") if values[name] is not None]
    return [*named, *(["--json"] if values["as_json"] else [])]


def _show(script: str, profile: "Profile") -> None:
    ranks = len(profile.ranks)
    speed = f", {profile.tokens_per_second:,.0f} supervised tokens/s" if profile.tokens_per_second else ""
    used = f", MFU {profile.mfu:.1%}" if profile.mfu else ""
    where = f" on {ranks} ranks ({profile.engine})" if ranks else ""
    say(f"{script}{where}: a step takes {1000 * profile.step:.0f} ms{speed}{used} ({profile.device})", style=BOLD)
    for phase, seconds in profile.seconds.items():
        if phase in ("sampling", "scoring") and profile.share(phase) < 0.001:  # of recipes that have it
            continue
        bar = "#" * round(40 * profile.share(phase))
        late = f"{_ms(profile.slowest(phase)[1])} on rank {profile.slowest(phase)[0]}" if differs(profile, phase) else ""
        say(f"  {phase:<15}{_ms(seconds)}{profile.share(phase):>7.1%}{f'  {late:<24}' if ranks else ''}  {bar}".rstrip())
        if phase == "communication" and seconds:
            for what, share in (("waiting", profile.waiting), ("transfer", 1 - profile.waiting)):
                say(f"    {what:<13}{_ms(share * seconds)}{share * profile.share(phase):>7.1%}")
    if profile.busy is not None:
        say(f"  the GPU computes for{_ms(profile.busy).rstrip()} of it")
    if profile.padding:
        say(f"  padding: up to {profile.padding:.0%} of the positions of a step")
    say(f"  saving: {_saving(profile)}")
    say("longest operations, of the time in all of them:")
    for name, share, calls in profile.operations:
        say(f"  {share:>6.1%}  {calls:>8.0f} calls a step  {name[:80]}")


def _saving(profile: "Profile") -> str:
    from toolkit.report.numbers import show_seconds
    from toolkit.system.numbers import show_bytes

    saving = profile.saving
    if saving is None:
        return f"not measured: {profile.not_saved}"
    behind = saving.written > 1.1 * saving.seconds
    background = f", and {show_seconds(saving.written)} until it is written" if behind else ""
    count = f"{saving.saves:,} in {saving.steps:,} steps, {saving.share:.1%} of the run" if saving.saves else "the run has none"
    return f"{show_seconds(saving.seconds)} for a checkpoint of {show_bytes(saving.size)}{background}; {count}"


def differs(profile: "Profile", phase: str) -> bool:
    """Whether one of several ranks needs much more for a phase than their mean: a tenth of it, and a hundredth of the step."""
    more = profile.slowest(phase)[1] - profile.seconds[phase] if profile.ranks else 0.0
    return more > max(0.1 * profile.seconds[phase], 0.01 * profile.step)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:>9.1f} ms"
