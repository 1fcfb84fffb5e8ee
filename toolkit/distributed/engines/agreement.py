"""What settings, launcher and file say of one value, and whether they agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from toolkit.config import Refusal, show_value

SILENT = (None, "none", "auto")


class Said(NamedTuple):
    """A value as one source says it; `write` puts any value in that source's own words. None, none and auto say nothing."""

    value: Any
    write: Callable[[Any], str]
    place: str = ""  # " in ds_config.json"; nothing for a setting, which is typed
    shown: str = ""  # where the value is not written as `write` would write it

    @property
    def text(self) -> str:
        return (self.shown or self.write(self.value)) + self.place

    def asking_for(self, value: Any) -> str:
        return f"{'write' if self.place else 'take'} {self.write(value)}{self.place}"


def agreed(*sources: Said) -> Any:
    """The one value that all sources say, or None where none of them says any.

    Raises:
        Refusal: two sources say different values.
    """
    said = [each for each in sources if each.value not in SILENT]
    for one, other in itertools.pairwise(said):
        if one.value != other.value:
            raise Refusal(
                f"{one.text} contradicts {other.text}: {one.asking_for(other.value)}, or {other.asking_for(one.value)}."
            )
    return said[0].value if said else None


def said_by_setting(config: Any, name: str) -> Said:
    """What a setting says; nothing where the recipe does not have it."""
    flag = "--" + name.replace("_", "-")
    return Said(getattr(config, name, None), lambda value: f"{flag} {show_value(value)}")


def accumulation(config: Any, world_size: int) -> Said:
    """Micro-batches in a step on each device, as the settings say; derived where they give the global batch size."""
    whole = getattr(config, "global_batch_size", None)
    if not whole:
        return said_by_setting(config, "gradient_accumulation_steps")
    width = config.per_device_train_batch_size * world_size
    steps = -(-whole // width)
    return Said(
        steps,
        lambda value: f"--global-batch-size {value * width}",
        shown=f"--global-batch-size {whole} (ranks: {world_size}, accumulation: {steps})",
    )
