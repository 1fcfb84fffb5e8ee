"""A peer's best flags, found: the one that saves most time is kept, then the next one next to it, until none saves 2 %."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Flags = Mapping[str, Mapping[str, Any]]  # what a flag is called here, and the peer's settings that it stands for
LEAST_GAIN = 0.02
MOST_LOSS = 1.1  # of one that is tried again next to others


def named(names: Iterable[str]) -> str:
    return " + ".join(names)


def settings_of(name: str, flags: Flags) -> dict[str, Any]:
    """The settings of flags that are taken together, `a + b`."""
    return {setting: value for each in name.split(" + ") for setting, value in flags[each].items()}


def best_flags(flags: Flags, measure: Callable[[tuple[str, ...]], float | None]) -> tuple[str, ...]:
    """The flags to take together, in the order in which they were found.

    Args:
        measure: the seconds that these flags take, None where the peer refuses them or ends in an error.
    """
    chosen: tuple[str, ...] = ()
    least, left = measure(chosen), list(flags)
    while least is not None:
        tried = {name: measure((*chosen, name)) for name in left}
        found = {name: seconds for name, seconds in tried.items() if seconds is not None and seconds < least * MOST_LOSS}
        name = min(found, key=lambda each: found[each], default=None)
        if name is None or found[name] > least * (1 - LEAST_GAIN):
            break
        chosen, least = (*chosen, name), found[name]
        left = [each for each in found if not flags[each].keys() & flags[name].keys()]
    return chosen
