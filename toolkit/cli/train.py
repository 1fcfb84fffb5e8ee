"""toolkit train: run a recipe, as one process or as several, with its signals and its exit code."""

import sys
from pathlib import Path

import typer

from toolkit.command_line.placement import (
    ConfigFile,
    MainAddress,
    MainPort,
    NodeCount,
    NodeRank,
    Processes,
    placement_of,
    what_is_started,
)
from toolkit.command_line.recipe_file import Flags, Recipe, find_recipe, near_own_option, split_options
from toolkit.distributed.launch import REFUSED, launch
from toolkit.system.console import say
from toolkit.system.standard_streams import outlive_the_log


def train(
    context: typer.Context, recipe: Recipe, flags: Flags = None, processes: Processes = None,
    accelerate_config: ConfigFile = None, nodes: NodeCount = None, node_rank: NodeRank = None, main_address: MainAddress = None,
    main_port: MainPort = None,
) -> None:  # fmt: skip
    """Run a recipe. The options below may be before RECIPE or among its flags.

    Ends with the recipe's exit code: 0 finished, 2 refused, 75 stopped by a signal after a checkpoint. SIGTERM, SIGUSR1 and
    Ctrl-C stop it; a second one ends it at once.
    """
    words, values = split_options(context, flags or [])
    script = find_recipe(recipe)
    if {"-h", "--help"} & set(words):
        code = _show_help(script, words)
        own = [flag for option in context.command.params for flag in option.opts if flag.startswith("--")]
        say(f"\nOptions of `{context.command_path}`, which may be among these: {', '.join(own)}.\n"
              f"`{context.command_path} --help` has more.")  # fmt: skip
        raise typer.Exit(code)
    placement = placement_of(values)
    outlive_the_log()
    say(what_is_started(placement, script, words), error=True)
    command = [sys.executable, script, *words]
    code = launch(command, placement.processes, placement.nodes, environment=placement.environment)
    if code == REFUSED and (meant := near_own_option(context, words)):
        say(meant, error=True)
    raise typer.Exit(code)


def _show_help(script: str, words: list[str]) -> int:
    """The recipe in this process, which has imported what it needs for that; its exit code."""
    import runpy

    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).resolve().parent))  # as `python script` does
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            say(end.code, error=True)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
