"""Checks of labels: which tokens are supervised, and from where they are predicted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from toolkit.config import Settings
from toolkit.config.reading import values_of
from toolkit.diagnostics.checks_of_data import HIDDEN, IGNORED, are_in_place, micro_batch_of, rows_of, with_token_labels
from toolkit.diagnostics.findings import Finding, Outcome, found, skipped
from toolkit.diagnostics.records import Forward, MadeBatch, Record
from toolkit.models.encoder_decoder import decoder_start

CAUSAL = ("sft", "lm")
_ALIGNED = (*HIDDEN, "token_classification")
_SHOWN = 100  # characters


def check_masks(record: Record, config: Settings) -> Outcome:
    """As many tokens are supervised as the data say, prompts are not, and no target is left out or added in the loss."""
    findings: list[Finding | None] = [_counted_in_loss(record)]
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


def check_shift(record: Record) -> Outcome:
    """The last target of a document is predicted from the token before it: a gradient comes from there, and none
    from its own token."""
    if record.task == "seq2seq":
        return _check_decoder_shift(record)
    if record.task not in CAUSAL:
        return skipped("no next-token labels")
    offset = offset_of_labels(record)
    own = before = seen = 0
    where = ""
    for forward, labels, norms, end in _documents_seen(record):
        targets = (labels != IGNORED).nonzero()[:, 0] + offset
        if len(targets) == 0 or not 1 <= int(targets[-1]) < end:
            continue
        last, scale = int(targets[-1]), float(norms.max()) or 1.0
        seen += 1
        own += float(norms[last]) > 1e-7 * scale
        before += float(norms[last - 1]) > 1e-7 * scale
        where = where or forward.where
    if not seen:
        return skipped("no gradient of labeled tokens was seen")
    note = f"{seen} documents"
    if own > seen / 2:
        what = f"A token is predicted from that token itself ({own} of {seen} documents): the model learns to copy."
        return found(note, Finding("shift", what, "Compare logits[:, :-1] with labels[:, 1:].", where))
    if before < seen / 2:
        what = (
            f"No gradient comes from the token before the last target ({seen - before} of {seen} documents): labels are "
            "shifted twice."
        )
        change = "Shift once: labels are aligned with input_ids, and the loss shifts them."
        place = next((each.where for each in with_token_labels(record) if each.where), where) if offset else where
        return found(note, Finding("shift", what, change, place))
    return found(note)


def offset_of_labels(record: Record) -> int:
    """1 where the labels of the micro-batches are shifted already (the label of a position is the next token), else 0."""
    aligned = shifted = 0
    for each in with_token_labels(record):
        labels, ids = each.tensors["labels"], each.tensors["input_ids"]
        aligned += int(((labels == ids) & (labels != IGNORED)).sum())
        shifted += int(((labels[:, :-1] == ids[:, 1:]) & (labels[:, :-1] != IGNORED)).sum())
    return int(shifted > aligned)


def _documents_seen(record: Record) -> Iterator[tuple[Forward, torch.Tensor, torch.Tensor, int]]:
    """Documents of training forward passes: the pass, labels and norms of the gradient of its tokens, its length."""
    labeled = with_token_labels(record)
    for forward in record.of_model("train"):
        made = micro_batch_of(forward, labeled)
        if made is None or forward.norms is None or forward.norms.shape != forward.input_ids.shape:
            continue
        start, packed = 0, forward.norms.shape[0] == 1 and len(made.documents) > 1
        for number, (labels, document) in enumerate(rows_of(made)):
            length = len(document["input_ids"])
            norms = forward.norms[0, start : start + length] if packed else forward.norms[number, :length]
            start += length
            yield forward, labels, norms, length


def _check_decoder_shift(record: Record) -> Outcome:
    made = [each for each in record.made_batches.values() if each.kind == "train" and "decoder_input_ids" in each.tensors]
    if not made:
        return skipped("no decoder's inputs were seen")
    seen = same = 0
    for each in made:
        labels, inputs = each.tensors["labels"], each.tensors["decoder_input_ids"]
        if labels.shape == inputs.shape:
            seen += int((labels != IGNORED).sum())
            same += int(((labels == inputs) & (labels != IGNORED)).sum())
    note = f"{seen:,} tokens of targets"
    if seen and same / seen > 0.9:
        what = f"The decoder is shown the tokens that it is to write ({same / seen:.0%} of them)."
        change = "Shift its inputs to the right by one, from the model's decoder_start_token_id, as tk.collate_seq2seq does."
        return found(note, Finding("shift", what, change, made[0].where))
    if (twice := _shifted_twice(record, made)) is not None:
        return found(note, twice)
    start = decoder_start(record.model) if record.model is not None else None  # None: each target has its own
    firsts = {int(first) for each in made for first in each.tensors["decoder_input_ids"][:, 0]}
    if start is not None and start not in firsts:
        began, begins = (shown_tokens(tokens, record.tokenizer) for tokens in (firsts, {start}))
        what = f"The decoder's inputs begin with {began} in training; the model begins to write behind {begins}."
        return found(note, Finding("shift", what, "Begin them with what tk.decoder_start(model) returns.", made[0].where))
    return found(note)


def _shifted_twice(record: Record, made: Sequence[MadeBatch]) -> Finding | None:
    """A target's last token is predicted at its own place: a decoder is causal, so only then a gradient comes from there."""
    seen = used = 0
    where = ""
    for forward in record.of_model("train"):
        ids, norms = forward.input_ids, forward.norms
        each = next((m for m in made if m.tensors["decoder_input_ids"].data_ptr() == ids.data_ptr()), None)
        if each is None or norms is None or norms.shape != each.tensors["labels"].shape:
            continue
        for row, labels in zip(norms, each.tensors["labels"], strict=True):
            places = (labels != IGNORED).nonzero()[:, 0]
            if len(places):
                seen, where = seen + 1, where or forward.where
                used += float(row[places[-1]]) > 1e-7 * float(row.max())
    if used >= seen / 2:
        return None
    what = f"No gradient comes from the place of the last target ({seen - used} of {seen}): labels are shifted twice."
    change = "Compare logits with labels as they are: a decoder's inputs are shifted already. tk.seq2seq_loss does."
    return Finding("shift", what, change, where)


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
