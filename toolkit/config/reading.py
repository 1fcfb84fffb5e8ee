"""Which settings a run reads: its records list those, because an edited recipe may read fewer than its command line takes.

A read is noted for the class of the config: copies of it that functions make (`dataclasses.replace`) are of the same run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.config.setting import Settings

_READ: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()
_MADE_OF: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
_OF_ANY_CONFIG = frozenset({"__post_init__", "__eq__", "__hash__", "__repr__"})  # the last three are made by dataclasses
_OF_THE_RECORDS = frozenset({"run_name"})  # its use is to be in them
_COPYING = frozenset({"asdict", "astuple"})  # of dataclasses: whoever calls them may use every value


def note_read(config_class: type, name: str, frame: FrameType) -> None:
    """Note that the code in `frame` reads an attribute; what dataclasses reads to copy, compare or print a config is not noted.

    Of `asdict` in a recipe every setting is noted: what becomes of the dictionary is not known.
    """
    if frame.f_code.co_name in _OF_ANY_CONFIG:
        return
    if frame.f_globals.get("__name__") == dataclasses.__name__:
        function, caller = "", frame
        while caller.f_back is not None and caller.f_globals.get("__name__") == dataclasses.__name__:
            function, caller = caller.f_code.co_name, caller.f_back
        if function not in _COPYING or str(caller.f_globals.get("__name__")).startswith("toolkit."):
            return
    _READ.setdefault(config_class, set()).add(name)


def values_of(config: object) -> dict[str, Any]:
    """The values of all settings by name, for records and checks: none of them is noted as read."""
    return {name: value for name, value in vars(config).items() if name != "given"}


def settings_read(config: object) -> frozenset[str]:
    """The names of the settings that were read since the run began."""
    return (_OF_THE_RECORDS | _READ.get(type(config), set())) & values_of(config).keys()


def add_reads(config: object, names: Iterable[str]) -> None:
    """Note as read what the run read before it was continued."""
    _READ.setdefault(type(config), set()).update(names)


@contextlib.contextmanager
def read_apart(config: object) -> Iterator[set[str]]:
    """What is read inside is not noted as read; the set holds the names of it afterwards."""
    before, names = set(_READ.get(type(config), ())), set[str]()
    yield names
    names |= _READ.get(type(config), set()) - before
    _READ[type(config)] = before


def note_made_of(made: object, names: Iterable[str]) -> None:
    """Let these settings count as read by a run that uses the object which was made of them (`add_reads_of`)."""
    _MADE_OF[made] = frozenset(names)


def is_made_of_settings(made: object) -> bool:
    """Whether an object was made of settings, and not by the recipe itself."""
    return made in _MADE_OF


def add_reads_of(config: object, made: object) -> None:
    """Note as read the settings that an object in use was made of; none where the recipe made it itself."""
    add_reads(config, _MADE_OF.get(made, ()))


def forget_reads(config: object) -> None:
    """A run begins, or has ended: what was read before it is not its own."""
    _READ.pop(type(config), None)


def public_settings(config: Settings) -> dict[str, Any]:
    """The settings that may leave this machine, for trackers, cards and reports.

    They are those of the toolkit's own groups, and of a recipe's own the numbers only: its author may keep a key in a field of
    text; no field of ours is for one.
    """
    from toolkit.config.setting import Settings, settings_of

    groups = (each for each in type(config).__mro__ if issubclass(each, Settings) and each.__module__.startswith(__package__))
    ours = {name for group in groups for name in settings_of(group)}
    return {name: value for name, value in values_of(config).items() if name in ours or isinstance(value, (bool, int, float))}
