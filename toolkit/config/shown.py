"""Which settings may leave this machine, for trackers, cards and reports."""

import dataclasses
from typing import Any

from toolkit.config import groups, methods


def public_settings(config: Any) -> dict[str, Any]:
    """The settings that may leave this machine: those of the toolkit's own groups, and of a recipe's own the numbers only.

    A recipe's author may keep a key in a field of text; no field of ours is for one.
    """
    known = [group for group in (*vars(groups).values(), *vars(methods).values()) if dataclasses.is_dataclass(group)]
    ours = {field.name for group in known for field in dataclasses.fields(group)}
    values = dataclasses.asdict(config)
    return {name: value for name, value in values.items() if name in ours or isinstance(value, (bool, int, float))}
