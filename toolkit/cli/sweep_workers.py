"""The workers of a sweep that start elsewhere, later: what each of them types, refused here as it would be there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from toolkit.cli.sweep import NOT_OF_A_RECIPE, OF_AN_AGENT, sweep
from toolkit.cli.sweep_plan import SweepOptions, check_agent, check_given, make_plan
from toolkit.command_line.recipe_file import split_options, sweep_folder
from toolkit.config.places import place_to_write
from toolkit.sweeps.journal import JOURNAL, read_journal
from toolkit.sweeps.loop import check_same
from toolkit.sweeps.storage import open_journal


def words_of_a_worker(script: str, words: Sequence[str], workers: int) -> tuple[list[str], Path]:
    """What is typed after `toolkit sweep` for one of several workers, and the sweep's directory; starts and writes nothing.

    The words are a recipe file's flags and options of `toolkit sweep`. Unless they set how many trials run at a time, one
    does on each worker, and a proposal has the results of all but those.

    Raises:
        Refusal, typer.BadParameter: what `toolkit sweep` refuses before its first trial.
    """
    context = _command().make_context("toolkit sweep", [script, *words])
    flags, values = split_options(context, context.params["flags"] or [])
    folder = sweep_folder(script, values["sweep_dir"])
    if values["wandb"] is not None:
        check_given(context, values, OF_AN_AGENT, "--wandb, where the W&B sweep decides")
        check_agent(flags, values["wandb"])
        return [script, *words], folder
    check_given(context, values, values.keys() - NOT_OF_A_RECIPE, "a recipe")
    parallel = values["parallel"] or workers
    spread = [] if values["parallel"] else ["--parallel", str(parallel)]
    spread += [] if values["slots"] else ["--slots", str(-(-parallel // workers))]
    plan = make_plan(script, flags, SweepOptions.of({**values, "parallel": parallel}))
    place_to_write(folder, "--sweep-dir")
    if (folder / JOURNAL).exists():  # one in a database may be out of reach from here
        before, _ = read_journal(open_journal(folder, values["storage"], must_exist=True))
        check_same(before, plan)
    return [script, *words, *spread], folder


def _command() -> Any:
    app = typer.Typer(add_completion=False)
    app.command("sweep", context_settings={"allow_interspersed_args": False})(sweep)
    return typer.main.get_command(app)
