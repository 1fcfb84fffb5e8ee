"""What a setting is: a field of a frozen dataclass with its help text and its rules beside it, and the check of one value."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import numbers
import os
import shlex
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from toolkit.config.reading import note_read, values_of
from toolkit.system.console import holds_password


class Refusal(Exception):
    """Settings or data that training must not start with.

    The message says what was found, where, what would be right and what to type. The command line prints it without a
    traceback and exits with code 2.
    """


def setting(
    default: Any,
    help: str = "",
    *,
    choices: tuple[str, ...] | None = None,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    aliases: tuple[str, ...] = (),
    is_path: bool = False,
) -> Any:
    """A field of a settings group: its default, its help text, and the values it accepts (each item, of a list).

    A whole number declares both ends of its range. `is_path`: a leading ~ is the home directory, wherever the text was
    written: a shell expands it only at the beginning of a word.

    A recipe that redeclares a list leaves the help text out: what is not said here stays as the group declared it.
    """
    rules = {
        "help": help, "choices": choices, "least": least, "most": most, "above": above, "below": below, "aliases": aliases,
        "is_path": is_path or None,
    }
    metadata = {name: rule for name, rule in rules.items() if rule not in (None, (), "")}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """What all groups share: each value is checked against the rules beside its field when the settings are made.

    Which of them are read is noted (`toolkit.config.reading`).
    """

    def __new__(cls, *values: Any, **named: Any) -> Settings:
        """Before Python's own TypeError: a keyword that is no setting is refused with what it was probably meant for."""
        if unknown := named.keys() - cls.__dataclass_fields__.keys():
            from toolkit.config.values import unknown_keywords

            raise unknown_keywords(cls, {name: value for name, value in named.items() if name in unknown})
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for each in settings_of(type(self)).values():
            written = getattr(self, each.name)
            if each.is_path and isinstance(written, str) and written.startswith("~"):
                object.__setattr__(self, each.name, _in_home(each, written))
        check_values(self)

    if not TYPE_CHECKING:  # mypy would take any name for an attribute

        def __getattribute__(self, name: str) -> Any:
            if name[:1] != "_":
                note_read(type(self), name, sys._getframe(1))
            return object.__getattribute__(self, name)


@dataclass(frozen=True)
class Setting:
    """One setting of a recipe as its users meet it: a flag, a YAML key, a row of a help panel."""

    name: str
    panel: str
    kind: type[str] | type[bool] | type[int] | type[float]  # of the value, or of each item of a list
    is_list: bool
    takes_none: bool
    default: Any
    help: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    aliases: tuple[str, ...] = ()
    is_path: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        return self.kind is bool and not self.is_list


def settings_of(config_class: type[Settings]) -> Mapping[str, Setting]:
    """The settings of a recipe's `Config` (or of one group) by name, panel by panel in the order of its bases.

    The panel is the class that first declared the field. Help text and rules are the group's, except for what a
    redeclaration in the recipe says itself.
    """
    if config_class not in _SETTINGS_OF:
        _SETTINGS_OF[config_class] = types.MappingProxyType(_find_settings(config_class))
    return _SETTINGS_OF[config_class]


_SETTINGS_OF: dict[type, Mapping[str, Setting]] = {}


def _find_settings(config_class: type[Settings]) -> dict[str, Setting]:
    hints = typing.get_type_hints(config_class)
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    found: dict[str, Setting] = {}
    for group in config_class.__mro__:
        for name in inspect.get_annotations(group):
            declarations = [owner for owner in config_class.__mro__ if name in inspect.get_annotations(owner)]
            if name not in fields or group is not declarations[-1]:
                continue
            metadata: dict[str, Any] = {}
            for owner in reversed(declarations):
                metadata |= owner.__dict__["__dataclass_fields__"][name].metadata
            field = fields[name]
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            found[name] = Setting(name, _panel(group), *_shape(name, hints[name]), default, **metadata)
    return found


def check_values(config: Settings) -> None:
    """Refuse the values outside the rules beside their fields, all of them at once."""
    found, values = [], values_of(config)
    for each in settings_of(type(config)).values():
        try:
            check_value(each, values[each.name])
        except Refusal as refusal:
            found.append(refusal)
    refuse_all(found)


def refuse_all(found: list[Refusal]) -> None:
    """Refuse with what was found, in one message; nothing happens where nothing was."""
    if len(found) == 1:
        raise found[0]
    if found:
        indented = (str(refusal).replace("\n", "\n    ") for refusal in found)
        raise Refusal("\n  - ".join(["these settings are wrong", *indented]))


