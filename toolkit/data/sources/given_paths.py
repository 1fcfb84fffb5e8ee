"""Rows are named by a path that is the same wherever their folder lies; people are shown the path that they gave."""

import os
import re

# Of the files that this process has looked for, by the name that their rows bear: how they were given; None: two bear it.
_GIVEN: dict[str, str | None] = {}


def remember_path(shown: str, path: str) -> None:
    """Rows of the file at `path`, as it was given, are named `shown:LINE`."""
    known = _GIVEN.get(shown, path)
    _GIVEN[shown] = path if known is not None and os.path.realpath(known) == os.path.realpath(path) else None


def with_given_paths(text: str) -> str:
    """A text about rows, such as `folder/train.jsonl:7: text is empty`, with the paths that can be opened from here."""
    names = sorted((shown for shown, path in _GIVEN.items() if path), key=len, reverse=True)
    if not names:
        return text
    pattern = rf"(?<![^\s(])(?:{'|'.join(map(re.escape, names))})(?=:\d)"
    return re.sub(pattern, lambda found: _GIVEN[found[0]] or found[0], text)
