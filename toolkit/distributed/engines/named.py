"""A value and who named it: where two sources name different ones, that is refused with both."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from toolkit.config import Refusal, show_value
from toolkit.config.setting import flag_of

SILENT = (None, "none", "auto")  # what names nothing
OFFLOADED = {"none": (), "optimizer": ("offload_optimizer",), "parameters": ("offload_optimizer", "offload_param")}


class Named(NamedTuple):
    """A value, and the text that names it, such as "--zero-stage 2" or "zero_stage: 2 in the accelerate config"."""

    value: Any
    text: str


def agreed(*sources: Named | None) -> Any:
    """The one value that the sources name, or None where none of them does.

    Raises:
        Refusal: two of them name different values.
    """
    named = [each for each in sources if each]
    for one, other in itertools.pairwise(named):
        if one.value != other.value:
            raise Refusal(f"{one.text} contradicts {other.text}: keep one of the two, or write the same in both.")
    return named[0].value if named else None


def in_settings(settings: Mapping[str, Any], name: str) -> Named | None:
    """A setting; None where it is none, or where the recipe does not have it."""
    value = settings.get(name)
    return None if value in SILENT else Named(value, f"{flag_of(name)} {show_value(value)}")


def in_file(written: Mapping[str, Any], key: str, source: str) -> Named | None:
    """A value of a DeepSpeed configuration under a key such as `zero_optimization.stage`."""
    value = look_up(written, key)
    return None if value in SILENT else Named(value, f"{key}: {json.dumps(value)} in {source}")


def accumulation(settings: Mapping[str, Any], world_size: int) -> Named | None:
    """Micro-batches in a step on each device; derived where the settings name the global batch size."""
    whole = settings.get("global_batch_size")
    if not whole:
        return in_settings(settings, "gradient_accumulation_steps")
    steps = -(-whole // (settings["per_device_train_batch_size"] * world_size))
    return Named(steps, f"--global-batch-size {whole} (ranks: {world_size}, accumulation: {steps})")


def look_up(written: object, key: str) -> Any:
    """The value under a key such as `zero_optimization.stage`, None where there is none."""
    for name in key.split("."):
        if not isinstance(written, Mapping):
            return None
        written = written.get(name)
    return written
