"""Commands that are imported when they are called, and the look of their help pages."""

import importlib
import signal
from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from toolkit.cli.compat import set_classes, without_pydantic
from toolkit.command_line.help_page import Row, show_page
from toolkit.system.interruptions import Terminated

LOOK: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
Table = Mapping[str, Mapping[str, tuple[str, str]]]  # panel -> command -> (module:function, its line of help)


class Command(TyperCommand):
    """A command whose help page is drawn in panels, and whose texts and paths are taken without pydantic."""

    def get_params(self, ctx: Any) -> list[Any]:
        """With Typer's own --help."""
        return [without_pydantic(parameter) for parameter in super().get_params(ctx)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        show_page(_usage(self, ctx), self.help or "", _panels(self, ctx))


class Stopped(Exception):
    """Ctrl-C or SIGTERM ended a command before its own end: its name, and the signal."""

    def __init__(self, command: str, number: signal.Signals) -> None:
        self.command, self.number = command, number


class Group(TyperGroup):
    """A group of commands, likewise."""

    _names_command = False

    def invoke(self, ctx: Any) -> Any:
        """Typer (0.29) ends in silence where a KeyboardInterrupt comes to it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            number = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
            raise Stopped(ctx.invoked_subcommand or "", number) from stop

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Typer (0.29) imports pydantic, a quarter of a second, to convert options also when nobody typed them.
        self._names_command = bool(args) and not args[0].startswith("-")
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """None of the group's own options where the first word is a command: all of them print something and exit."""
        return [] if self._names_command else super().get_params(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, command.get_short_help_str(limit=200)) for name, command in self.commands.items() if not command.hidden]
        show_page(_usage(self, ctx), self.help or "", {"Commands": rows, **_panels(self, ctx)})


def lazy_group(
    table: Table, flags_follow: frozenset[str] = frozenset(), elsewhere: Callable[[str], str] = lambda word: ""
) -> type[Group]:
    """The class of a group whose commands are those of the table; to a Typer app it is `cls`.

    What a row names is a function with Typer's annotations, or a Typer app. Only the command that is called is imported:
    listing, completing and suggesting use the name and the line of each. `flags_follow`: commands whose first argument
    begins what is somebody else's, which Typer must not read. `elsewhere`: what to type for a word that is no command of the
    table but means something, else the empty text.
    """
    places = {name: where for rows in table.values() for name, (where, _) in rows.items()}

    class LazyGroup(Group):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            rows = (row for panel in table.values() for row in panel.items())
            self.commands = {name: Command(name=name, help=line, rich_markup_mode=None) for name, (_, line) in rows}

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
            if args and args[0] not in places and (meant := elsewhere(args[0])):
                ctx.fail(f"No such command '{args[0]}'. Did you mean `{meant}`?")
            name, command, rest = super().resolve_command(ctx, args)
            return name, command and _load(name or "", places[command.name or ""], command.name in flags_follow), rest

        def format_help(self, ctx: Any, formatter: Any) -> None:
            panels = {title: [(name, line) for name, (_, line) in rows.items()] for title, rows in table.items()}
            show_page(_usage(self, ctx), self.help or "", {**panels, **_panels(self, ctx)})

    return LazyGroup


def _load(name: str, where: str, flags_follow: bool) -> Any:
    module, _, attribute = where.partition(":")
    target = getattr(importlib.import_module(module), attribute)
    if isinstance(target, typer.Typer):
        set_classes(target, Group, Command)
        built = typer.main.get_command(target)
        built.name = name
        return built
    app = typer.Typer(add_completion=False, **LOOK)
    app.command(name, cls=Command, context_settings={"allow_interspersed_args": not flags_follow})(target)
    return typer.main.get_command(app)


def _usage(command: Any, ctx: Any) -> str:
    pieces = " ".join(command.collect_usage_pieces(ctx))
    for brackets, plain in (("{", ""), ("}", ""), ("[[", "["), ("]]", "]")):  # RECIPE, where Typer has {RECIPE}
        pieces = pieces.replace(brackets, plain)
    return f"{ctx.command_path} {pieces}"


def _panels(command: Any, ctx: Any) -> dict[str, list[Row]]:
    """Arguments and options, as Typer describes them: flag and metavar, then the text with its default in brackets."""
    panels: dict[str, list[Row]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            is_argument = parameter.param_type_name == "argument"
            name = record[0].split(" <")[0] if is_argument else record[0]
            panels["Arguments" if is_argument else "Options"].append((name, record[1].replace("  [", " [").strip()))
    return {title: rows for title, rows in panels.items() if rows}
