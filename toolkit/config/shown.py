"""Which settings may leave this machine, for trackers, cards and reports."""

from typing import Any

from toolkit.config import groups, methods
from toolkit.config.reading import values_of
from toolkit.config.setting import Settings, settings_of


def public_settings(config: Settings) -> dict[str, Any]:
    """The settings that may leave this machine: those of the toolkit's own groups, and of a recipe's own the numbers only.

    A recipe's author may keep a key in a field of text; no field of ours is for one.
    """
    known = [each for each in (*vars(groups).values(), *vars(methods).values()) if isinstance(each, type)]
    ours = {name for group in known if issubclass(group, Settings) for name in settings_of(group)}
    return {name: value for name, value in values_of(config).items() if name in ours or isinstance(value, (bool, int, float))}
