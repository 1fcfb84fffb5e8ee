"""The Typer command of a recipe, made from its settings, and its help page: a panel for each group."""

import inspect
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from toolkit.cli.panels import Row, show_page
from toolkit.config.setting import Setting, describe, show_value
from toolkit.config.values import flag_of
from toolkit.system.console import as_typed

_OWN_PANEL = "Command line"
_FOOTNOTE = (
    "Flags take - or _ alike. A switch is --packing, --no-packing or --packing true|false; a list is a,b or the flag "
    "repeated, or JSON; none clears a value. Flags win over --config, whose keys are the same names."
)


def build_command(settings: Mapping[str, Setting], description: str) -> TyperCommand:
    """A Typer command that returns what was typed, as texts by name (lists of texts for lists), None where nothing was.

    Texts, since one reader gives values their meaning wherever they come from: see `toolkit.config.values`.
    """
    parameters = [
        *(_parameter(each.name, each.is_list, each.flag, _help(each), each.panel) for each in settings.values()),
        _parameter("config", False, "--config", "YAML or JSON file of settings.", _OWN_PANEL),
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
        panels: dict[str, list[Row]] = {}
        for option in self.get_params(ctx):
            if not getattr(option, "hidden", False):
                title = getattr(option, "rich_help_panel", None) or _OWN_PANEL
                panels.setdefault(title, []).append((option.opts[0], getattr(option, "help", None) or ""))
        usage = f"{as_typed('python', sys.argv[0])} [--config FILE] [--SETTING VALUE] ..."
        show_page(usage, self.help or "", panels, _FOOTNOTE)


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
