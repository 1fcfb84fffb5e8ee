"""A search space: which settings are searched, and between which values."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toolkit.config import Refusal

Value = str | int | float
Point = Mapping[str, Value]  # one value for each searched setting
_EXAMPLE = "Write --search learning_rate=log:1e-5..1e-3, --search lora_r=int:4..64 or --search optim=adamw_torch,muon."
_KINDS = {"float": (False, False), "log": (False, True), "int": (True, False), "logint": (True, True)}


@dataclass(frozen=True)
class Dimension:
    """One searched setting: `choices`, or a range with both ends in it."""

    name: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_int: bool = False
    is_log: bool = False

    def at(self, share: float) -> Value:
        """The value at a share of the range, 0 <= share < 1; each choice and each integer has an equal part of it."""
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        low, high = (self.low - 0.5, self.high + 0.5) if self.is_int else (self.low, self.high)
        if self.is_log:
            value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        else:
            value = low + share * (high - low)
        value = min(max(math.floor(value + 0.5) if self.is_int else value, self.low), self.high)
        return int(value) if self.is_int else value

    def ends(self) -> list[Value]:
        """The values that are tried on the recipe's rules before any trial: all choices, or both ends."""
        if self.choices:
            return list(self.choices)
        return [int(self.low), int(self.high)] if self.is_int else [self.low, self.high]


def read_space(written: Sequence[str]) -> list[Dimension]:
    """The dimensions of `NAME=log:LOW..HIGH`, `float:`, `int:`, `logint:` or `NAME=a,b,c`, each name once.

    Raises:
        Refusal: none is given, or one cannot be read.
    """
    if not written:
        raise Refusal(f"--search: nothing is searched. {_EXAMPLE}")
    space = [_read_dimension(text) for text in written]
    names = [dimension.name for dimension in space]
    for name in names:
        if names.count(name) > 1:
            raise Refusal(f"--search {name}: given {names.count(name)} times. Write its values in one, such as {name}=a,b.")
    return space


def _read_dimension(text: str) -> Dimension:
    name, equals, values = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    if not equals or not name or not values.strip():
        raise Refusal(f"--search {text}: a setting and its values are expected. {_EXAMPLE}")
    kind, colon, span = values.partition(":")
    if colon and ".." in span and kind not in _KINDS:
        raise Refusal(f"--search {text}: {kind} is no kind of range; there are {', '.join(_KINDS)}.")
    if kind not in _KINDS or not colon:
        if ".." in values and "," not in values:
            raise Refusal(f"--search {text}: a range needs its kind, such as {name}=float:{values} or {name}=log:{values}.")
        choices = tuple(choice.strip() for choice in values.split(","))
        if "" in choices or len(set(choices)) < len(choices):
            raise Refusal(f"--search {text}: a choice is empty or given twice.")
        return Dimension(name, choices)
    is_int, is_log = _KINDS[kind]
    try:
        low, high = (int(end) if is_int else float(end) for end in span.split(".."))
    except ValueError:
        ends = "integers" if is_int else "numbers"
        raise Refusal(f"--search {text}: two {ends} are expected, as in {kind}:LOW..HIGH.") from None
    if not (math.isfinite(low) and math.isfinite(high)):
        raise Refusal(f"--search {text}: both ends must be finite.")
    if low >= high:
        raise Refusal(f"--search {text}: the range is {'upside down' if low > high else 'empty'}. Write {kind}:{high}..{low}.")
    if is_log and low <= 0:
        raise Refusal(f"--search {text}: a logarithmic range begins above 0; {low} does not.")
    return Dimension(name, (), low, high, is_int, is_log)
