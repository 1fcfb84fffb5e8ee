"""toolkit recipes, copy and diff: the recipes that there are, and copies of them to edit."""

import os
from pathlib import Path
from typing import Annotated

import typer

from toolkit.command_line.recipe_file import complete_own_file
from toolkit.config.places import place_to_write
from toolkit.runs.copies import (
    KINDS,
    Changes,
    changes_of,
    find_own_file,
    first_line,
    is_copy,
    make_copy,
    own_files,
    recipes_folder,
    renamed_names,
)
from toolkit.system.console import BOLD, CYAN, GREEN, RED, as_typed, say

_STYLES = {"+": GREEN, "-": RED, "@": CYAN}
_TITLES = {
    "recipes": "Recipes: toolkit train NAME, or to edit one: toolkit copy NAME",
    "configs": "Configs: toolkit copy NAME, then toolkit train RECIPE --config NAME.yaml",
    "launch": "Several processes: toolkit train RECIPE --accelerate-config NAME",
}


def recipes() -> None:
    """List the recipes, configs and launch files that there are, one line each, and where they lie.

    Your own come first: copies in this folder, and the files of ./recipes. A name means yours where you have one.
    """
    copies = {path.stem: path for path in sorted(Path().glob("*.py")) if is_copy(path)}
    own = {path.stem: path for path in sorted(Path("recipes").glob("[!_]*.py")) if path.resolve().parent != recipes_folder()}
    mine = own | copies
    if mine:
        _list("Your recipes", " and ".join(["this folder"] * bool(copies) + ["./recipes"] * bool(own)), mine)
    for kind in KINDS:
        folder = recipes_folder() / KINDS[kind]
        _list(_TITLES[kind], os.fspath(folder), {name: path for name, path in own_files(kind).items() if name not in mine})


def copy(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A name that `toolkit recipes` lists: of a recipe, a config or a launch file.",
            autocompletion=complete_own_file,
        ),
    ],
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="The copy, or a folder for it; default: this folder.")
    ] = None,
) -> None:
    """Copy a recipe, a config or a launch file, to edit it.

    The copy runs from anywhere: python FILE, or toolkit train FILE. Its first line has its origin. The text as it
    is now is kept next to it, in .toolkit/originals, so that `toolkit diff FILE` can separate your changes from what upstream
    did: leave it there, and commit it with the copy. Nothing is overwritten.
    """
    source = find_own_file(recipe)
    target = Path(os.path.expanduser(file or source.name))
    if os.path.isdir(target) or (file or "").endswith(("/", os.sep)):
        target = target / source.name
    target = place_to_write(target, "FILE", is_file=True)
    make_copy(source, target)
    say(f"{target}: a copy of {source.relative_to(recipes_folder()).as_posix()}. {_how_to_use(source, target)}")


def diff(file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `toolkit copy` made.")]) -> None:
    """Show what you changed in a copy, and what upstream changed since it was made.

    What was copied is found in .toolkit/originals next to the file or in a folder above it, or is what is installed where that
    has not changed since. Lines that use a public name which has changed are listed, with what to write.
    """
    changes = changes_of(file)
    _show_changes(file, changes)
    if found := renamed_names(file):
        say(f"\nNames that have changed, in {file}:", style=BOLD)
    for number, line, before, now in found:
        say(f"  {number}: {line}\n      {before} -> {now}")


def _show_changes(file: Path, changes: Changes) -> None:
    origin = changes.origin
    if not changes.original_found:
        say(
            f"What {file} was copied from ({origin.name} of toolkit {origin.version}) is kept nowhere near it, and has changed "
            "since. Compared with what is installed, your changes and upstream's together:"
        )
        _show(changes.yours)
        return
    _show(changes.yours, f"You changed in {file}:", f"You changed nothing in {file}.")
    if changes.upstream is None:
        say(f"Upstream {origin.name} is gone.")
    else:
        nothing = f"Upstream changed nothing in {origin.name} since {origin.version}."
        _show(changes.upstream, f"\nUpstream changed in {origin.name} since {origin.version}:", nothing)


def _list(title: str, place: str, files: dict[str, Path]) -> None:
    say(title, style=BOLD)
    width = max(map(len, files), default=0)
    for name, path in files.items():
        say(f"  {name:<{width}}  {first_line(path)}")
    say(f"  in {place}\n")


def _how_to_use(source: Path, target: Path) -> str:
    if source.suffix == ".py":
        return f"Edit it, and run it: {as_typed('python', target)}"
    flag = "--accelerate-config" if source.parent.name == "launch" else "--config"
    return f"Edit it, and use it: {as_typed('toolkit', 'train', 'RECIPE', flag, target)}"


def _show(lines: list[str], title: str = "", otherwise: str = "") -> None:
    if title or not lines:
        say(title if lines else otherwise)
    for line in lines:
        style = _STYLES.get(line[:1], "")
        say(line, style=f"{BOLD};{style}" if line.startswith(("---", "+++")) else style)
