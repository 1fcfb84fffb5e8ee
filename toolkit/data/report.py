"""The report of tokenized data: what was counted, what is unusual, and one example with its supervised text marked.

Every row is counted while it is tokenized. The counts are kept with the tokenized rows, so that a report is the same when those
come from the cache. Nothing is printed here but by `print_data_report`.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TextIO

import numpy as np

from toolkit.config import Refusal
from toolkit.data.sources.find_files import with_given_paths
from toolkit.data.tokenize.documents import IGNORED, Cut, Documents, Rules
from toolkit.data.tokenize.tool_calls import UNKNOWN_CALL, UNKNOWN_TOOL
from toolkit.system.console import MARKED, printable, shows_color, write

FEW_ROWS = 20  # with fewer one row moves an accuracy by more than 5 %
SHOWN_CHARACTERS = 1000  # of the example; what is longer has its middle left out
ANSWER_CLASSES = ("desirable", "undesirable")  # of single answers
Piece = tuple[str, bool]  # text, and whether it is supervised
# What may be unusual about the rows of a task, by how often: {of one|of several}.
REMARKS = {
    "ties": "{row makes|rows make} no pair: none of {its|their} answers is better than another",
    "contradicted": "{answer stands|answers stand} in one list with different scores or ranks, and {is|are} left out of it",
    "undecided": "{row makes|rows make} no pair once these answers are left out",
    "capped": "{list makes|lists make} more pairs than --max-pairs-per-prompt: those whose answers lie furthest apart are kept",
    "both_labels": "{answer is|answers are} marked desirable in one row and undesirable in another",
    "identical": "{pair|pairs} dropped, as truncation made {its|their} answers the same",
    "clipped": "{prompt was|prompts were} cut on the left to leave room for the answers",
    "not_higher": "{pair has|pairs have} a chosen answer that scores no higher than the rejected one",
    "no_relevant": "{list has|lists have} no document with a label above 0, and {counts|count} 0 in mrr, map, recall and ndcg",
    "same_label": "{list has|lists have} one label for all of {its|their} documents: nothing in {it|them} can be compared",
    "cut_queries": "{query is|queries are} longer than half of --max-length, and cut too",
    "cut_words": "{word and its tag is|words and their tags are} beyond --max-length, and {is|are} neither trained on nor "
    "counted in a metric",
    "untokenized_words": "{word has|words have} no token at all, and {is|are} neither trained on nor counted in a metric",
    "spans_in_words": "{span begins or ends|spans begin or end} inside a word, which is taken whole",
    "broken_tags": "{tag breaks|tags break} the scheme of the others; read as an entity that begins there",
    "turns": "{pair has|pairs have} turns of others than the assistant in {its|their} answers; these count as the answers do",
    "rewritten_prompts": "{prompt is|prompts are} written otherwise by the template once an answer follows; "
    "{it is|they are} trained on so",
    "unanswerable": "{question has|questions have} no answer in {its|their} context",
    "cut_answers": "{answer is|answers are} cut by every window: {it is|they are} trained on as none, and can't be found "
    "whole; a longer --max-length or --doc-stride would hold {it|them}",
}
TOOL_REMARKS = {
    UNKNOWN_TOOL: "{chat calls|chats call} a function that is not among {its|their} tools",
    UNKNOWN_CALL: "{chat has|chats have} the result of a call that {it does|they do} not hold (tool_call_id)",
}


@dataclass(frozen=True)
class SplitCounts:
    """Counts of one split. Lengths are in tokens, of whole examples; the rest is what is left after cutting."""

    name: str
    examples: int
    tokens: int
    supervised_tokens: int | None  # None where labels are not tokens, or all tokens are supervised
    median: int
    percentile_95: int
    longest: int
    overlong: int
    cut_tokens: int  # cut off or dropped
    dropped: int
    unsupervised: int  # dropped because no supervised token was left
    duplicates: int
    also_in_train: int
    merged: int  # examples in which a token holds both the end of a prompt and the start of what is supervised
    rewritten: int  # chats that the template writes otherwise than they were generated
    classes: dict[str, int]
    remarks: dict[str, int] = field(default_factory=dict)  # counts of REMARKS
    short: int = 0  # left out for having fewer tokens than --min-length
    odd_tools: dict[str, tuple[int, str]] = field(default_factory=dict)  # of TOOL_REMARKS: how many chats, and the first one


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
    length_flag: str = "--max-length"  # of the setting that says the longest length


@dataclass(frozen=True)
class Measures:
    """Of one batch of documents: what is summed up over a split."""

    whole: np.ndarray  # length of each document before cutting
    rows: list[int]  # a hash of each
    wanted: list[int]  # the hashes of those that are marked desirable
    sums: Counter[str]
    first_origin: str


def measure(whole: Documents, kept: Documents, cut: Cut, rules: Rules, remarks: Counter[str]) -> Measures:
    """Count a batch before and after cutting; `remarks` are counts that only tokenizing knows."""
    ends, supervised_ends = _count_turn_ends(whole, rules)
    sums = Counter(
        examples=len(kept), tokens=len(kept.values), supervised_tokens=int(kept.supervised().sum()), overlong=cut.overlong,
        cut_tokens=cut.tokens, dropped=cut.dropped, unsupervised=cut.unsupervised, ends=ends, supervised_ends=supervised_ends,
        kept_ends=_count_turn_ends(kept, rules)[1], identical=cut.identical, clipped=cut.clipped,
    )  # fmt: skip
    rows = [hash(whole.values[a:b].tobytes()) for a, b in pairwise(whole.bounds.tolist())]
    marks = whole.columns.get("desirable", [])
    wanted = [row for row, mark in zip(rows, marks, strict=False) if mark]
    return Measures(whole.whole, rows, wanted, sums + remarks, whole.origins[0] if whole.origins else "")


def _count_turn_ends(documents: Documents, rules: Rules) -> tuple[int, int]:
    """How many tokens end a text or a turn, and how many of these are supervised."""
    is_end = np.isin(documents.values, rules.turn_ends)
    supervised = is_end if documents.labels is None else is_end & (documents.labels != IGNORED)
    return int(is_end.sum()), int(supervised.sum())


def summarize(
    name: str, measures: list[Measures], is_masked: bool, max_length: int, classes: list[str],
    train_rows: Set[int] = frozenset(), length_flag: str = "--max-length",
) -> SplitCounts:  # fmt: skip
    """Counts of a split; `train_rows` are the hashes of the training split's rows, for another split.

    Raises:
        Refusal: nothing is left of it, or its mask leaves out every end of a turn.
    """
    sums = sum((part.sums for part in measures), Counter())
    whole = np.concatenate([part.whole for part in measures]) if measures else np.zeros(0, dtype=np.int64)
    if (pairless := sums["ties"] + sums["undecided"]) and not len(whole):
        left_out = f", once {sums['contradicted']:,} are left out that are there with two scores" * bool(sums["contradicted"])
        raise Refusal(
            f"No row of the {name} split makes a pair: in all {pairless:,} no answer is better than another{left_out}."
        )
    if sums["short"] and not len(whole):
        raise Refusal(
            f"Nothing is left of the {name} split: each of its {sums['short']:,} examples has fewer tokens than --min-length. "
            "Lower it."
        )
    if not sums["examples"] and len(whole):
        raise Refusal(
            f"Nothing is left of the {name} split: of its {len(whole):,} examples {sums['overlong']:,} are longer than "
            f"{length_flag} {max_length}, and {sums['unsupervised']:,} have no supervised token within it. Raise it: the "
            f"longest example has {whole.max():,} tokens."
        )
    if name == "train" and is_masked and sums["ends"] and not sums["kept_ends"]:
        cut_off = f"All were cut off by --max-length {max_length}: raise it, or choose --overlong drop"
        left_out = f"Look at the labels, first at {measures[0].first_origin}: each answer must end with a supervised one."
        raise Refusal(
            f"No end of a text or turn is supervised in the {name} split: the model would never learn to stop. "
            + (cut_off if sums["supervised_ends"] else left_out)
        )
    if classes == [*ANSWER_CLASSES]:
        _check_both_kinds(name, sums)
        sums["both_labels"] = _count_both_labels(measures)
    median, percentile_95 = np.percentile(whole, [50, 95], method="inverted_cdf") if len(whole) else (0, 0)
    rows = [row for part in measures for row in part.rows]
    counted = ("examples", "tokens", "overlong", "cut_tokens", "dropped", "unsupervised", "merged", "rewritten", "short")
    return SplitCounts(
        name=name, supervised_tokens=sums["supervised_tokens"] if is_masked else None, median=int(median),
        percentile_95=int(percentile_95), longest=int(whole.max(initial=0)), duplicates=len(rows) - len(set(rows)),
        also_in_train=sum(row in train_rows for row in rows),
        classes={label: sums[f"class {label}"] for label in classes},
        remarks={remark: sums[remark] for remark in REMARKS if sums[remark]},
        odd_tools=_odd_tools(sums), **{key: sums[key] for key in counted},
    )  # fmt: skip


def _odd_tools(sums: Counter[str]) -> dict[str, tuple[int, str]]:
    """Of each of TOOL_REMARKS how many chats, and where the first one lies: the keys are `unknown_tool at chats.jsonl:7`."""
    found: dict[str, tuple[int, str]] = {}
    for key in sums:
        what, _, origin = key.partition(" at ")
        if what in TOOL_REMARKS and origin:
            count, first = found.get(what, (0, origin))
            found[what] = count + 1, first
    return found


class NeedsBothKinds(Refusal):
    """Of desirable and undesirable answers one kind is missing."""


def _check_both_kinds(name: str, sums: Counter[str]) -> None:
    """Refuse answers to train on of which none is desirable, or none undesirable."""
    missing = [kind for kind in ANSWER_CLASSES if not sums[f"class {kind}"]]
    if name == "train" and missing:
        value = "true" if missing == ["undesirable"] else "false"
        instead = " To learn from good answers alone: recipes/sft.py, without the column label." if value == "true" else ""
        raise NeedsBothKinds(f"label is {value} in each row of the {name} split: no answer in it is {missing[0]}.{instead}")


def _count_both_labels(measures: list[Measures]) -> int:
    wanted = Counter(row for part in measures for row in part.wanted)
    given = Counter(row for part in measures for row in part.rows)
    return sum(given[row] > count for row, count in wanted.items())


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
    if split.short:
        lines.append(f"{split.short:,} shorter than --min-length, left out")
    if split.overlong:
        what = {"truncate": "truncated", "drop": "dropped", "split": "split"}[report.overlong]
        share = split.cut_tokens / (split.tokens + split.cut_tokens)
        lost = f"; {split.cut_tokens:,} tokens ({share:.1%}) are lost" if split.cut_tokens else ""
        lines.append(f"{split.overlong:,} longer than {report.max_length:,} tokens, {what}{lost}")
    if split.unsupervised:
        lines.append(f"{split.unsupervised:,} of these dropped, as no supervised token was left")
    if split.duplicates:
        lines.append(_counted(split.duplicates, "{is an exact duplicate of another|are exact duplicates of others}"))
    if split.also_in_train:
        lines.append(_counted(split.also_in_train, "{is|are} in train too, so that its metrics will flatter the model"))
    if split.merged:
        joins = "{has|have} a token that joins the prompt's end with the answer's start; it is supervised"
        lines.append(_counted(split.merged, joins))
    if split.rewritten:
        lines.append(_counted(
            split.rewritten, "{chat has|chats have} earlier turns that the template writes otherwise than when they were the "
            "last, such as without their thinking; they are trained on as written",
        ))  # fmt: skip
    lines += [_counted(count, REMARKS[remark]) for remark, count in split.remarks.items()]
    lines += [
        f"WARNING: {_counted(count, TOOL_REMARKS[remark])}: {'first at ' if count > 1 else ''}{with_given_paths(first)}"
        for remark, (count, first) in split.odd_tools.items()
    ]
    if split.name != "train" and split.examples < FEW_ROWS:
        few = _counted(split.examples, "{row is|rows are}") if split.examples else "no rows are left, which is"
        lines.append(f"{few} too few to tell one model from another; its metrics say little")
    if split.classes:
        whole = max(split.examples, sum(split.classes.values()), 1)  # of tags, words
        shares = [f"{label} {count / whole:.1%}" for label, count in split.classes.items()]
        lines.append("classes: " + ", ".join(shares[:12]) + (f" and {len(shares) - 12} more" if len(shares) > 12 else ""))
    return [f"{split.name}: {line}" for line in lines]


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
