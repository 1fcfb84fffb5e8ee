"""toolkit doctor: whether a recipe trains as its settings claim, tried in a minute on a small version of its model."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.command_line.recipe_file import Flags, Recipe, recipe_and_options
from toolkit.system.console import BOLD, DIM, GREEN, RED, say

_MARKS = {"ok": ("ok", GREEN), "finding": ("WRONG", RED), "skipped": ("--", DIM)}


def doctor(
    context: typer.Context,
    recipe: Recipe,
    flags: Flags = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help="Look at this check alone, in less time: split, masks ... Several may be given."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a recipe for a few steps, on the CPU and with a small version of its model, and look for mistakes.

    Gradients of different splits, labels, masks, ends of texts, padding, learning rates, frozen and forgotten parameters,
    weight decay, evaluation, saving, resuming, types, tokenizer, leaks between splits. Each finding names what to change and,
    where that is known, in which line of the recipe. Nothing is written next to the recipe, nothing is sent.

    Ends with 0 when nothing was found, with 1 when something was, with 2 when the recipe can't be run.
    """
    script, words, values = recipe_and_options(context, recipe, flags)
    from toolkit.command_line.recipe import read_recipe
    from toolkit.diagnostics.doctor import examine
    from toolkit.diagnostics.findings import CHECKS
    from toolkit.diagnostics.watch import Watch

    for name in values["only"] or ():
        if name not in CHECKS:
            raise typer.BadParameter(f"{name}: no check of that name. There are {', '.join(CHECKS)}.", param_hint="--only")
    # Standard output is for the report: DeepSpeed, for instance, writes there when it is imported.
    with Watch(os.path.abspath(script)) as watch, contextlib.redirect_stdout(sys.stderr):
        main, config = read_recipe(Path(os.path.abspath(script)), words)
        report = examine(main, config, watch, lambda text: say(f"  {text} ...", error=True), values["only"] or tuple(CHECKS))
    if values["as_json"]:
        say(json.dumps(report.as_json(), indent=1, ensure_ascii=False))
    else:
        _show(report, script)
    if report.findings:
        raise typer.Exit(1)


def _show(report: Any, script: str) -> None:
    from toolkit.diagnostics.findings import CHECKS

    say(f"{script} with a small model ({report.model}), {report.seconds:.0f} s", style=BOLD)
    for name, asks in CHECKS.items():
        outcome = report.outcomes.get(name)
        if outcome is not None:
            mark, style = _MARKS[outcome.state]
            say(f"  {mark:<6} {asks}" + (f": {outcome.note}" if outcome.note else ""), style=style)
    for finding in report.findings:
        where = os.path.relpath(finding.where) if finding.where else script
        say(f"\n{where}: {finding.what}", style=BOLD)
        say(f"  {finding.change}")
    count = len(report.findings)
    say("\nNothing was found." if not count else f"\n{count} finding{'s' if count > 1 else ''}.")
