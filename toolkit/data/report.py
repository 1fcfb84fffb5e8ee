"""The report of tokenized data: what was counted, what is unusual, and one example with its supervised text marked.

Nothing is printed here but by `print_data_report`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

from toolkit.data.sources.find_files import with_given_paths
from toolkit.data.split_counts import REMARKS, TOOL_REMARKS, SplitCounts
from toolkit.data.tokenize.documents import IGNORED
from toolkit.system.console import MARKED, first_of, printable, quoted, shows_color, write

FEW_ROWS = 20  # with fewer one row moves an accuracy by more than 5 %
SHOWN_CHARACTERS = 1000  # of the example; what is longer has its middle left out
Piece = tuple[str, bool]  # text, and whether it is supervised


@dataclass(frozen=True)
class DataReport:
    """Counts of all splits, notes, and one example in pieces."""

    layout: str
    max_length: int
    overlong: str
    splits: list[SplitCounts]
    notes: list[str]
    example: list[Piece] = field(default_factory=list)
    example_origin: str = ""
    example_names: tuple[str, ...] = ()  # of the pieces, where each is shown by itself
    first_rows: int | None = None  # of a stream: how many rows were counted
    length_flag: str = "--max-length"  # of the setting for the longest length

    def __repr__(self) -> str:
        counts = ", ".join(f"{split.name} {split.examples:,} examples" for split in self.splits)
        return f"DataReport({self.layout}: {counts}; print_data_report shows the rest)"


def example_pieces(ids: list[int], labels: list[int] | None, decode: Callable[[list[int]], str]) -> list[Piece]:
    """An example as text, cut where supervised text begins and ends, its middle left out when it is long."""
    is_supervised = [labels is None or label != IGNORED for label in labels or ids]
    borders = [i for i in range(1, len(ids)) if is_supervised[i] != is_supervised[i - 1]]
    texts = [decode(ids[:end]) for end in [0, *borders, len(ids)]]  # of growing beginnings: a piece alone may lose its space
    starts = [0, *borders]
    pieces = [(texts[i + 1][len(texts[i]) :], is_supervised[start]) for i, start in enumerate(starts)] if ids else []
    share = max(SHOWN_CHARACTERS // max(len(pieces), 1), 120)
    return [(_shorten(printable(text), share), mark) for text, mark in pieces]


def part_pieces(parts: list[list[int]], decode: Callable[[list[int]], str]) -> list[Piece]:
    """The prompt of an example and each of its answers as text, supervised but for the first."""
    prompt, *answers = parts
    asked = decode(prompt)
    texts = [asked, *(decode(prompt + answer)[len(asked) :] for answer in answers)]
    return [(_shorten(printable(text), SHOWN_CHARACTERS // 2), i > 0) for i, text in enumerate(texts)]


def print_data_report(report: DataReport, stream: TextIO | None = None) -> None:
    """Print the counts as a table, what is unusual, and the example; from the main process only."""
    if os.environ.get("RANK", "0") == "0":
        stream = stream or sys.stdout
        write("\n".join(report_lines(report, marks_for(stream))) + "\n", stream)


def report_lines(report: DataReport, marks: tuple[str, str]) -> list[str]:
    """The report as text; `marks` are around supervised text."""
    seen = f" (the first {report.first_rows:,} rows of a stream)" if report.first_rows else ""
    lines = [f"Data: {report.layout}{seen}"]
    has_mask = any(split.supervised_tokens is not None for split in report.splits)
    header = ["", "examples", "tokens", *(["supervised"] if has_mask else []), "median", "95 %", "longest"]
    rows = [
        [
            split.name, f"{split.examples:,}", f"{split.tokens:,}",
            *([f"{(split.supervised_tokens or 0) / max(split.tokens, 1):.1%}"] if has_mask else []),
            f"{split.median:,}", f"{split.percentile_95:,}", f"{split.longest:,}",
        ]
        for split in report.splits
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows] if rows else []:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    lines += [f"  {note}" for split in report.splits for note in _remarks(split, report)]
    lines += [f"  {note}" for note in report.notes]
    lines = [printable(line) for line in lines]
    if report.example:
        lines += example_lines(report.example, report.example_origin, report.example_names, marks)
    return lines


def example_lines(pieces: list[Piece], origin: str, names: tuple[str, ...], marks: tuple[str, str]) -> list[str]:
    """An example as text; `names` of the pieces, where each is shown by itself."""
    lines = []
    origin = printable(with_given_paths(origin))
    if names:
        lines.append(f"Example {origin}:")
        for name, (text, _) in zip(names, pieces, strict=True):
            lines += [f"  {name}", *("  | " + line for line in text.split("\n"))]
    else:
        marked = "between " + " and ".join(marks) if marks[0] == "[[" else "underlined"
        is_masked = not all(mark for _, mark in pieces)
        lines.append(f"Example {origin}" + (f", supervised text {marked}:" if is_masked else ":"))
        begin, end = marks if is_masked else ("", "")
        text = "".join(f"{begin}{piece}{end}" if mark else piece for piece, mark in pieces)
        lines += ["  | " + line for line in text.split("\n")]
    return lines


def _remarks(split: SplitCounts, report: DataReport) -> list[str]:
    """What the split lost and what is peculiar about it, in words."""
    lines = []
    if split.overlong:
        what = {"truncate": "truncated", "drop": "dropped", "split": "split"}[report.overlong]
        share = split.cut_tokens / (split.tokens + split.cut_tokens)
        lost = f"; {split.cut_tokens:,} tokens ({share:.1%}) are lost" if split.cut_tokens else ""
        lines.append(f"{split.overlong:,} longer than {report.max_length:,} tokens, {what}{lost}")
    if split.unsupervised:
        lines.append(f"{split.unsupervised:,} of these dropped, as no supervised token was left")
    lines += [_counted(count, REMARKS[remark]) for remark, count in split.remarks.items()]
    lines += [
        f"WARNING: {_counted(count, TOOL_REMARKS[remark])}: {'first at ' if count > 1 else ''}{with_given_paths(first)}"
        for remark, (count, first) in split.odd_tools.items()
    ]
    # A document that is cut into several rows counts as that many.
    if split.name != "train" and max(split.examples, split.tokens // report.max_length) < FEW_ROWS:
        few = _counted(split.examples, "{row is|rows are}") if split.examples else "no rows are left, which is"
        lines.append(f"{few} too few to separate one model from another; its metrics mean little")
    if split.classes:
        whole = max(split.examples, sum(split.classes.values()), 1)  # of tags, words
        shares = [f"{_shown(label)} {count / whole:.1%}" for label, count in split.classes.items()]
        lines.append("classes: " + first_of(shares))
        if (spaced := [_shown(label) for label in split.classes if label != label.strip()]) and split.name == "train":
            lines.append(f"WARNING: white space around a class is part of it, as behind the comma of a CSV: {first_of(spaced)}")
        of_train = next((each.classes for each in report.splits if each.name == "train"), {})
        if missing := [_shown(label) for label, count in split.classes.items() if of_train.get(label) and not count]:
            lines.append(f"classes of train that it lacks, and its metrics say nothing of: {first_of(missing)}")
    return [f"{split.name}: {line}" for line in lines]


def _shown(label: str) -> str:
    """A class as it is, between quotes where that would not be seen, or break the line."""
    return label if label.isprintable() and label == label.strip() else quoted(label)


def _counted(count: int, what: str) -> str:
    """`1 row is`, `2 rows are`: `what` has {of one|of several}."""
    return f"{count:,} " + re.sub(r"\{([^|{}]*)\|([^|{}]*)\}", r"\1" if count == 1 else r"\2", what)


def marks_for(stream: TextIO) -> tuple[str, str]:
    """What is around supervised text: color on a terminal, brackets elsewhere."""
    return (f"\x1b[{MARKED}m", "\x1b[0m") if shows_color(stream) else ("[[", "]]")


def _shorten(text: str, most: int) -> str:
    if len(text) <= 1.2 * most:
        return text
    return f"{text[: most // 2]} [... {len(text) - 2 * (most // 2):,} characters ...] {text[-(most // 2) :]}"
