"""A search space: which settings are searched, and between which values; and what a schedule proposes of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from toolkit.config import Refusal
from toolkit.config.json_and_yaml import parse_yaml, read_text_file
from toolkit.config.setting import flag_of

Value = str | int | float
Point = Mapping[str, Value]  # one value for each searched setting
_EXAMPLE = "Write --search learning_rate=log:1e-5..1e-3, --search lora_r=int:4..64 or --search optim=adamw_torch,muon."
_LARGEST = 2.0**62  # of what Optuna's samplers can draw from: integers of 64 bits, differences that are finite
_KINDS = {"float": (False, False), "log": (False, True), "int": (True, False), "logint": (True, True)}


class Nothing(Enum):
    """What there is to train where there is no proposal."""

    YET = "results are missing"
    MORE = "the sweep has ended"


class Proposal(NamedTuple):
    """A trial, its settings, the step up to which it is trained (None: to its end), and the (trial, step) it is a fork of."""

    trial: int
    settings: Point
    until: int | None = None
    parent: tuple[int, int] | None = None


@dataclass(frozen=True)
class Dimension:
    """One searched setting: `choices`, or a range with both ends in it."""

    name: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_int: bool = False
    is_log: bool = False
    when: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (setting, its values) under which this one is searched at all

    def applies(self, point: Point) -> bool:
        """Whether it is searched next to these values of the dimensions before it."""
        return all(name in point and str(point[name]) in values for name, values in self.when)

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

    def share_of(self, value: Value) -> float:
        """Where a value is in the range, 0 to 1; the other way of `at`, a choice or an integer in the middle of its part."""
        if self.choices:
            return (self.choices.index(str(value)) + 0.5) / len(self.choices)
        low, high = (self.low - 0.5, self.high + 0.5) if self.is_int else (self.low, self.high)
        number = float(value)
        if self.is_log:
            low, high, number = math.log(low), math.log(high), math.log(number)
        return (number - low) / (high - low) if high > low else 0.5

    def ends(self) -> list[Value]:
        """The values that are tried on the recipe's rules before any trial: all choices, or both ends and, of numbers that are
        no integers, one in between, which a setting of whole numbers refuses."""
        if self.choices:
            return list(self.choices)
        return [int(self.low), int(self.high)] if self.is_int else [self.low, self.high, self.at(math.sqrt(0.5))]


def read_space(written: Sequence[str]) -> list[Dimension]:
    """The dimensions of `NAME=log:LOW..HIGH`, `float:`, `int:`, `logint:` or `NAME=a,b,c`, each name once.

    ` when OTHER=a,b` after it searches a setting only where another searched one has one of these values.

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
    return _in_order(space)


def points_at(space: Sequence[Dimension], shares: Sequence[float]) -> Point:
    """The point at a share of each dimension; without those that do not apply to it."""
    point: dict[str, Value] = {}
    for dimension, share in zip(space, shares, strict=True):
        if dimension.applies(point):
            point[dimension.name] = dimension.at(share)
    return point


def searches_in_file(path: Path) -> list[str]:
    """A space in YAML as --search has it: `learning_rate: log:1e-5..1e-3`, `optim: [adamw_torch, muon]`, and for a setting
    that is searched only next to others `momentum: {values: float:0.8..0.99, when: {optim: [sgd]}}`.

    Raises:
        Refusal: it cannot be read.
    """
    found = parse_yaml(read_text_file(path, f"--search {path}"), f"--search {path}")
    if not isinstance(found, dict) or not found:
        raise Refusal(f"--search {path}: settings and their values are expected, such as `learning_rate: log:1e-5..1e-3`.")
    written = []
    for name, values in found.items():
        when: object = {}
        if isinstance(values, dict):
            if not set(values) <= {"values", "when"} or "values" not in values:
                raise Refusal(f"--search {path}: {name} has {', '.join(map(str, values))}; there are `values` and `when`.")
            values, when = values["values"], values.get("when") or {}
        if not isinstance(when, dict):
            raise Refusal(f"--search {path}: `when` of {name} must be settings with values, such as `when: {{optim: sgd}}`.")
        conditions = "".join(f" when {other}={_listed(path, allowed)}" for other, allowed in when.items())
        written.append(f"{name}={_listed(path, values)}{conditions}")
    return written


