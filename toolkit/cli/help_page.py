"""The Typer command of a recipe, made from its settings, and its help page: a panel for each group."""

import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from toolkit.config.setting import Setting, describe, show_value
from toolkit.config.values import flag_of

_WIDEST = 110  # columns; longer lines are hard to read
_OWN_PANEL = "Command line"
_FOOTNOTE = (
    "Flags take - or _ alike. A switch is --packing, --no-packing or --packing true|false; a list is a,b or the flag "
    "repeated, or JSON; none clears a value. Flags win over --config, whose keys are the same names."
)
_NO_BREAK = "\N{NO-BREAK SPACE}"
_ASCII_BOX = str.maketrans("╭╮╰╯─│", "++++-|")


def build_command(settings: Mapping[str, Setting], description: str) -> TyperCommand:
    """A Typer command that returns what was typed, as texts by name (lists of texts for lists), None where nothing was.

    Texts, since one reader gives values their meaning wherever they come from: see `toolkit.config.values`.
    """
    parameters = [
        *(_parameter(each.name, each.is_list, each.flag, _help(each), each.panel) for each in settings.values()),
        _parameter("config", False, "--config", "YAML file of settings.", _OWN_PANEL),
        *(
            _parameter(alias, each.is_list, flag_of(alias), "", each.panel, hidden=True)
            for each in settings.values()
            for alias in each.aliases
        ),
    ]

    def command(**written: Any) -> dict[str, Any]:
        return written

    # Typer reads the signature, and wants real annotations in it, not texts.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(cls=_RecipeCommand)(command)
    built = typer.main.get_command(app)
    assert isinstance(built, TyperCommand)
    built.help = description.strip()  # as it stands: Typer's cleandoc would take the indent off a module's example commands
    return built


class _RecipeCommand(TyperCommand):
    """Draws its own panels: Typer's have four columns, which leaves 20 characters for the text in a terminal of 80, and
    Rich takes half of the half second in which a help page should be there."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        width = min(shutil.get_terminal_size().columns, _WIDEST)
        panels: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            if not getattr(option, "hidden", False):
                title = getattr(option, "rich_help_panel", None) or _OWN_PANEL
                panels.setdefault(title, []).append((option.opts[0], getattr(option, "help", None) or ""))
        flag_width = max(len(flag) for rows in panels.values() for flag, _ in rows)
        page = "\n".join([
            "",
            typer.style(f" Usage: python {sys.argv[0]} [--config FILE] [--SETTING VALUE] ...", bold=True),
            "",
            *(f"{_paragraph(text, width)}\n" for text in (self.help or "").split("\n\n")),
            *(line for title, rows in panels.items() for line in _panel(title, rows, flag_width, width)),
            _paragraph(_FOOTNOTE, width),
        ])
        if not (sys.stdout.encoding or "").lower().startswith("utf"):
            page = page.translate(_ASCII_BOX)
        # echo leaves the colours out by itself where no terminal shows them
        typer.echo(page, color=False if "NO_COLOR" in os.environ else None)


def _paragraph(text: str, width: int) -> str:
    """Wrapped prose; indented lines are commands to copy, and stay whole."""
    if any(line.startswith(" ") for line in text.splitlines()):
        return text
    return textwrap.fill(text, width - 1, initial_indent=" ", subsequent_indent=" ", break_on_hyphens=False)


def _panel(title: str, rows: list[tuple[str, str]], flag_width: int, width: int) -> list[str]:
    text_width = max(width - flag_width - 6, 20)  # without the borders, the space inside them, and the gap
    inside = flag_width + 2 + text_width
    lines = [f"╭─ {typer.style(title, bold=True)} " + "─" * (inside - len(title) - 1) + "╮"]
    for flag, text in rows:
        prose, opening, closing = text.rpartition(" [")
        default = f"[{closing}" if opening else ""
        unbroken = f"{prose or text} {default.replace(' ', _NO_BREAK)}" if opening else text
        for number, line in enumerate(textwrap.wrap(unbroken, text_width, break_on_hyphens=False)):
            shown = line.replace(_NO_BREAK, " ")
            padding = " " * (text_width - len(shown))
            if default:
                shown = shown.replace(default, typer.style(default, dim=True))
            left = typer.style(f"{'' if number else flag:<{flag_width}}", fg="cyan", bold=True)
            lines.append(f"│ {left}  {shown}{padding} │")
    return [*lines, "╰" + "─" * (inside + 2) + "╯"]


def _parameter(name: str, is_list: bool, flag: str, help: str, panel: str, hidden: bool = False) -> inspect.Parameter:
    option = typer.Option(flag, help=help, rich_help_panel=panel, hidden=hidden, show_default=False)
    kind = list[str] if is_list else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _help(setting: Setting) -> str:
    """The help text, the choices, and the default in brackets; of an optional setting also what it takes."""
    choices = f" One of {', '.join(setting.choices)}." if setting.choices else ""
    if setting.default in (None, []):
        nothing = "none" if setting.default is None else "empty"
        beside = describe(setting) if "Default:" in setting.help else f"{describe(setting)}; default: {nothing}"
    else:
        beside = f"default: {show_value(setting.default)}"
    return f"{setting.help}{choices} [{beside}]"
