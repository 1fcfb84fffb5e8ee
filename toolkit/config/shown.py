"""Which settings may leave this machine, for trackers, cards and reports."""

from typing import Any

from toolkit.config.reading import values_of
from toolkit.config.setting import Settings, settings_of


def public_settings(config: Settings) -> dict[str, Any]:
    """The settings that may leave this machine: those of the toolkit's own groups, and of a recipe's own the numbers only.

    A recipe's author may keep a key in a field of text; no field of ours is for one.
    """
    groups = (each for each in type(config).__mro__ if issubclass(each, Settings) and each.__module__.startswith(__package__))
    ours = {name for group in groups for name in settings_of(group)}
    return {name: value for name, value in values_of(config).items() if name in ours or isinstance(value, (bool, int, float))}
