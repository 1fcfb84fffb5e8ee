"""toolkit find-learning-rate: at which rates a recipe learns, and where it fails."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.command_line.recipe_file import Flags, Recipe, recipe_and_options, without_flags
from toolkit.system.console import BOLD, as_typed, say
from toolkit.system.progress import progress

if TYPE_CHECKING:
    from toolkit.diagnostics.learning_rate import RangeTest

_LINES = 16


def find_learning_rate(
    context: typer.Context,
    recipe: Recipe,
    flags: Flags = None,
    steps: Annotated[int, typer.Option(help="How many steps the rate rises for.", min=20, max=100_000)] = 100,
    plot: Annotated[Path | None, typer.Option(help="Write the curve as an SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a recipe while its learning rate rises from 1e-6 to 1, and suggest a rate (a range test).

    One process, in a temporary directory, without evaluation and saving: your runs are left alone. The rates of several groups
    keep their ratio.
    """
    script, words, values = recipe_and_options(context, recipe, flags)
    from toolkit.command_line.recipe import errors_refused, read_recipe
    from toolkit.config.places import place_to_write
    from toolkit.config.setting import settings_of
    from toolkit.diagnostics.learning_rate import NoRate, draw, find_learning_rate as find

    target = place_to_write(values["plot"], "--plot", is_file=True) if values["plot"] else None
    place = Path(os.path.abspath(script))
    main, config = read_recipe(place, words)
    say(f"training for {values['steps']} steps ...", error=True)
    try:
        with errors_refused(place), progress("Training", "steps", values["steps"]) as add:
            found = find(main, config, values["steps"], add)
    except NoRate as refused:
        if target is not None and refused.curve.rates:
            _write(draw(refused.curve), target)
            say(f"the curve is in {target}", error=True)
        raise
    if target is not None:
        _write(draw(found), target)
    if values["as_json"]:
        say(json.dumps(vars(found), indent=1))
        return
    _show(found)
    if target is not None:
        say(f"the curve is in {target}")
    others = without_flags(words, {"learning_rate"}, settings_of(type(config)))
    say(as_typed("toolkit", "train", recipe, *others, "--learning-rate", f"{found.suggested:g}"), style=BOLD)


def _write(curve: str, target: Path) -> None:
    from toolkit.config.places import unwritable

    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.write_text(curve, encoding="utf-8")
    except OSError as error:
        raise unwritable(target, "--plot", error) from error


def _show(found: "RangeTest") -> None:
    low, high = min(found.smoothed), max(found.smoothed)
    every = max(1, -(-len(found.rates) // _LINES))
    for number in range(0, len(found.rates), every):
        loss = found.smoothed[number]
        say(f"  {found.rates[number]:9.1e}{loss:10.4f}  {'#' * round(40 * (loss - low) / (high - low))}")
    if found.fall < 0.05:
        say(f"the loss fell by {found.fall:.1%} alone, which may be chance: take more --steps.")
    say(f"the loss falls fastest at {found.steepest:.1e} and is lowest at {found.lowest:.1e}; a tenth of that is usual")
