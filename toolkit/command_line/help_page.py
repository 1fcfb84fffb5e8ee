"""Help pages in panels, as Rich draws them: without Rich and Typer, which take longer to import than a help page may."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping

from toolkit.config.setting import Setting, show_value
from toolkit.config.values import describe
from toolkit.system.console import BOLD, CYAN, DIM, as_typed, styled, write

_WIDEST = 110  # columns; longer lines are hard to read
_NO_BREAK = "\N{NO-BREAK SPACE}"
_ASCII_BOX = str.maketrans("╭╮╰╯─│…", "++++-|.")
_FOOTNOTE = (
    "Flags take - or _ alike. A switch is --packing, --no-packing or --packing true|false; a list is a,b or the flag "
    "repeated, or JSON; none clears a value. Flags win over --config, whose keys are the same names."
)
Row = tuple[str, str]  # a name or flag, and its text, whose last words may be a default in brackets


def show_page(usage: str, prose: str, panels: dict[str, list[Row]], footnote: str = "") -> None:
    """Print a help page: how it is called, what it does, a panel for each group of rows, and a last word."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    flag_width = max((len(flag) for rows in panels.values() for flag, _ in rows), default=0)
    flag_width = min(flag_width, max(width // 2 - 6, 14))
    page = "\n".join(
        [
            "",
            *_lines(usage, width),
            "",
            *(f"{_paragraph(text, width)}\n" for text in prose.split("\n\n") if text.strip()),
            *(line for title, rows in panels.items() for line in _panel(title, rows, flag_width, width)),
            *([_paragraph(footnote, width)] if footnote else []),
        ]
    )
    if not (sys.stdout.encoding or "").lower().startswith("utf"):
        page = page.translate(_ASCII_BOX)
    write(page + "\n", sys.stdout)


def show_settings(settings: Mapping[str, Setting], description: str) -> None:
    """Print a recipe's help page: its docstring, and a panel for each group of its settings."""
    panels: dict[str, list[Row]] = {}
    for each in settings.values():
        panels.setdefault(each.panel, []).append((each.flag, _help(each)))
    panels["Command line"] = [("--config", "YAML or JSON file of settings.")]
    usage = f"{as_typed('python', sys.argv[0])} [--config FILE] [--SETTING VALUE] ..."
    show_page(usage, description.strip(), panels, _FOOTNOTE)


def _lines(usage: str, width: int) -> Iterable[str]:
    lines = textwrap.wrap(f"Usage: {usage}", width - 1, initial_indent=" ", subsequent_indent="   ", break_on_hyphens=False)
    return (styled(line, BOLD, sys.stdout) for line in lines)


def _paragraph(text: str, width: int) -> str:
    """Wrapped prose; indented lines are commands to copy, and stay whole."""
    if any(line.startswith(" ") for line in text.splitlines()):
        return text
    return textwrap.fill(text, width - 1, initial_indent=" ", subsequent_indent=" ", break_on_hyphens=False)


def _panel(title: str, rows: list[Row], flag_width: int, width: int) -> list[str]:
    text_width = max(width - flag_width - 6, 20)  # without the borders, the space inside them, and the gap
    inside = flag_width + 2 + text_width
    lines = [f"╭─ {styled(title, BOLD, sys.stdout)} " + "─" * (inside - len(title) - 1) + "╮"]
    for flag, text in rows:
        prose, opening, closing = text.rpartition(" [")
        default = f"[{closing}" if opening else ""
        unbroken = f"{prose or text} {default.replace(' ', _NO_BREAK)}" if opening else text
        wrapped = textwrap.wrap(unbroken, text_width, break_on_hyphens=False) or [""]
        if len(flag) > flag_width:  # lines of its own
            for part in textwrap.wrap(flag, inside, break_on_hyphens=False):
                lines.append(f"│ {styled(f'{part:<{inside}}', f'{BOLD};{CYAN}', sys.stdout)} │")
            flag = ""
        for number, line in enumerate(wrapped):
            shown = line.replace(_NO_BREAK, " ")
            padding = " " * (text_width - len(shown))
            if default:
                shown = shown.replace(default, styled(default, DIM, sys.stdout))
            left = styled(f"{'' if number else flag:<{flag_width}}", f'{BOLD};{CYAN}', sys.stdout)
            lines.append(f"│ {left}  {shown}{padding} │")
    return [*lines, "╰" + "─" * (inside + 2) + "╯"]


def _help(setting: Setting) -> str:
    """The help text, the choices, and the default in brackets; of an optional setting also what it takes."""
    choices = f" One of {', '.join(setting.choices)}." if setting.choices else ""
    if setting.default in (None, []):
        nothing = "none" if setting.default is None else "empty"
        note = describe(setting) if "Default:" in setting.help else f"{describe(setting)}; default: {nothing}"
    else:
        note = f"default: {show_value(setting.default)}"
    return f"{setting.help}{choices} [{note}]"
