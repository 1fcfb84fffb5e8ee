"""toolkit checkpoints: which checkpoints a run has, and whether they are whole."""

from pathlib import Path
from typing import Annotated

import typer

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
    rows, damaged = [["step", "size", "every byte" if verify else "sizes", "best", "last"]], 0
    for path in found:
        problems = verify_checkpoint(path, contents=verify)
        damaged += bool(problems)
        state = "; ".join(problem.replace(f"{path}/", "") for problem in problems) or "whole"
        marks = ["yes" if target and target.name == path.name else "" for target in named.values()]
        rows.append([path.name.removeprefix("step-"), _size(path), state, *marks])
    for number, line in enumerate(_table(rows)):
        say(line, style=RED if number > 1 and rows[number - 1][2] != "whole" else "")
    if damaged:
        raise typer.Exit(1)


def _size(path: Path) -> str:
    return f"{sum(file.stat().st_size for file in path.rglob('*') if file.is_file()) / 1e6:,.1f} MB"


def _table(rows: list[list[str]]) -> list[str]:
    """Aligned, with a line under its head. Rich would take as long to import as all else together."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ([row[i].rjust(widths[i]) if i < 2 else row[i].ljust(widths[i]) for i in range(len(widths))] for row in rows)
    lines = [f"| {' | '.join(cells)} |" for cells in aligned]
    return [lines[0], f"|-{'-|-'.join('-' * width for width in widths)}-|", *lines[1:]]
