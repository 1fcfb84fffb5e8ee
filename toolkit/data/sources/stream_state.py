"""Where a stream is in its source."""

import json
from dataclasses import dataclass
from typing import Any


def state_of(stream: Any) -> dict[str, Any] | None:
    """The state of a source that has one, when JSON can hold it."""
    if not hasattr(stream, "state_dict"):
        return None
    state = stream.state_dict()
    try:
        return json.loads(json.dumps(state)) if state else None
    except TypeError:
        return None


@dataclass
class Place:
    """A place in a text file of which each row is a line: behind these bytes (after decompression) and lines."""

    offset: int = 0
    line: int = 0


def is_by_line(ending: str, sample_by: str) -> bool:
    return ending in (".jsonl", ".ndjson") or (ending == ".txt" and sample_by == "line")


def go_to(file: Any, offset: int) -> None:
    """Where a file, such as a compressed one or one of some stores, has no places to go to it is read up to there."""
    if file.seekable():
        file.seek(offset)
        return
    while offset and (block := file.read(min(offset, 1 << 20))):
        offset -= len(block)
