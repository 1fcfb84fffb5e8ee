"""From what is typed after `toolkit train` to a recipe's file, and to the options that are not the recipe's own."""

import os
from collections.abc import Sequence
from pathlib import Path

import typer

import toolkit
from toolkit.config.setting import nearest

_FLAG = "--processes"


def find_recipe(written: str) -> str:
    """The file of a recipe, given as a path or by name: of ./recipes first, where one's own copies lie, then of the toolkit.

    Raises:
        typer.BadParameter: there is none; the message names the nearest one, or all.
    """
    if Path(written).is_file():
        return written
    named = {path.stem: path for folder in reversed(_folders()) for path in sorted(folder.glob("[!_]*.py"))}
    if written in named:
        return os.path.relpath(named[written])
    if written.endswith(".py") or os.sep in written:
        near = nearest(Path(written).stem, named)
        hint = f" Did you mean {near}, which is {os.path.relpath(named[near])}?" if near else ""
        raise typer.BadParameter(f"{written}: no such file.{hint}", param_hint="RECIPE")
    near = nearest(written, named)
    hint = f"Did you mean {near}?" if near else f"There are {', '.join(named)}; or give the path of a file."
    raise typer.BadParameter(f"{written}: no recipe of that name. {hint}", param_hint="RECIPE")


def split_processes(words: Sequence[str], processes: int) -> tuple[list[str], int]:
    """The words after RECIPE without --processes, which may stand among them, and the number it gives.

    Raises:
        typer.BadParameter: it gives none.
    """
    kept: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        if flag != _FLAG:
            kept.append(word)
            continue
        text = text if equals else rest.pop(0) if rest else ""
        if not text.isdecimal() or int(text) < 1:
            raise typer.BadParameter(f"{text or 'nothing'}: must be a whole number of at least 1.", param_hint=_FLAG)
        processes = int(text)
    return kept, processes


def _folders() -> list[Path]:
    return [Path("recipes"), Path(toolkit.__file__).resolve().parents[1] / "recipes"]
