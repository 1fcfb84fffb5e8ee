"""What a setting is: a field of a frozen dataclass with its help text and its rules next to it."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import shlex
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, Literal

from toolkit.config.reading import note_read, values_of

OnResume = Literal["fixed", "free", "evaluation", "batches", "dropout", "rounding"]


class Refusal(Exception):
    """Settings or data that training must not start with.

    The message has what was found, where, what would be right and what to type. The command line prints it without a
    traceback and exits with code 2.
    """


def setting(
    default: Any, help: str = "", *, choices: tuple[str, ...] | None = None, least: float | None = None,
    most: float | None = None, above: float | None = None, below: float | None = None, aliases: tuple[str, ...] = (),
    is_path: bool = False, keeps_spaces: bool = False, on_resume: OnResume | None = None,
) -> Any:  # fmt: skip
    """A field of a settings group: its default, its help text, and the values it accepts (each item, of a list).

    Args:
        least, most, above, below: the range; a whole number declares both ends.
        is_path: a leading ~ is the home directory, also where no shell expands it.
        keeps_spaces: white space at the ends belongs to the value, as in a prefix of texts; else it is a slip.
        on_resume: what a resumed run does when the value has changed. "fixed" (the default of a recipe's own): refuse, unless
            --allow-change names it. "free": continue, because it changes no weight. "evaluation": free, but fixed where the
            learning rate follows evaluations. "batches", "dropout", "rounding": continue, and log what differs from then on.

    A recipe that redeclares a list leaves the help text out: what is not given here stays as the group declared it.
    """
    rules = {
        "help": help, "choices": choices, "least": least, "most": most, "above": above, "below": below, "aliases": aliases,
        "is_path": is_path or None, "keeps_spaces": keeps_spaces or None, "on_resume": on_resume,
    }
    metadata = {name: rule for name, rule in rules.items() if rule not in (None, (), "")}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """What all groups share: each value is checked against the rules next to its field when the settings are made.

    Which of them are read is noted (`toolkit.config.reading`).
    """

    # Names of the settings that the user gave on the command line, in a file or in SM_HPS; None: the config was made in code.
    given: tuple[str, ...] | None = dataclasses.field(default=None, kw_only=True, repr=False, compare=False)

    def __new__(cls, *values: Any, **named: Any) -> Settings:
        """Before Python's own TypeError: a keyword that is no setting is refused with what it was probably meant for."""
        if unknown := named.keys() - cls.__dataclass_fields__.keys():
            from toolkit.config.unknown_keys import unknown_keywords

            raise unknown_keywords(cls, {name: value for name, value in named.items() if name in unknown})
        return super().__new__(cls)

    def __post_init__(self) -> None:
        from toolkit.config.values import check_values

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
    keeps_spaces: bool = False
    on_resume: OnResume = "fixed"

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def is_switch(self) -> bool:
        return self.kind is bool and not self.is_list


def settings_of(config_class: type[Settings]) -> Mapping[str, Setting]:
    """The settings of a recipe's `Config` (or of one group) by name, panel by panel in the order of its bases.

    The panel is the class that first declared the field. Help text and rules are the group's, except for what a
    redeclaration in the recipe sets itself.
    """
    if config_class not in _SETTINGS_OF:
        _SETTINGS_OF[config_class] = types.MappingProxyType(_find_settings(config_class))
    return _SETTINGS_OF[config_class]


_SETTINGS_OF: dict[type, Mapping[str, Setting]] = {}


def _find_settings(config_class: type[Settings]) -> dict[str, Setting]:
    hints = typing.get_type_hints(config_class)
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    found: dict[str, Setting] = {}
    declared = {owner: inspect.get_annotations(owner) for owner in config_class.__mro__}
    for group in config_class.__mro__[: config_class.__mro__.index(Settings)]:
        for name in declared[group]:
            declarations = [owner for owner, names in declared.items() if name in names]
            if name not in fields or group is not declarations[-1]:
                continue
            metadata: dict[str, Any] = {}
            for owner in reversed(declarations):
                metadata |= owner.__dict__["__dataclass_fields__"][name].metadata
            field = fields[name]
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            found[name] = Setting(name, _panel(group), *_shape(name, hints[name]), default, **metadata)
    return found


def given_settings(config: Settings) -> frozenset[str]:
    """Names of the settings that someone gave; of a config made in code, of those that are not their defaults."""
    return frozenset(changed_settings(config)) if config.given is None else frozenset(config.given)


def changed_settings(config: Settings) -> dict[str, Any]:
    """The settings that differ from the defaults of the config's own class, in the order of its panels."""
    values = values_of(config)
    return {name: values[name] for name, setting in settings_of(type(config)).items() if values[name] != setting.default}


def spellings_of(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """The settings by their names and aliases."""
    return {spelling: each for each in settings.values() for spelling in (each.name, *each.aliases)}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def free_on_resume(config_class: type[Settings]) -> frozenset[str]:
    """The settings on which no weight depends, unless the learning rate follows evaluations."""
    return frozenset(name for name, each in settings_of(config_class).items() if each.on_resume in ("free", "evaluation"))


def refuse_all(found: list[Refusal]) -> None:
    """Refuse with what was found, in one message; nothing happens where nothing was."""
    if len(found) == 1:
        raise found[0]
    if found:
        indented = (str(refusal).replace("\n", "\n    ") for refusal in found)
        raise Refusal("\n  - ".join(["these settings are wrong", *indented]))


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option a mistyped word was probably meant for; people get beginnings right more often than ends."""

    def likeness(option: str) -> float:
        pairs = zip(word.lower(), option, strict=False)
        same_start = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return SequenceMatcher(None, word.lower(), option).ratio() + same_start / len(word)

    best = max(options, key=likeness, default=None) if word else None
    return best if best is not None and likeness(best) > 0.8 else None


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """The end of a refusal of a mistyped word; empty where no option is near."""
    near = nearest(word, options)
    return f" Did you mean {near}?" if near else ""


def show_value(value: object) -> str:
    """A value as it would be typed: none, true, 0.0002, wandb,tensorboard."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(show_value(item) for item in value) if value else "[]"
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def show_setting(setting: Setting, value: object) -> str:
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


def _in_home(setting: Setting, path: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path.partition("/")[0]
        raise Refusal(f"{setting.flag} {path}: there is no user {user[1:]!r}. For a folder of that name: ./{path}")
    return expanded


