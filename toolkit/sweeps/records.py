"""Records of a journal, which are JSON, to values of a class: with the types that its fields are annotated with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def made_of(kind: Callable[..., T], record: Mapping[str, Any], *without: str) -> T:
    """A value of a dataclass, whose fields a record has by name.

    Raises:
        TypeError: one of them is missing, is none of the class, or has another type than its annotation.
    """
    values, types = {name: value for name, value in record.items() if name not in without}, _types(kind)
    if wrong := [name for name, value in values.items() if name in types and not _is_a(types[name], value)]:
        raise TypeError(f"{wrong[0]} {values[wrong[0]]!r}")
    return kind(**values)


@cache
def _types(kind: Hashable) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_a(kind: Any, value: object) -> bool:
    """Whether a value that was JSON is one of an annotation; a whole number is a float too, and a list a tuple."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_a(each, value) for each in parts)
    if origin is list:
        return isinstance(value, list) and all(_is_a(parts[0], each) for each in value)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(parts) and all(map(_is_a, parts, value))
    if origin is not None:
        return isinstance(value, Mapping) and all(_is_a(parts[1], each) for each in value.values())
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return isinstance(value, kind)