def check_value(setting: Setting, value: Any, source: str = "") -> None:
    """Refuse a value of the wrong type or outside the rules of its setting; `source` says where it was written."""
    if value is None and setting.takes_none:
        return
    needs_article = setting.is_list or setting.kind in (int, float)
    must_be = f"must be {'a ' if needs_article else ''}{describe(setting)}"
    if setting.is_list and not isinstance(value, list | tuple):
        raise _refused(setting, value, source, must_be)
    for item in value if setting.is_list else [value]:
        if not _is_of_kind(item, setting.kind):
            raise _refused(setting, value, source, must_be)
        if setting.choices and item not in setting.choices:
            near = nearest(str(item), setting.choices)
            hint = f" Did you mean {near}?" if near else ""
            raise _refused(setting, value, source, f"must be one of {', '.join(setting.choices)}", hint)
        if setting.kind is not str and not _within(setting, item):
            raise _refused(setting, value, source, f"must be {_range(setting, item)}")
        if setting.kind is str:
            _check_text(setting, item, source)


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option a mistyped word was probably meant for; people get beginnings right more often than ends."""

    def likeness(option: str) -> float:
        pairs = zip(word.lower(), option, strict=False)
        same_start = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return SequenceMatcher(None, word.lower(), option).ratio() + same_start / len(word)

    best = max(options, key=likeness, default=None) if word else None
    return best if best is not None and likeness(best) > 0.8 else None


def describe(setting: Setting) -> str:
    """The values a setting takes, in words: 'whole number', 'list of numbers'."""
    one, many = {
        str: ("text", "texts"),
        bool: ("true or false", "true or false"),
        int: ("whole number", "whole numbers"),
        float: ("number", "numbers"),
    }[setting.kind]
    return f"list of {many}" if setting.is_list else one


def show_value(value: Any) -> str:
    """A value as it would be typed: none, true, 0.0002, wandb,tensorboard."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(show_value(item) for item in value) if value else "[]"
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def show_setting(setting: Setting, value: Any) -> str:
    """A setting as it would be typed: --optim sgd, --packing, --no-packing."""
    if setting.is_switch and value is True:
        return setting.flag
    if setting.is_switch and value is False:
        return "--no-" + setting.flag.removeprefix("--")
    return f"{setting.flag} {shlex.quote(show_value(value))}"


def _panel(group: type) -> str:
    """The first line of a group's docstring. dataclass writes 'Config(...)' where there is none: a recipe's own class."""
    title = (group.__dict__.get("__doc__") or "").strip().partition("\n")[0].rstrip(".")
    return "Recipe" if not title or title.startswith(f"{group.__name__}(") else title


def _shape(name: str, hint: Any) -> tuple[Any, bool, bool]:
    """(kind, is a list, takes none) of an annotation such as `int`, `str | None` or `list[float]`."""
    alternatives = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        alternatives = list(typing.get_args(hint))
    takes_none = type(None) in alternatives
    kinds = [kind for kind in alternatives if kind is not type(None)]
    is_list = len(kinds) == 1 and typing.get_origin(kinds[0]) is list
    if is_list:
        kinds = list(typing.get_args(kinds[0]))
    if len(kinds) != 1 or kinds[0] not in (str, bool, int, float):
        raise TypeError(f"setting {name}: {hint} is not str, bool, int, float, a list of one of them, or one of these or None")
    return kinds[0], is_list, takes_none


def _is_of_kind(value: Any, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str) and value != ""
    if isinstance(value, bool) or kind is bool:  # bool is an int to Python, not to a person
        return isinstance(value, bool) and kind is bool
    if isinstance(value, numbers.Integral):
        return True  # of any length; whether it is too large is for its range
    return kind is float and isinstance(value, numbers.Real) and math.isfinite(value)


# What 64 bits, and float32 on a device, can hold.
_LARGEST = {bool: 1, int: 2**63 - 1, float: 3.4e38}


def _check_text(setting: Setting, text: str, source: str) -> None:
    """Refuse what no path and no name can hold, and what must not be written into config.yaml, a card or a tracker."""
    shown = f"{setting.flag}{f' ({source})' if source else ''}"
    if holds_password(text):
        raise Refusal(
            f"{shown}: holds a URL with a password or token, which would be written to config.yaml and shown to others. Log in "
            "instead (hf auth login), or download the file first and name that."
        )
    if "\0" in text:
        raise Refusal(f"{shown}: holds a NUL character, which no name can hold.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refusal(f"{shown}: character {error.start + 1} is not Unicode text. Rename what it names in UTF-8.") from None


def _in_home(setting: Setting, path: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path.partition("/")[0]
        raise Refusal(f"{setting.flag} {path}: there is no user {user[1:]!r}. For a folder of that name: ./{path}")
    return expanded


def _within(setting: Setting, value: float) -> bool:
    return (
        abs(value) <= _LARGEST[setting.kind]
        and (setting.least is None or value >= setting.least)
        and (setting.most is None or value <= setting.most)
        and (setting.above is None or value > setting.above)
        and (setting.below is None or value < setting.below)
    )


def _range(setting: Setting, value: float) -> str:
    """The rule in words; an upper end that nobody meets by chance is left out where it isn't what was broken."""
    most = setting.most
    if most is not None and most > 1000 and value <= most:
        most = None
    if abs(value) > _LARGEST[setting.kind] and most is None and setting.below is None:
        most = _LARGEST[setting.kind]
    bounds = [("at least", setting.least), ("above", setting.above), ("at most", most), ("below", setting.below)]
    return " and ".join(f"{words} {_bound(bound)}" for words, bound in bounds if bound is not None)


def _bound(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _refused(setting: Setting, value: Any, source: str, rule: str, hint: str = "") -> Refusal:
    try:
        text, rule = ("''", "must not be empty") if isinstance(value, str) and value == "" else (show_value(value), rule)
    except (ValueError, RecursionError):  # Python writes no whole number of more than 4,300 digits, and no list in itself
        text = "..."
    text = text if len(text) <= 200 else f"{text[:80]}... ({len(text):,} characters)"
    return Refusal(f"{setting.flag} {text}{f' ({source})' if source else ''}: {rule}.{hint}")
