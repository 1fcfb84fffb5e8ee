"""Text from outside to values: JSON and YAML, each with a place for its mistakes, and limits that no honest file reaches.

Python's readers let the last of two equal keys win, follow nesting until the stack ends, and read YAML 1.1, in which 010 is
eight and 12:30 is seven hundred and fifty.
"""

from __future__ import annotations

import functools
import json
import os
import stat
from pathlib import Path
from typing import Any

from toolkit.config.setting import Refusal
from toolkit.system.json_lines import MOST_LEVELS, is_deeper

MOST_BYTES = 1 << 24  # of a file of settings, a template, a configuration
MOST_NODES = 1 << 17  # of a YAML file once its aliases are followed


def read_text_file(path: str | Path, shown: str, most: int = MOST_BYTES) -> str:
    """The text of a small file of settings, of at most `most` bytes. `shown` begins the messages, such as `--config run.yaml`.

    Raises:
        Refusal: no such file, a folder or a device in its place, too large, not to be read, or not UTF-8.
    """
    place = Path(os.path.expanduser(path))
    try:
        mode = place.stat().st_mode
        if stat.S_ISDIR(mode):
            raise Refusal(f"{shown}: is a folder, and must be a file.")
        if not (stat.S_ISREG(mode) or str(place).startswith(("/dev/fd/", "/proc/self/fd/", "/dev/stdin"))):
            raise Refusal(f"{shown}: is {kind_of_file(mode)}, and must be a file.")
        with open(place, "rb") as file:
            content = file.read(most + 1)
    except FileNotFoundError:
        raise Refusal(f"{shown}: no such file.") from None
    except OSError as error:
        raise Refusal(f"{shown}: cannot be read ({error.strerror}).") from None
    except ValueError as error:  # a NUL character in the path
        raise Refusal(f"{shown}: is no path ({error}).") from None
    if len(content) > most:
        raise Refusal(f"{shown}: is larger than {most >> 20} MB, and so not what is meant here.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refusal(f"{shown}: byte {error.start} is not UTF-8; save the file as UTF-8.") from None


def kind_of_file(mode: int) -> str:
    """What is in a file's place, of `os.stat_result.st_mode`, for a message."""
    kinds = {
        stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device",
        stat.S_ISDIR: "a folder",
    }  # fmt: skip
    return next((kind for is_it, kind in kinds.items() if is_it(mode)), "no regular file")


def parse_json(text: str, where: str, is_file: bool = False, is_strict: bool = False) -> Any:
    """The value of a JSON text; `where` begins the messages, such as `train.jsonl:7`, or the path of the file that it is.

    `is_strict`: NaN and Infinity, which Python reads and writes, are refused, as JSON has no such words.

    Raises:
        Refusal: not JSON, a key that is there twice in one object, nesting or a number without end, half a surrogate pair.
    """
    try:
        value = (_STRICT if is_strict else _PYTHONS).decode(text)
    except json.JSONDecodeError as error:
        if is_file:
            raise Refusal(f"{where}:{error.lineno}: is not JSON ({error.msg}, column {error.colno}).") from None
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise Refusal(f"{where}: not valid JSON at column {error.colno} ({error.msg}): {shown}") from None
    except _TwiceError as error:
        raise Refusal(f"{where}: {error.args[0]} is twice in one object: keep one.") from None
    except _ConstantError as error:
        raise Refusal(f"{where}: holds {error.args[0]}, which is not JSON. Write a number, null, or a text.") from None
    except RecursionError:
        raise Refusal(f"{where}: {_TOO_DEEP}") from None
    except ValueError:  # Python reads no whole number of more than 4,300 digits
        raise Refusal(f"{where}: holds a number of thousands of digits, which no column can hold.") from None
    if text.count("[") + text.count("{") > MOST_LEVELS and is_deeper(value):
        raise Refusal(f"{where}: {_TOO_DEEP}")
    if "\\u" in text and (half := _half_of_a_pair(value)):
        raise Refusal(f"{where}: holds {half}, half of a surrogate pair, which is no character. Write the whole character.")
    return value


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text, of which a plain 010, 12:30 or 2026-01-31 is text; `where` begins the messages.

    Raises:
        Refusal: not YAML, a key that is there twice in one mapping, nesting without end, a tag that makes something else.
    """
    import yaml

    try:
        loader = _loader_class()(text)
        try:
            root = loader.get_single_node()
            _check_nodes(root, where)
            return None if root is None else loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        raise Refusal(f"{place}: is not YAML ({getattr(error, 'problem', None) or error}).") from None
    except RecursionError:
        raise Refusal(f"{where}: {_TOO_DEEP}") from None


_TOO_DEEP = f"lists and objects are nested more than {MOST_LEVELS} levels deep."


class _TwiceError(Exception):
    """A key that is there twice in one JSON object."""


class _ConstantError(Exception):
    """NaN or Infinity where strict JSON is wanted."""


def _refuse_constant(word: str) -> Any:
    raise _ConstantError(word)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(next(key for key in keys if keys.count(key) > 1))
    return found


# Made once: json.loads makes a decoder at each call with a hook, a third of the time that a short line takes.
_PYTHONS = json.JSONDecoder(object_pairs_hook=_unique)
_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)


def _half_of_a_pair(value: Any) -> str:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return ""


def _check_nodes(root: Any, where: str) -> None:
    """Refuse what the constructor would follow without end, or merge in silence."""
    import yaml

    count, todo = 0, [(root, 1)]
    while todo:
        node, level = todo.pop()
        count += 1
        if level > MOST_LEVELS or count > MOST_NODES:
            line = node.start_mark.line + 1
            ends = "its aliases refer to each other without end" if count > MOST_NODES else "or an alias refers to itself"
            raise Refusal(f"{where}:{line}: {_TOO_DEEP[:-1]}, {ends}." if level > MOST_LEVELS else f"{where}:{line}: {ends}.")
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    line = key.start_mark.line + 1
                    if key.value in seen:
                        raise Refusal(f"{where}:{line}: {key.value} is there twice, first in line {seen[key.value]}: keep one.")
                    seen[key.value] = line
            todo += [(part, level + 1) for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            todo += [(part, level + 1) for part in node.value]


@functools.cache
def _loader_class() -> Any:
    """PyYAML's safe loader with the numbers of YAML 1.2, and no dates, binaries or sets."""
    import re

    import yaml

    class Loader(yaml.SafeLoader):
        """Its tables are PyYAML's, changed below."""

    Loader.yaml_constructors = dict(yaml.SafeLoader.yaml_constructors)
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in each if tag.rpartition(":")[2] in ("bool", "null", "merge")]
        for first, each in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def number(kind: type[int] | type[float]) -> Any:
        def construct(loader: Any, node: Any) -> Any:
            text = loader.construct_scalar(node).replace("_", "").lower()
            try:
                return kind(re.sub(r"\.(?=inf|nan)", "", text))
            except ValueError:
                return wrong(f"{node.value[:40]!r} is no {'whole ' * (kind is int)}number", node)

        return construct

    def truth(loader: Any, node: Any) -> Any:
        text = loader.construct_scalar(node)
        known = yaml.SafeLoader.bool_values
        return known[text.lower()] if text.lower() in known else wrong(f"{text[:40]!r} is neither true nor false", node)

    def wrong(what: str, node: Any) -> Any:
        raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from None

    # An explicit tag makes the type it names or is refused.
    for name in ("timestamp", "binary", "set", "omap", "pairs"):
        Loader.yaml_constructors.pop(f"tag:yaml.org,2002:{name}", None)
    Loader.add_constructor("tag:yaml.org,2002:int", number(int))
    Loader.add_constructor("tag:yaml.org,2002:float", number(float))
    Loader.add_constructor("tag:yaml.org,2002:bool", truth)
    Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+0123456789."),
    )
    return Loader


def is_special(path: str | Path) -> str:
    """What a path names that is neither a file nor a folder; empty where it is one of them or nothing is there."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return ""
    return "" if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else kind_of_file(mode)