def _listed(path: Path, values: object) -> str:
    if isinstance(values, dict) or values is None:
        raise Refusal(f"--search {path}: {values} is no value. Write a list, or a range such as log:1e-5..1e-3.")
    each = values if isinstance(values, list) else [values]
    if inner := [value for value in each if value is None or isinstance(value, list | dict)]:
        raise Refusal(f"--search {path}: {inner[0]} can't be a choice: each is one number or one word.")
    texts = [str(value).lower() if isinstance(value, bool) else str(value) for value in each]
    return texts[0] if not isinstance(values, list) else choices_written(texts, f"--search {path}")


def choices_written(values: Sequence[object], where: str) -> str:
    """A list of choices as --search has it.

    Raises:
        Refusal: one of them would be read as something else.
    """
    texts = [str(value) for value in values]
    for text in texts:
        if "," in text or " when " in text or text != text.strip():
            raise Refusal(f"{where}: {text!r} can't be a choice: each is one number or one word. Give it a short name instead.")
    return ",".join(texts)


def _in_order(space: Sequence[Dimension]) -> list[Dimension]:
    """Each after those it depends on, else in the order they were given."""
    ordered: list[Dimension] = []
    known = {dimension.name: dimension for dimension in space}
    for dimension in space:
        for other, values in dimension.when:
            if other not in known or not known[other].choices:
                raise Refusal(f"--search {dimension.name} when {other}: {other} must be searched too, by its choices.")
            if missing := sorted(set(values) - set(known[other].choices)):
                raise Refusal(f"--search {dimension.name} when {other}={missing[0]}: no value of {other} that is searched.")
    rest = list(space)
    while rest:
        ready = [each for each in rest if all(any(other == done.name for done in ordered) for other, _ in each.when)]
        if not ready:
            raise Refusal(f"--search {rest[0].name}: its condition goes in a circle.")
        ordered.append(ready[0])
        rest.remove(ready[0])
    return ordered


def _read_dimension(text: str) -> Dimension:
    text, *conditions = text.split(" when ")
    dimension = _read_values(text)
    when = []
    for condition in conditions:
        name, equals, values = condition.partition("=")
        if not equals or not values.strip():
            raise Refusal(f"--search {text} when {condition}: a setting and its values are expected, such as when optim=sgd.")
        when.append((_name(name), tuple(value.strip() for value in values.split(","))))
    return replace(dimension, when=tuple(when))


def _name(written: str) -> str:
    return written.strip().removeprefix("--").replace("-", "_")


def _read_values(text: str) -> Dimension:
    name, equals, values = text.partition("=")
    name, values = _name(name), values.strip()
    if not equals or not name or not values:
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
    if "..." in span:
        raise Refusal(f"--search {text}: three dots; write {kind}:LOW..HIGH.")
    try:
        low, high = (int(end) if is_int else float(end) for end in span.split(".."))
    except ValueError:
        ends = "integers" if is_int else "numbers"
        raise Refusal(f"--search {text}: two {ends} are expected, as in {kind}:LOW..HIGH.") from None
    if not (abs(low) <= _LARGEST and abs(high) <= _LARGEST):
        raise Refusal(f"--search {text[:80]}: both ends must be finite, and within {_LARGEST:g}.")
    if low > high:
        raise Refusal(f"--search {text}: the range is upside down. Write {kind}:{high}..{low}.")
    if low == high:
        flag = f"{flag_of(name)} {low}"
        raise Refusal(f"--search {text}: the range is empty. For one value, leave out --search {name} and give {flag}.")
    if is_log and low <= 0:
        raise Refusal(f"--search {text}: a logarithmic range begins above 0; {low} does not.")
    return Dimension(name, (), low, high, is_int, is_log)
