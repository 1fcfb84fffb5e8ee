"""From what is typed after `toolkit train` to files, and to the options that are not the recipe's own."""

import difflib
import os
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.config.setting import Setting, nearest, spellings_of
from toolkit.distributed.launch import launch
from toolkit.runs.copies import KINDS, is_copy, own_files, recipes_folder


def find_recipe(written: str, command: str = "toolkit train") -> str:
    """The file of a recipe, given as a path or by name: a copy in this folder, one of ./recipes, or one of the toolkit's.

    `command` is what a suggestion begins with.

    Raises:
        typer.BadParameter: there is none; the message names the nearest one, or all. Or the file is no Python.
    """
    copied = Path(f"{written}.py")
    if is_copy(copied):  # who has copied and edited sft means that
        return str(copied)
    found = _find(written, "[!_]*.py", "recipe", "RECIPE", _folders())
    if Path(found).suffix != ".py":  # data, of which Python would run what it can read
        raise typer.BadParameter(f"{found}: is not a Python file.{_meant_with(found, command)}", param_hint="RECIPE")
    return found


def sweep_folder(script: str, asked: str | None) -> Path:
    """Where a sweep of a recipe is written: --sweep-dir, else sweeps/RECIPE."""
    return Path(asked) if asked else Path("sweeps") / Path(script).stem


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
        metavar="RECIPE", help="The name of a recipe, such as sft, or the path of one.", autocompletion=complete_recipe
    ),
]
Flags = Annotated[
    list[str] | None, typer.Argument(metavar="[FLAGS]", help="The recipe's own; toolkit train RECIPE --help lists them.")
]


def split_options(context: typer.Context, words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The words after RECIPE without the command's own options, which may be among them, and the values of all of these.

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
        if getattr(option, "is_flag", False):
            values[option.name] = True
            continue
        if not equals and not rest:
            raise typer.BadParameter("a value must follow.", param_hint=flag)
        value = text if equals else rest.pop(0)
        if option.multiple:
            values[option.name] = [*(values[option.name] or []), value]
        else:
            values[option.name] = option.process_value(context, value)
    return kept, values


def recipe_and_options(
    context: typer.Context, recipe: str, flags: Sequence[str] | None
) -> tuple[str, list[str], dict[str, Any]]:
    """For a command that looks at a recipe: its file, its flags, and the values of the command's own options.

    With --help among the flags the recipe's own is shown, and the command ends.
    """
    words, values = split_options(context, flags or [])
    script = find_recipe(recipe, context.command_path)
    if {"-h", "--help"} & set(words):
        raise typer.Exit(launch([sys.executable, script, "--help"]))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return script, words, values


def without_flags(words: Sequence[str], changed: Collection[str], settings: Mapping[str, Setting]) -> list[str]:
    """A recipe's words without the settings that are changed, by any of their names and in any form."""
    spellings, kept, is_value = spellings_of(settings), list[str](), False
    for word in words:
        flag, equals, _ = word.partition("=")
        name = flag[2:].replace("-", "_")
        setting = spellings.get(name) or spellings.get(name.removeprefix("no_"))
        is_flag = word.startswith("--")
        is_changed = is_flag and setting is not None and setting.name in changed
        if not is_changed and (is_flag or not is_value):
            kept.append(word)
        is_value = is_changed and not equals
    return kept


def _meant_with(file: str, command: str) -> str:
    """What was probably meant by naming data or settings in the place of a recipe."""
    from toolkit.data.sources.files import DataFile

    shown = shlex.quote(file)
    if Path(file).suffix.lower() in (".yaml", ".yml"):
        return f" Did you mean `{command} {_recipe_of(Path(file))} --config {shown}`?"
    return f" Did you mean `{command} sft --dataset {shown}`?" if DataFile(file, "").ending else ""


def _recipe_of(settings: Path) -> str:
    """The recipe that a YAML of settings names in its comments or its own name; else a word in its place."""
    names = sorted({path.stem for folder in _folders() for path in folder.glob("[!_]*.py")}, key=len, reverse=True)
    try:
        comments = " ".join(line for line in settings.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    except (OSError, UnicodeDecodeError):
        comments = ""
    named = re.search(r"recipes/(\w+)\.py", comments)
    if named and named[1] in names:
        return named[1]
    words = re.split(r"[^a-z0-9]+", settings.stem.lower())
    return next((name for name in names if name in words), "RECIPE")


def near_own_option(context: typer.Context, words: Sequence[str]) -> str:
    """A question for one who mistyped one of the command's own options among the recipe's flags; empty where nobody seems to.

    For when the recipe has refused its flags: until then such a word may be a setting of a recipe that is not known here.
    """
    options = [flag for option in context.command.params for flag in option.opts if flag.startswith("--")]
    for word in words:
        near = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), options, n=1, cutoff=0.8)
        if word.startswith("--") and near:
            return f"{word.partition('=')[0]}: did you mean {near[0]}, an option of `{context.command_path}` itself?"
    return ""


def _find(written: str, pattern: str, kind: str, hint: str, folders: list[Path]) -> str:
    if Path(written).is_file():
        return written
    named: Mapping[str, Path] = {path.stem: path for folder in reversed(folders) for path in sorted(folder.glob(pattern))}
    if written in named:
        return os.path.relpath(named[written])
    if Path(written).is_dir():
        raise typer.BadParameter(f"{written}: is a folder; give a {kind}: its name, or the path of its file.", param_hint=hint)
    near = nearest(Path(written).stem, named)
    if Path(written).suffix in (".py", ".yaml", ".yml", ".json") or os.sep in written:
        meant = f" Did you mean {near}, which is {os.path.relpath(named[near])}?" if near else ""
        raise typer.BadParameter(f"{written}: no such file.{meant}", param_hint=hint)
    meant = f"Did you mean {near}?" if near else f"There are {', '.join(sorted(named))}; or give the path of a file."
    raise typer.BadParameter(f"{written}: no {kind} of that name. {meant}", param_hint=hint)


def _folders() -> list[Path]:
    return [Path("recipes"), recipes_folder()]
