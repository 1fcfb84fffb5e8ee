"""Counts of a split: every row is counted while it is tokenized, and the counts are kept with the tokenized rows.

So a report is the same when the rows come from the cache. What cannot be trained on as a whole is refused here.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from toolkit.config import Refusal
from toolkit.data.tokenize.documents import IGNORED, Cut, Documents, Rules
from toolkit.data.tokenize.tool_calls import UNKNOWN_CALL, UNKNOWN_TOOL

ANSWER_CLASSES = ("desirable", "undesirable")  # of single answers
# What may be unusual about rows, by how often: {of one|of several}.
REMARKS = {
    "short": "shorter than --min-length, left out",
    "duplicates": "{is an exact duplicate of another|are exact duplicates of others}",
    "also_in_train": "{is|are} in train too, so that its metrics will flatter the model",
    "merged": "{has|have} a token that joins the prompt's end with the answer's start; it is supervised",
    "rewritten": "{chat has|chats have} earlier turns that the template writes otherwise than when they were the last, such as "
    "without their thinking; they are trained on as written",
    "ties": "{row makes|rows make} no pair: none of {its|their} answers is better than another",
    "contradicted": "{answer is|answers are} in one list with different scores or ranks, and {is|are} left out of it",
    "unscored": "{answer|answers} of a list {has|have} no score or rank (null or NaN), and {is|are} left out of it",
    "undecided": "{row makes|rows make} no pair once these answers are left out",
    "same_answers": "{pair is|pairs are} left out: chosen and rejected are the same",
    "capped": "{list makes|lists make} more pairs than --max-pairs-per-prompt: those whose answers lie furthest apart are kept",
    "both_labels": "{answer is|answers are} marked desirable in one row and undesirable in another",
    "identical": "{pair|pairs} dropped, as truncation made {its|their} answers the same",
    "clipped": "{prompt was|prompts were} cut on the left to leave room for the answers",
    "not_higher": "{pair has|pairs have} a chosen answer that scores no higher than the rejected one",
    "no_relevant": "{list has|lists have} no document with a label above 0, and {counts|count} 0 in mrr, map, recall and ndcg",
    "same_label": "{list has|lists have} one label for all of {its|their} documents: nothing in {it|them} can be compared",
    "two_labels": "{list has|lists have} one document with two labels, of which one must be wrong",
    "cut_queries": "{query is|queries are} longer than half of --max-length, and cut too",
    "cut_choices": "{question has|questions have} a choice that --max-length cuts: it alone is longer",
    "right_twice": "{question has|questions have} {its|their} right choice twice, and can't be answered for certain",
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
    unsupervised: int  # dropped because no supervised token was left
    classes: dict[str, int]
    remarks: dict[str, int] = field(default_factory=dict)  # counts of REMARKS
    odd_tools: dict[str, tuple[int, str]] = field(default_factory=dict)  # of TOOL_REMARKS: how many chats, and the first one


@dataclass(frozen=True)
class Measures:
    """Of one batch of documents: what is summed up over a split."""

    whole: np.ndarray  # length of each document before cutting
    rows: np.ndarray  # int64, a hash of each, the same in every process
    wanted: list[int]  # the hashes of those that are marked desirable
    sums: Counter[str]
    first_origin: str


def measure(whole: Documents, kept: Documents, cut: Cut, rules: Rules, remarks: Counter[str]) -> Measures:
    """Count a batch before and after cutting; `remarks` are counts that only tokenizing has."""
    ends, supervised_ends = _count_turn_ends(whole, rules)
    sums = Counter(
        examples=len(kept), tokens=len(kept.values), supervised_tokens=int(kept.supervised().sum()), overlong=cut.overlong,
        cut_tokens=cut.tokens, unsupervised=cut.unsupervised, ends=ends, supervised_ends=supervised_ends,
        kept_ends=_count_turn_ends(kept, rules)[1], identical=cut.identical, clipped=cut.clipped,
    )  # fmt: skip
    tokens = (whole.values[a:b].tobytes() for a, b in pairwise(whole.bounds.tolist()))
    rows = np.frombuffer(b"".join(hashlib.blake2b(each, digest_size=8).digest() for each in tokens), np.int64)
    marks = whole.columns.get("desirable", [])
    wanted = [row for row, mark in zip(rows.tolist(), marks, strict=False) if mark]
    first_origin = whole.origins[0] if whole.origins else ""
    return Measures(whole.whole, rows, wanted, sums + remarks, first_origin)


def measures_to_json(measures: Measures) -> dict[str, Any]:
    sums = {name: int(count) for name, count in measures.sums.items()}
    return {**vars(measures), "whole": measures.whole.tolist(), "rows": measures.rows.tolist(), "sums": sums}


def measures_from_json(found: dict[str, Any]) -> Measures:
    whole, rows = (np.array(found[name], dtype=np.int64) for name in ("whole", "rows"))
    return Measures(whole, rows, found["wanted"], Counter(found["sums"]), found["first_origin"])


def _count_turn_ends(documents: Documents, rules: Rules) -> tuple[int, int]:
    """How many tokens end a text or a turn, and how many of these are supervised."""
    is_end = np.isin(documents.values, rules.turn_ends)
    supervised = is_end if documents.labels is None else is_end & (documents.labels != IGNORED)
    return int(is_end.sum()), int(supervised.sum())


def summarize(
    name: str, measures: list[Measures], is_masked: bool, max_length: int, classes: list[str],
    train_rows: np.ndarray | None = None, length_flag: str = "--max-length",
) -> SplitCounts:  # fmt: skip
    """Counts of a split; `train_rows` are the hashes of the training split (`row_hashes`), for another split.

    Raises:
        Refusal: nothing is left of it, or its mask leaves out every end of a turn.
    """
    sums = sum((part.sums for part in measures), Counter())
    whole = np.concatenate([part.whole for part in measures]) if measures else np.zeros(0, dtype=np.int64)
    if (pairless := sums["ties"] + sums["undecided"] + sums["same_answers"]) and not len(whole):
        of_lists = sums["contradicted"] + sums["unscored"]
        left_out = f", once {of_lists:,} are left out that are there with two scores, or with none" * bool(of_lists)
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
    rows = row_hashes(measures)
    sums["duplicates"] = len(rows) - len(np.unique(rows))
    sums["also_in_train"] = 0 if train_rows is None else int(np.isin(rows, train_rows).sum())
    counted = ("examples", "tokens", "overlong", "cut_tokens", "unsupervised")
    return SplitCounts(
        name=name, supervised_tokens=sums["supervised_tokens"] if is_masked else None, median=int(median),
        percentile_95=int(percentile_95), longest=int(whole.max(initial=0)),
        classes={label: sums[f"class {label}"] for label in classes},
        remarks={remark: sums[remark] for remark in REMARKS if sums[remark]},
        odd_tools=_odd_tools(sums), **{key: sums[key] for key in counted},
    )  # fmt: skip


def row_hashes(measures: list[Measures]) -> np.ndarray:
    """Of all rows of a split, in their order."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *(part.rows for part in measures)])


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
    given = Counter(row_hashes(measures).tolist())
    return sum(given[row] > count for row, count in wanted.items())
