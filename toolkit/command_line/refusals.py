"""How a refusal is shown, and a mistake in what was typed."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from toolkit.config import Refusal
from toolkit.system.console import BOLD, RED, printable, styled, write

if TYPE_CHECKING:
    from typer import TyperException


def print_refusal(refusal: Refusal) -> None:
    """The message on standard error: wrapped on a terminal, whole lines in a log, where they are searched for."""
    from toolkit.data.sources.find_files import with_given_paths  # with the readers of compressed files

    _print(f"refused: {with_given_paths(str(refusal))}")


def print_mistake(mistake: TyperException) -> None:
    """Likewise one of Typer's exceptions: what is wrong on the command line, and whose --help has what would be right.

    The exception of a command line without any word has no message: it has shown the help page.
    """
    message = re.sub(r" \(Possible options: (.+)\)$", r". Did you mean one of \1?", mistake.format_message())
    if message:
        context = getattr(mistake, "ctx", None)
        _print(f"refused: {message}" + (f"\n`{context.command_path} --help` lists what can be typed." if context else ""))


def _print(text: str) -> None:
    lines = printable(text).split("\n")
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        lines = [part for line in lines for part in _wrapped(line, width)]
        lines[0] = lines[0].replace("refused:", styled("refused:", f"{BOLD};{RED}", sys.stderr), 1)
    sys.stdout.flush()
    write("\n".join(lines) + "\n", sys.stderr)


def _wrapped(line: str, width: int) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(line, width, subsequent_indent=indent + "  ", break_long_words=False, break_on_hyphens=False) or [""]
