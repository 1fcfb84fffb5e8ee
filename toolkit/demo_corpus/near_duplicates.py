"""Held-out texts that are nearly in the training texts: a split by module leaves copies of functions on both sides."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

WINDOW = 8  # tokens; a held-out text most of whose windows are in the training texts is a near-duplicate
NEARLY_ALL = 0.7

_WORDS = re.compile(r"\w+|[^\w\s]")


def without_leaks(rows: list[dict[str, Any]], fields: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows less the held-out ones that have a near-duplicate in train, by any of `fields`.

    A text is one when it is a training text but for white space and case, and when NEARLY_ALL of its windows of WINDOW tokens
    are in training texts.
    """
    leaking: set[int] = set()
    held_out = [place for place, row in enumerate(rows) if row["split"] != "train"]
    for field in fields:
        training = [row[field] for row in rows if row["split"] == "train"]
        asked = [rows[place][field] for place in held_out]
        known_texts = {plain(text) for text in training}
        windows, owner = _windows(asked + training)
        is_asked = owner < len(asked)
        known = np.isin(windows[is_asked], windows[~is_asked])
        total = np.bincount(owner[is_asked], minlength=len(asked))
        share = np.bincount(owner[is_asked], known, minlength=len(asked)) / np.maximum(total, 1)
        leaking |= {
            place
            for place, text, known_share in zip(held_out, asked, share, strict=True)
            if known_share >= NEARLY_ALL or plain(text) in known_texts
        }
    return [row for place, row in enumerate(rows) if place not in leaking]


def _windows(texts: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all windows of WINDOW tokens, and the index of the text that each is from."""
    numbers: dict[str, int] = defaultdict(lambda: len(numbers) + 1)
    split = [[numbers[word] for word in (_WORDS.findall(text) if isinstance(text, str) else text)] for text in texts]
    tokens = np.fromiter(itertools.chain.from_iterable(split), np.uint64)
    owner = np.repeat(np.arange(len(texts)), [len(words) for words in split])
    if len(tokens) < WINDOW:
        return tokens[:0], owner[:0]
    hashes = np.zeros(len(tokens) - WINDOW + 1, np.uint64)
    for step in range(WINDOW):  # a polynomial modulo 2^64
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + tokens[step : step + len(hashes)]
    whole = owner[: len(hashes)] == owner[WINDOW - 1 :]
    return hashes[whole], owner[: len(hashes)][whole]


def plain(text: str | Sequence[str]) -> str:
    """The text without white space and case; texts that agree in it count as the same."""
    return "".join((text if isinstance(text, str) else " ".join(text)).split()).lower()
