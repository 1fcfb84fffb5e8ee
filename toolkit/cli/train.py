"""toolkit train: run a recipe, as one process or as several, with its signals and its exit code."""

import shlex
import sys
from typing import Annotated

import typer

from toolkit.cli.recipe_file import find_recipe, split_processes
from toolkit.launch import launch


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="The name of a recipe, such as sft, or the path of one.")],
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[FLAGS]", help="The recipe's own; toolkit train RECIPE --help lists them.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes on this machine, one for each GPU.")] = 1,
) -> None:
    """Run a recipe.

    Ends with the recipe's exit code: 0 finished, 2 refused, 75 stopped by a signal after a checkpoint. SIGTERM, SIGUSR1 and
    Ctrl-C stop it; a second one ends it at once.
    """
    words, processes = split_processes(flags or [], processes)
    script = find_recipe(recipe)
    if {"-h", "--help"} & set(words):
        processes = 1
    else:
        print(_shown(script, words, processes), file=sys.stderr, flush=True)
    raise typer.Exit(launch([sys.executable, script, *words], processes))


def _shown(script: str, words: list[str], processes: int) -> str:
    """What is started, as it would be typed without `toolkit train`."""
    if processes == 1:
        return f"starting: {shlex.join(['python', script, *words])}"
    starter = ["torchrun", "--standalone", "--nproc-per-node", str(processes)]
    return f"starting {processes} processes, as would: {shlex.join([*starter, script, *words])}"
