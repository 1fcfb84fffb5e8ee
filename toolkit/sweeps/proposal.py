"""What a schedule proposes."""

from enum import Enum
from typing import NamedTuple

from toolkit.sweeps.space import Point


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
