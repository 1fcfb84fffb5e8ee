"""Help pages in panels, as Rich draws them: without Rich, which takes longer to import than a help page may."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable

import typer

_WIDEST = 110  # columns; longer lines are hard to read
_NO_BREAK = "\N{NO-BREAK SPACE}"
_ASCII_BOX = str.maketrans("╭╮╰╯─│…", "++++-|.")
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
    # echo leaves the colors out by itself where no terminal shows them
    typer.echo(page, color=False if "NO_COLOR" in os.environ else None)


def _lines(usage: str, width: int) -> Iterable[str]:
    lines = textwrap.wrap(f"Usage: {usage}", width - 1, initial_indent=" ", subsequent_indent="   ", break_on_hyphens=False)
    return (typer.style(line, bold=True) for line in lines)


def _paragraph(text: str, width: int) -> str:
    """Wrapped prose; indented lines are commands to copy, and stay whole."""
    if any(line.startswith(" ") for line in text.splitlines()):
        return text
    return textwrap.fill(text, width - 1, initial_indent=" ", subsequent_indent=" ", break_on_hyphens=False)


def _panel(title: str, rows: list[Row], flag_width: int, width: int) -> list[str]:
    text_width = max(width - flag_width - 6, 20)  # without the borders, the space inside them, and the gap
    inside = flag_width + 2 + text_width
    lines = [f"╭─ {typer.style(title, bold=True)} " + "─" * (inside - len(title) - 1) + "╮"]
    for flag, text in rows:
        prose, opening, closing = text.rpartition(" [")
        default = f"[{closing}" if opening else ""
        unbroken = f"{prose or text} {default.replace(' ', _NO_BREAK)}" if opening else text
        wrapped = textwrap.wrap(unbroken, text_width, break_on_hyphens=False) or [""]
        if len(flag) > flag_width:  # lines of its own
            for part in textwrap.wrap(flag, inside, break_on_hyphens=False):
                lines.append(f"│ {typer.style(f'{part:<{inside}}', fg='cyan', bold=True)} │")
            flag = ""
        for number, line in enumerate(wrapped):
            shown = line.replace(_NO_BREAK, " ")
            padding = " " * (text_width - len(shown))
            if default:
                shown = shown.replace(default, typer.style(default, dim=True))
            left = typer.style(f"{'' if number else flag:<{flag_width}}", fg="cyan", bold=True)
            lines.append(f"│ {left}  {shown}{padding} │")
    return [*lines, "╰" + "─" * (inside + 2) + "╯"]
