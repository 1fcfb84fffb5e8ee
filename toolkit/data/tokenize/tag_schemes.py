"""Schemes of tags: how B-, I-, E- and S- say where an entity begins and ends, and which tags break the scheme they follow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

OUTSIDE, BEGIN, INSIDE, END, SINGLE = range(5)
PREFIXES = {"O": OUTSIDE, "B": BEGIN, "I": INSIDE, "E": END, "L": END, "S": SINGLE, "U": SINGLE}  # L and U: BILOU's
WRITTEN = {
    "iob1": "a B- only divides two entities of one type; else an entity begins with I-",
    "iob2": "an entity begins with B- and continues with I- of the same type",
    "iobes": "an entity is B-, I- ... and E- of one type, or a single S-",
}
_TAG = re.compile(r"O|[BIELSU](-.+)?", re.DOTALL)


@dataclass(frozen=True)
class TagParts:
    """The prefix and the number of the type of each tag `[tags]`."""

    prefixes: np.ndarray
    kinds: np.ndarray

    def breaches(self, sentences: Sequence[np.ndarray], scheme: str) -> np.ndarray:
        """Whether each tag of the sentences, one behind the other, breaks the scheme: `[words]`, all false for plain tags."""
        if scheme == "plain" or not sentences:
            return np.zeros(sum(map(len, sentences)), dtype=bool)
        outside = np.array([-1])
        flat = np.concatenate([part for sentence in sentences for part in (sentence, outside)])
        prefix = np.where(flat < 0, OUTSIDE, self.prefixes[flat])
        kind = np.where(flat < 0, -1, self.kinds[flat])
        before, is_same = np.roll(prefix, 1), np.roll(kind, 1) == kind  # what is last is outside, also before the first
        was_open = (before == BEGIN) | (before == INSIDE)
        follows = was_open & is_same
        if scheme == "iobes":
            goes_on = (prefix == INSIDE) | (prefix == END)
            breaks = (was_open | goes_on) & ~(follows & goes_on)
            breaks[:-1] |= breaks[1:] & (flat[1:] < 0)  # a sentence that ends too early: its last word
        else:
            breaks = (prefix == (INSIDE if scheme == "iob2" else BEGIN)) & ~follows
        return breaks[flat >= 0]


def parts_of_tags(names: Sequence[str]) -> TagParts | None:
    """The parts of tags such as O, B-PER and I-PER; None where they are plain: not all of this form."""
    if not all(_TAG.fullmatch(name) for name in names) or not any(name[0] in "BI" for name in names):
        return None
    kinds = {name: number for number, name in enumerate(dict.fromkeys(name[2:] for name in names if name != "O"))}
    return TagParts(
        np.array([PREFIXES[name[0]] for name in names]),
        np.array([-1 if name == "O" else kinds[name[2:]] for name in names]),
    )


def tags_of_no_scheme(names: Sequence[str]) -> list[str]:
    """Those among tags such as O and B-PER that have no such form, such as a mistyped B_LOC or Q-; usually none."""
    others = [name for name in names if not _TAG.fullmatch(name)]
    return others if "O" in names and any(name.startswith("B-") and len(name) > 2 for name in names) else []


def scheme_of(names: Sequence[str], batches: Iterable[Sequence[np.ndarray]]) -> str:
    """plain, iobes, or which of iob1 and iob2 the sentences of tags follow; iob2 where they follow neither."""
    parts = parts_of_tags(names)
    if parts is None:
        return "plain"
    if {END, SINGLE} & set(parts.prefixes.tolist()):
        return "iobes"
    broken = {"iob2": False, "iob1": False}
    for sentences in batches:
        for scheme in broken:
            broken[scheme] = broken[scheme] or bool(parts.breaches(sentences, scheme).any())
        if all(broken.values()):
            break
    return "iob1" if broken["iob2"] and not broken["iob1"] else "iob2"


def continuations(names: Sequence[str]) -> np.ndarray:
    """The tag `[tags]` of the later sub-words of a word, where these have one: I- after B-, if there is such a tag."""
    places = {name: number for number, name in enumerate(names)}
    if parts_of_tags(names) is None:
        return np.arange(len(names))
    return np.array([places.get(f"I{name[1:]}", i) if name[0] == "B" else i for i, name in enumerate(names)])
