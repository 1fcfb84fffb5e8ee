"""toolkit profile: where the time of a step goes, and what to change first."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli.recipe_file import Recipe, find_recipe, split_options
from toolkit.distributed.launch import launch
from toolkit.system.console import BOLD, say


def profile(
    context: typer.Context,
    recipe: Recipe,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[FLAGS]", help="The recipe's own, as you would train it.")
    ] = None,
    steps: Annotated[int, typer.Option(help="How many steps are timed.", min=3)] = 10,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace (ui.perfetto.dev shows it).")] = None,
    memory: Annotated[Path | None, typer.Option(help="Write a snapshot of CUDA's memory (pytorch.org/memory_viz).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a recipe for a few steps and show where their time goes: data, forward, backward, clipping, optimizer.

    One process, without evaluation and saving; nothing is written but what is asked for. Three steps come before those that are
    timed, and three after them, under torch's profiler, for the longest operations.
    """
    words, values = split_options(context, flags or [])
    script = find_recipe(recipe, context.command_path)
    if {"-h", "--help"} & set(words):
        raise typer.Exit(launch([sys.executable, script, "--help"]))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # it writes lines of its own
    import torch

    from toolkit.cli.recipe import read_recipe
    from toolkit.config import Refusal
    from toolkit.config.reading import values_of
    from toolkit.diagnostics.advice import first_change
    from toolkit.diagnostics.profile import profile as make_profile

    if values["memory"] and not torch.cuda.is_available():
        raise Refusal("--memory: torch records the memory of CUDA devices alone. `toolkit plan` shows that of a CPU.")
    for name in ("trace", "memory"):
        if values[name] and not Path(values[name]).absolute().parent.is_dir():
            raise Refusal(f"--{name} {values[name]}: there is no folder {Path(values[name]).absolute().parent}.")
    main, config = read_recipe(Path(os.path.abspath(script)), words)
    if not values["as_json"]:
        say("training for a few steps ...", error=True)
    found = make_profile(main, config, values["steps"], values["trace"], values["memory"])
    advice = first_change(found, values_of(config))
    if values["as_json"]:
        say(json.dumps({**vars(found), "first": advice}, indent=1))
        return
    _show(script, found)
    say(advice, style=BOLD)


def _show(script: str, profile: Any) -> None:
    speed = f", {profile.tokens_per_second:,.0f} tokens/s" if profile.tokens_per_second else ""
    used = f", MFU {profile.mfu:.1%}" if profile.mfu else ""
    say(f"{script}: a step takes {1000 * profile.step:.0f} ms{speed}{used} ({profile.device})", style=BOLD)
    for phase, seconds in profile.seconds.items():
        say(f"  {phase:<12}{1000 * seconds:>9.1f} ms{profile.share(phase):>7.1%}  {'#' * round(40 * profile.share(phase))}")
    if profile.padding:
        say(f"  padding: up to {profile.padding:.0%} of the positions of a step")
    say("longest operations, of the time in all of them:")
    for name, share, calls in profile.operations:
        say(f"  {share:>6.1%}  {calls:>8.0f} calls a step  {name[:80]}")
