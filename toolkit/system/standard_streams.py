"""Standard output and error of what runs for hours: a log that can't be written costs lines, not the run."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO, cast


class _Log:
    """A stream whose disk may be full, or whose terminal may be gone: then lines are left out, and their number is written
    once there is room. The end of a pipe's reader is an error still: `| head` ends what it reads from.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._left_out = stream, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        note = f"\nWARNING: {self._left_out} lines of this log could not be written\n" if self._left_out else ""
        try:
            self._stream.write(note + text)
            self._stream.flush()  # or it is found out later, by whoever writes then
            self._left_out = 0
        except BrokenPipeError:
            raise
        except OSError:
            self._left_out += text.count("\n")
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        """Nothing is left to do: each write does it."""


def outlive_the_log() -> None:
    """From here on, standard output and error end nothing by an error; where one is closed, it leads nowhere."""
    open_closed_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Log):
            setattr(sys, name, cast(TextIO, _Log(stream)))


def open_closed_streams() -> None:
    """A standard stream that is closed, as daemons have it, leads nowhere: a file of the run must not get its number, to which
    libraries print.
    """
    for name in ("stdin", "stdout", "stderr"):  # in this order each gets the number of the closed one
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115 - for the process
            setattr(sys, name, stream)
