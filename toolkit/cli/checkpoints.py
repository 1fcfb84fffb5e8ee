"""toolkit checkpoints: which checkpoints a run has, and whether they are whole."""

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.table import table
from toolkit.system.console import RED, say


def checkpoints(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run's output directory, or the checkpoints folder in it.")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte (SHA-256); else sizes are compared.")] = False,
) -> None:
    """List the checkpoints of a run.

    Ends with 1 when one is damaged, with 2 when there is none.
    """
    from toolkit.checkpoint import list_checkpoints, read_pointer, verify_checkpoint

    root = directory / "checkpoints" if (directory / "checkpoints").is_dir() else directory
    found = list_checkpoints(root)
    if not found:
        raise typer.BadParameter(f"{directory}: no checkpoint in there.", param_hint="DIR")
    named = {name: read_pointer(root, name) for name in ("best", "last")}
    rows, damaged = [["step", "size", "every byte" if verify else "sizes", ""]], 0
    for path in found:
        problems = verify_checkpoint(path, contents=verify)
        damaged += bool(problems)
        state = "; ".join(problem.replace(f"{path}/", "") for problem in problems) or "whole"
        marks = " ".join(name for name, target in named.items() if target and target.name == path.name)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        rows.append([path.name.removeprefix("step-"), f"{size / 1e6:,.1f} MB", state, marks])
    for row, line in zip(rows, table(rows, right=frozenset({0, 1})), strict=True):
        say(line, style="" if row is rows[0] or row[2] == "whole" else RED)
    if damaged:
        raise typer.Exit(1)
