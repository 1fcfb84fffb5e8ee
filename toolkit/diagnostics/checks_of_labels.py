"""Checks of labels: which tokens are supervised, and where answers in a context begin and end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from toolkit.config import Settings
from toolkit.config.reading import values_of
from toolkit.diagnostics.checks_of_data import HIDDEN, IGNORED, are_in_place, micro_batch_of, rows_of, with_token_labels
from toolkit.diagnostics.findings import Finding, Outcome, found, skipped
from toolkit.diagnostics.records import MadeBatch, Record

CAUSAL = ("sft", "lm")
_ALIGNED = (*HIDDEN, "token_classification")
_SHOWN = 100  # characters


def check_masks(record: Record, config: Settings) -> Outcome:
    """As many tokens are supervised as the data say, prompts are not, and no target is left out or added in the loss."""
    findings = [_counted_in_loss(record), *(each for each in record.noted if each.check == "masks")]
    made = [each for each in with_token_labels(record) if each.kind == "train"]
    if not made:
        return found("", *findings) if any(findings) else skipped("labels of whole examples")
    aligned = record.task in _ALIGNED
    total = supervised = said = 0
    where = ""
    for each in made:
        labels = each.tensors["labels"]
        supervised += int((labels != IGNORED).sum())
        said += sum(supervised_of(document, aligned) for document in each.documents)
        total += sum(len(document["input_ids"]) for document in each.documents)
        where = where or each.where
    note = f"{supervised:,} of {total:,} tokens are supervised{_supervised_text(made[0], record)}"
    if supervised != said:
        more = "more" if supervised > said else "fewer"
        what = (
            f"{supervised:,} tokens are supervised in the micro-batches, and {said:,} in the tokenized rows: {more} than "
            "the data say."
        )
        change = (
            "Keep the labels that tk.collate_padded or tk.collate_packed makes. Only -100 is left out of a loss: prompts, "
            "padding and the first token of a document."
        )
        findings.append(Finding("masks", what, change, where))
    elif record.task in HIDDEN:
        evaluated = [each for each in with_token_labels(record) if each.kind == "eval"]
        findings += [_nothing_hidden(made), _nothing_hidden(evaluated, "augment_evaluation"), _ends_hidden(made, record)]
    elif record.task == "token_classification":
        findings.append(_labels_moved(made))
    elif record.task in CAUSAL and _has_prompts(record) and not _wants_prompts(config):
        first = next((d for each in made for d in each.documents if supervised_of(d, False) >= len(d["input_ids"]) - 1), None)
        if first is not None:
            what = (
                f"Every token is supervised, that of prompts too ({first.get('origin', 'all rows')}), and the data have "
                "prompts."
            )
            change = (
                "Tokenize with tk.tokenize_for_sft and keep its labels. If prompts are to be learned: "
                "--no-completion-only-loss or --no-assistant-only-loss."
            )
            findings.append(Finding("masks", what, change, where))
    return found(note, *findings)


def _supervised_text(made: MadeBatch, record: Record) -> str:
    """What the labels of the first document read."""
    if record.tokenizer is None or not made.documents:
        return ""
    labels, _ = next(rows_of(made))
    text = json.dumps(record.tokenizer.decode([int(label) for label in labels if label != IGNORED]), ensure_ascii=False)
    return f", of the first text {text if len(text) <= _SHOWN else text[: _SHOWN // 2] + ' ... ' + text[-_SHOWN // 2 :]}"


def supervised_of(document: dict[str, Any], aligned: bool) -> int:
    """Supervised tokens of a tokenized document as a collate function is to count them."""
    labels = document["labels"] if "labels" in document else document["input_ids"]
    return sum(1 for label in labels[0 if aligned else 1 :] if label != IGNORED)


def _counted_in_loss(record: Record) -> Finding | None:
    """Of a cross-entropy that the recipe calls itself: it counts as many targets as there are labels."""
    off = next(((targets, labels, where) for targets, labels, where in record.counted if targets > labels), None)
    if off is None:
        return None
    what = f"The loss counts {off[0]:,} targets, and {off[1]:,} tokens of the micro-batch are supervised."
    return Finding("masks", what, "Take the labels of the micro-batch as targets, with ignore_index=-100.", off[2])


def _nothing_hidden(made: Sequence[MadeBatch], argument: str = "augment") -> Finding | None:
    seen = same = 0
    for each in made:
        labels, ids = each.tensors["labels"], each.tensors["input_ids"]
        seen += int((labels != IGNORED).sum())
        same += int(((labels == ids) & (labels != IGNORED)).sum())
    if not seen or same / seen < 0.5:
        return None
    where = " of the evaluation" if "evaluation" in argument else ""
    what = f"{same / seen:.0%} of the tokens to be found are in the input{where} as they are."
    return Finding("masks", what, f"Pass {argument}=tk.build_masks(tokenizer, config) to tk.build_dataloaders.")


def _ends_hidden(made: Sequence[MadeBatch], record: Record) -> Finding | None:
    """Of a masked language model: beginnings, separators and padding are not among the tokens to be found."""
    tokenizer = record.tokenizer
    if record.task != "masked_lm" or tokenizer is None:
        return None
    names = ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    ends = {token for name in names if (token := getattr(tokenizer, name, None)) is not None}
    hidden = sum(int(label) in ends for each in made for label in each.tensors["labels"].flatten())
    if not hidden:
        return None
    what = f"{hidden:,} of the tokens to be found are special ones ({shown_tokens(ends, tokenizer)}), of which no text is made."
    return Finding("masks", what, "Leave special tokens as they are, as tk.build_masks(tokenizer, config) does.", made[0].where)


def _labels_moved(made: Sequence[MadeBatch]) -> Finding | None:
    """Of words: the tokens that have a label are those of the data. What the labels are called is the recipe's."""
    rows = [
        (labels.tolist(), document["labels"])
        for each in made
        for (labels, document), is_in_place in zip(rows_of(each), are_in_place(each), strict=True)
        if is_in_place and "labels" in document
    ]
    off = sum([label != IGNORED for label in given] != [label != IGNORED for label in said] for given, said in rows)
    if not off:
        return None
    what = f"In {off:,} of {len(rows):,} rows other tokens have a label than in the tokenized rows."
    return Finding("masks", what, "Keep each label at its own token, as tk.collate_padded does.", made[0].where)


