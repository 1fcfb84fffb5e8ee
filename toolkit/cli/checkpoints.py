"""toolkit checkpoints: which checkpoints a run has, and whether they are whole."""

from pathlib import Path
from typing import Annotated

import typer


def checkpoints(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A run's output directory, or the checkpoints folder in it.", show_default=False),
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte (SHA-256); else sizes are compared.")] = False,
) -> None:
    """List the checkpoints of a run.

    Ends with 1 when one is damaged, with 2 when there is none.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from toolkit.checkpoint import list_checkpoints, read_pointer, verify_checkpoint

    root = directory / "checkpoints" if (directory / "checkpoints").is_dir() else directory
    found = list_checkpoints(root)
    if not found:
        raise typer.BadParameter(f"{directory}: no checkpoint in there.", param_hint="DIR")
    named = {name: read_pointer(root, name) for name in ("best", "last")}
    table = Table("step", "size", "every byte" if verify else "sizes", "best", "last", highlight=False)
    table.columns[0].justify = table.columns[1].justify = "right"
    damaged = 0
    for path in found:
        problems = verify_checkpoint(path, contents=verify)
        damaged += bool(problems)
        state = Text("\n".join(problem.replace(f"{path}/", "") for problem in problems) or "whole")
        marks = ["yes" if target and target.name == path.name else "" for target in named.values()]
        table.add_row(path.name.removeprefix("step-"), _size(path), state, *marks, style="red" if problems else None)
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has no columns to break lines for
    console.print(table)
    if damaged:
        raise typer.Exit(1)


def _size(path: Path) -> str:
    return f"{sum(file.stat().st_size for file in path.rglob('*') if file.is_file()) / 1e6:,.1f} MB"
