"""From what is typed after `toolkit train` to files, and to the options that are not the recipe's own."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.config.setting import nearest
from toolkit.copies import KINDS, is_copy, own_files, recipes_folder


def find_recipe(written: str) -> str:
    """The file of a recipe, given as a path or by name: a copy in this folder, one of ./recipes, or one of the toolkit's.

    Raises:
        typer.BadParameter: there is none; the message names the nearest one, or all.
    """
    copied = Path(f"{written}.py")
    if is_copy(copied):  # who has copied and edited sft means that
        return str(copied)
    return _find(written, "[!_]*.py", "recipe", "RECIPE", _folders())


def find_accelerate_config(written: str) -> str:
    """The same for an Accelerate config file; the named ones lie in recipes/launch."""
    folders = [folder / "launch" for folder in _folders()]
    return _find(written, "*.yaml", "Accelerate config", "--accelerate-config", folders)


def complete_recipe(incomplete: str) -> list[str]:
    """For the shell: the names of recipes that begin so."""
    names = {path.stem for folder in _folders() for path in folder.glob("[!_]*.py")}
    return sorted(name for name in names if name.startswith(incomplete))


def complete_accelerate_config(incomplete: str) -> list[str]:
    """The same for Accelerate config files."""
    names = {path.stem for folder in _folders() for path in folder.glob("launch/*.yaml")}
    return sorted(name for name in names if name.startswith(incomplete))


def complete_own_file(incomplete: str) -> list[str]:
    """The same for all that can be copied."""
    return [name for kind in KINDS for name in own_files(kind) if name.startswith(incomplete)]


Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="The name of a recipe, such as sft, or the path of one.", autocompletion=complete_recipe,
        show_default=False,
    ),
]  # fmt: skip


def split_options(context: typer.Context, words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The words after RECIPE without the command's own options, which may stand among them, and the values of all of these.

    An option among the words wins over the same one before RECIPE.

    Raises:
        typer.BadParameter: a value is missing, or isn't one that the option takes.
    """
    options = {flag: option for option in context.command.params for flag in option.opts if flag.startswith("--")}
    values, kept, rest = dict(context.params), list[str](), list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        option = options.get(flag.replace("_", "-"))
        if option is None or option.name is None:
            kept.append(word)
            continue
        if not equals and not rest:
            raise typer.BadParameter("a value must follow.", param_hint=flag)
        values[option.name] = option.process_value(context, text if equals else rest.pop(0))
    return kept, values


def _find(written: str, pattern: str, kind: str, hint: str, folders: list[Path]) -> str:
    if Path(written).is_file():
        return written
    named: Mapping[str, Path] = {path.stem: path for folder in reversed(folders) for path in sorted(folder.glob(pattern))}
    if written in named:
        return os.path.relpath(named[written])
    near = nearest(Path(written).stem, named)
    if Path(written).suffix in (".py", ".yaml", ".yml", ".json") or os.sep in written:
        meant = f" Did you mean {near}, which is {os.path.relpath(named[near])}?" if near else ""
        raise typer.BadParameter(f"{written}: no such file.{meant}", param_hint=hint)
    meant = f"Did you mean {near}?" if near else f"There are {', '.join(sorted(named))}; or give the path of a file."
    raise typer.BadParameter(f"{written}: no {kind} of that name. {meant}", param_hint=hint)


def _folders() -> list[Path]:
    return [Path("recipes"), recipes_folder()]