def _has_prompts(record: Record) -> bool:
    columns = set(record.columns)
    return bool(
        {"messages", "conversations"} & columns or {"prompt", "completion"} <= columns or {"instruction", "output"} <= columns
    )


def _wants_prompts(config: Settings) -> bool:
    settings = values_of(config)
    return settings.get("completion_only_loss") is False or settings.get("assistant_only_loss") is False


def check_spans(record: Record) -> Outcome:
    """Starts and ends of answers are those of the rows in the micro-batches, and each is learned from the logits of its own."""
    places = ("start_positions", "end_positions")
    made = [
        each for each in record.made_batches.values()
        if each.kind == "train" and all(name in each.tensors and name in each.documents[0] for name in places)
    ]  # fmt: skip
    if not made:
        return skipped("no answers in contexts")
    said = [(int(document[places[0]]), int(document[places[1]])) for each in made for document in each.documents]
    given = [pair for each in made for pair in zip(*(each.tensors[name].tolist() for name in places), strict=True)]
    learned, wanted, where = list[tuple[int, int]](), list[tuple[int, int]](), ""
    for forward in record.of_model("train"):
        each = micro_batch_of(forward, made)
        if each is not None and len(forward.span_gradients) == 2:  # of a cross-entropy only that of the target is below 0
            learned += zip(*(forward.span_gradients[name].argmin(-1).tolist() for name in ("start", "end")), strict=True)
            wanted += zip(*(each.tensors[name].tolist() for name in places), strict=True)
            where = where or forward.where
    backwards = sum(start > end for start, end in said)
    in_loss, of_learned = _exchanged(learned, wanted)
    in_place = [place for each in made for place in are_in_place(each)]
    moved = sum(pair != other for pair, other, place in zip(given, said, in_place, strict=True) if place)
    findings = [
        None if not backwards else Finding(
            "spans", f"{backwards:,} of {len(said):,} answers end before they begin.",
            "Tokenize with tk.tokenize_for_question_answering, and leave start_positions and end_positions as they are.",
        ),
        None if not moved else Finding(
            "spans", f"{moved:,} of {len(said):,} answers begin or end at another token than in the tokenized rows.",
            "Leave start_positions and end_positions as tk.collate_windows makes them: an answer's first and last token.",
            made[0].where,
        ),
        None if in_loss <= of_learned / 2 else Finding(
            "spans",
            f"The logits of the start learn the end, and those of the end the start ({in_loss:,} of {of_learned:,} answers).",
            "Compare start_logits with start_positions and end_logits with end_positions, as tk.question_answering_loss does.",
            where,
        ),
    ]  # fmt: skip
    return found(f"{len(said):,} answers, {of_learned:,} of several tokens seen in the loss", *findings)


def _exchanged(seen: Sequence[tuple[int, int]], right: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """In how many pairs the first and the second number are exchanged, and in how many they differ."""
    differ = [(one, other) for one, other in zip(seen, right, strict=True) if other[0] != other[1]]
    return sum(one == other[::-1] for one, other in differ), len(differ)


def shown_tokens(tokens: set[int], tokenizer: Any) -> str:
    """Tokens as they are written in the vocabulary."""
    return ", ".join(sorted(map(str, tokenizer.convert_ids_to_tokens(sorted(tokens)))))
