"""JSON, one object a line: appended whole or not at all, and strict."""

import contextlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.system.files import regular, write_atomically

MOST_BYTES = 1 << 24  # of a file that holds one object: a run's card has some thousand
_BLOCK = 1 << 20  # characters that are parsed at once
MOST_LEVELS = 64  # of objects and lists in one another; a chat with tools has ten, a record of a run five


def json_line(record: dict[str, Any]) -> str:
    """Strict JSON: a number that is not finite becomes null, since JSON has no word for it."""
    return json.dumps(strict_json(record), allow_nan=False)


def strict_json(value: object) -> Any:
    """A value with None in place of every number that is not finite, however deep: JSON has no word for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: strict_json(each) for key, each in value.items()}
    return [strict_json(each) for each in value] if isinstance(value, list | tuple) else value


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON object to a .jsonl file, whole or not at all; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json_line(record) + "\n")
    except OSError:
        with contextlib.suppress(OSError):  # half a line would hide those after it from a reader
            os.truncate(path, size)
        raise


class LineFile:
    """A .jsonl file that a full disk does not stop: lines that can't be written wait for the next one that can."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[dict[str, Any]] = []

    def append(self, record: dict[str, Any]) -> OSError | None:
        """Write a record, after those that wait; returns the error when they begin to wait with this one."""
        began_waiting = not self._waiting
        self._waiting.append(record)
        try:
            while self._waiting:
                append_line(self.path, self._waiting[0])
                self._waiting.pop(0)
        except OSError as error:
            return error if began_waiting else None
        return None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file; lines that hold none, such as a last one cut off by a crash, are left out."""
    return [record for records, _ in read_blocks(path) for record in records] if path.exists() else []


def read_blocks(path: Path) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """A .jsonl file in blocks of some thousand lines: the records, and how many lines hold none although they are not empty.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, encoding="utf-8", errors="replace", opener=regular) as file:
        while text := file.read(_BLOCK):
            yield _parse_lines(text + file.readline())


def _parse_lines(text: str) -> tuple[list[dict[str, Any]], int]:
    """What `read_blocks` yields of these lines.

    Where each line begins with a brace and has no other brace or bracket that opens, they are parsed at once, in two thirds
    of the time: that gives as many objects as there are lines only if each line is one.
    """
    lines, braces = text.splitlines(), text.count("{")
    if "[" not in text and len(lines) == braces == text.startswith("{") + text.count("\n{"):
        with contextlib.suppress(ValueError):
            found = json.loads(f"[{','.join(lines)}]")
            if len(found) == braces and set(map(type, found)) == {dict}:
                return found, 0
    records = [record for line in lines if (record := parse_object(line)) is not None]
    return records, sum(bool(line.strip()) for line in lines) - len(records)


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None where it is no object, cut off, or nested without end."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and not is_deeper(found) else None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none that can be read."""
    try:
        with open(path, encoding="utf-8", errors="replace", opener=regular) as file:
            return parse_object(file.read(MOST_BYTES)) or {}
    except OSError:
        return {}


def sealed_line(record: Mapping[str, Any]) -> str:
    """A record as a line, with a CRC-32 of it at its end."""
    text = _text(record)
    return f'{text[:-1]}, "crc32": "{zlib.crc32(text.encode()):08x}"}}\n'


def intact_records(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of records that `sealed_line` has written those that nothing has changed since, without the checksum."""
    for record in records:
        crc = record.pop("crc32", None)
        if crc == f"{zlib.crc32(_text(record).encode()):08x}":
            yield record


def plain_json(value: object) -> Any:
    """What JSON gives back: lists for tuples, and the text of what it has no word for, such as a date in a row."""
    if isinstance(value, Mapping):
        return {str(name): plain_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _text(record: Mapping[str, Any]) -> str:
    try:
        return json.dumps(record, allow_nan=False)
    except (TypeError, ValueError):  # in the columns of a row
        return json_line(plain_json(record))


def truncate_lines(path: Path, last_step: int) -> None:
    """Drop the records after a step, so that a resumed run writes no step twice; atomic."""
    if path.exists():
        kept = [json_line(record) for record in read_lines(path) if _step_of(record) <= last_step]
        write_atomically(path, "".join(line + "\n" for line in kept))


def _step_of(record: dict[str, Any]) -> float:
    """The step of a record, 0 where it has none; infinite, so of no run, where it is no number."""
    step = record.get("step", 0)
    return step if isinstance(step, int | float) and step == step else math.inf


def is_deeper(value: object, levels: int = MOST_LEVELS) -> bool:
    """Whether objects and lists are in one another at more levels than these."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 1 or is_deeper(each, levels - 1) for each in inside if isinstance(each, dict | list))
