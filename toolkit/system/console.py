"""Text on its way to the screen or a log: nothing in it commands the terminal, and no password in a URL is shown.

Everything the toolkit prints goes through `say`, because any message may quote data: a column's name, a line of JSON, a path.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from typing import Any, TextIO

DIM, BOLD, RED, GREEN, CYAN, MARKED = "2", "1", "31", "32", "36", "4;32"  # ECMA-48, "select graphic rendition"
_JOINERS = "\u200c\u200d"  # within words and emoji: they join what is next to them, and command nothing
# Before the host; after one slash too, which is what a path makes of the two.
_CREDENTIALS = re.compile(r"""(?:(?<=://)|(?<=[a-zA-Z0-9]{2}:/))(?:(?P<user>[^\s/:@]*):(?!\d{1,5}/)[^\s"',]*|[^\s/@"',]+)(?=@)""")
# In the query, by the names that services give it: https://host/x?token=...
_IN_QUERY = re.compile(
    r"""(?<=[?&])((?:[\w-]*[_-])?(?:token|secret|password|passwd|pwd|api-?key|key|auth|sig|signature|credential))=[^\s&#"',]+""",
    re.IGNORECASE,
)


def say(text: Any, *, error: bool = False, style: str = "", end: str = "\n") -> None:
    """Print text, whatever it holds, in one write: on standard output, or on standard error."""
    stream = sys.stderr if error else sys.stdout
    write(styled(printable(str(text)), style, stream) + end, stream)


@functools.cache
def warn_once(text: str) -> None:
    """Say something on standard error, however often it is found."""
    say(text, error=True)


def write(text: str, stream: TextIO) -> None:
    """Write text whose control sequences are our own: what is not, `printable` has replaced."""
    text = without_passwords(text)
    encoding = stream.encoding or "utf-8"  # a console may lack characters that the data have
    stream.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
    stream.flush()


def styled(text: str, style: str, stream: TextIO) -> str:
    """Text in a style, where the stream is a terminal that shows colors."""
    return f"\x1b[{style}m{text}\x1b[0m" if style and shows_color(stream) else text


def shows_color(stream: TextIO) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ


def printable(text: str) -> str:
    """Text from elsewhere without what would command a terminal, or reorder what is read on it."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in "\n\t" or sign in _JOINERS else _escaped(sign) for sign in text)


def quoted(text: Any) -> str:
    """A value between quotes for a message, as `repr` writes it, but with joined emoji as they are."""
    shown = repr(text)
    return shown.replace("\\u200d", "\u200d").replace("\\u200c", "\u200c") if isinstance(text, str) else shown


def without_passwords(text: str) -> str:
    """Text in which the password of a URL, or a token in its place, is three asterisks."""
    text = _CREDENTIALS.sub(lambda found: "***" if found["user"] is None else f"{found['user']}:***", text)
    return _IN_QUERY.sub(r"\1=***", text)


def holds_password(text: str) -> bool:
    """Whether text holds a URL with a password or a token, before its host or in its query."""
    return _CREDENTIALS.search(text) is not None or ("://" in text and _IN_QUERY.search(text) is not None)


def _escaped(sign: str) -> str:
    """In JSON's way above ASCII, so that a line of JSON stays one: JSON itself escapes what is below."""
    return f"\\x{ord(sign):02x}" if ord(sign) < 0x7F else json.dumps(sign)[1:-1]
