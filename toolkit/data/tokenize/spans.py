"""Spans of characters to tags of words: a text is cut into words, and each span becomes B- and I- of its label."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from toolkit.config import Refusal
from toolkit.data.tokenize.columns import as_whole, describe
from toolkit.system.console import quoted

WORDS = re.compile(r"\w+|[^\w\s]")
Span = tuple[int, int, str]
_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "start": ((int,), "the number of its first character, from 0"),
    "end": ((int,), "the number of the character after its last one"),
    "label": ((str, int), "a name"),
}


def read_spans(value: object, text: str, column: str, origin: str) -> list[Span]:
    """Start, end and label of each span, in their order.

    Raises:
        Refusal: what is no span, lies outside the text, or overlaps another one.
    """
    if isinstance(value, dict) and _FIELDS.keys() <= value.keys() and all(isinstance(part, list) for part in value.values()):
        # as datasets gives a sequence of objects
        value = [dict(zip(value, each, strict=True)) for each in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        raise Refusal(f"{origin}: {column} is {describe(value)}, and must be a list of start, end and label; [] of none.")
    spans = list[Span]()
    for number, span in enumerate(value, 1):
        start, end, label = _fields(span, f"{origin}: span {number} of {column}")
        if not 0 <= start < end <= len(text):
            raise Refusal(
                f"{origin}: span {number} of {column}, {start} to {end}, is outside its text of {len(text)} characters, or "
                "empty. start is the first character, from 0; end is the one after the last."
            )
        spans.append((start, end, label))
    spans.sort()
    for (start, end, label), (then, until, other) in pairwise(spans):
        if then < end:
            raise Refusal(
                f"{origin}: the spans {quoted(text[start:end])} ({label}, {start} to {end}) and {quoted(text[then:until])} "
                f"({other}, {then} to {until}) overlap. A word has one tag: keep one of them."
            )
    return spans


def _fields(span: object, where: str) -> Span:
    if not isinstance(span, dict):
        raise Refusal(f"{where} is {describe(span)}, and must be an object with start, end and label. Correct or remove it.")
    found: dict[str, Any] = {name: as_whole(span.get(name)) for name in _FIELDS}
    for name, (kinds, what) in _FIELDS.items():
        if not isinstance(found[name], kinds) or isinstance(found[name], bool) or found[name] == "":
            raise Refusal(f"{where}: its {name} is {describe(found[name])}, and must be {what}. Correct or remove it.")
    return found["start"], found["end"], str(found["label"])


def tag_words(text: str, spans: list[Span], origin: str) -> tuple[list[str], list[str], int]:
    """The words of a text, their tags (O, B-label, I-label), and how many spans begin or end inside a word.

    A word that a span touches is in it whole.

    Raises:
        Refusal: a text without words, a span without one, or two spans in one word.
    """
    words = list(WORDS.finditer(text))
    if not words:
        raise Refusal(f"{origin}: text has no words. Fill it in or remove the row.")
    tags, cut, first = ["O"] * len(words), 0, 0
    for start, end, label in spans:
        while first < len(words) and words[first].end() <= start:
            first += 1
        last = first
        while last < len(words) and words[last].start() < end:
            last += 1
        if first == last:
            raise Refusal(f"{origin}: the span {start} to {end} ({label}) holds no word, only white space. Remove it.")
        if tags[first] != "O":
            raise Refusal(
                f"{origin}: the word {quoted(words[first].group())} has parts of two spans ({tags[first][2:]} and {label}). "
                "A word has one tag: keep one of them."
            )
        tags[first:last] = [f"B-{label}", *[f"I-{label}"] * (last - first - 1)]
        cut += words[first].start() < start or words[last - 1].end() > end
    return [word.group() for word in words], tags, cut
