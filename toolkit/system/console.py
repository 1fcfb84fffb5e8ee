"""Text for the screen or a log: no control sequences of others, no passwords of URLs, commands in one format.

Everything the toolkit prints goes through `say`, because any message may quote data: a column name, a line of JSON, a path.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import MutableMapping, Sequence
from typing import TextIO

DIM, BOLD, RED, GREEN, CYAN, MARKED = "2", "1", "31", "32", "36", "4;32"  # ECMA-48, "select graphic rendition"
_JOINERS = "\u200c\u200d"  # within words and emoji: they join what is next to them, and command nothing
# Before the host; after one slash too, which is what a path makes of the two.
_CREDENTIALS = re.compile(r"""(?:(?<=://)|(?<=[a-zA-Z0-9]{2}:/))(?:(?P<user>[^\s/:@]*):(?!\d{1,5}/)[^\s"',]*|[^\s/@"',]+)(?=@)""")
# In the query, by the names that services give it: https://host/x?token=...
_IN_QUERY = re.compile(
    r"""(?<=[?&])((?:[\w-]*[_-])?(?:token|secret|password|passwd|pwd|api-?key|key|auth|sig|signature|credential))=[^\s&#"',]+""",
    re.IGNORECASE,
)

# Progress bars, read when a library is imported. transformers follows huggingface_hub; the last is tqdm's, for all others.
_BAR_SWITCHES = {
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "TQDM_DISABLE": "1",
}


class StreamError(OSError):
    """Standard output, or error, can't be written: a full disk, or a terminal that is gone."""


def say(text: object, *, error: bool = False, style: str = "", end: str = "\n") -> None:
    """Print text, whatever it holds, in one write: on standard output, or on standard error."""
    stream = sys.stderr if error else sys.stdout
    write(styled(printable(str(text)), style, stream) + end, stream)


def show_moving_line(text: str = "") -> None:
    """Write over the moving line of the terminal behind standard error, no wider than that is; without text take it away."""
    sys.stderr.write(f"\r\x1b[2K{text[: max(1, shutil.get_terminal_size().columns - 1)]}")
    sys.stderr.flush()


@functools.cache
def warn_once(text: str) -> None:
    """Print something on standard error, however often it is found."""
    say(text, error=True)


def write(text: str, stream: TextIO) -> None:
    """Write text whose control sequences are our own: what is not, `printable` has replaced."""
    text = without_passwords(text)
    encoding = stream.encoding or "utf-8"  # a console may lack characters that the data have
    try:
        stream.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        name = "standard output" if stream is sys.stdout else "standard error"
        raise StreamError(error.errno, error.strerror, name) from None


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


def quoted(text: object) -> str:
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


def one_line(text: str, width: int) -> str:
    """A text without line breaks, cut to `width` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def first_line(error: BaseException, most: int = 300) -> str:
    """The first line of an error's message that has a cause, or the error's type: torch begins with "Error(s) in ...:"."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if not line.endswith(":")), lines[0])[:most]


def first_of(names: Sequence[str], most: int = 12) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def own_ends(prompts: list[str], width: int) -> list[str]:
    """The end of each prompt, without the text that all of them end with (a chat template's)."""
    ends = zip(*(reversed(prompt) for prompt in prompts), strict=False) if len(prompts) > 1 else ()
    alike = sum(1 for _ in itertools.takewhile(lambda characters: len(set(characters)) == 1, ends))
    alike = alike if alike > 2 else 0  # the "=" or "?" of each prompt is no template
    return [one_line((prompt[: len(prompt) - alike] or prompt)[::-1], width)[::-1] for prompt in prompts]


def as_typed(*words: object) -> str:
    """The words as one shell command, quoted where needed: messages have only commands that can be pasted."""
    return shlex.join(map(str, words))


def keep_bars_out_of_logs(environment: MutableMapping[str, str] = os.environ) -> None:
    """Turn off the progress bars of libraries imported from here on, unless standard error is a terminal or the user set them.
    """
    if not sys.stderr.isatty():
        for name, value in _BAR_SWITCHES.items():
            environment.setdefault(name, value)


def _escaped(sign: str) -> str:
    """In JSON's way above ASCII, so that a line of JSON stays one: JSON itself escapes what is below."""
    return f"\\x{ord(sign):02x}" if ord(sign) < 0x7F else json.dumps(sign)[1:-1]
