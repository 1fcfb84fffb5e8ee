"""Checks of the places that targets are predicted from: each from the token before it, once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from toolkit.diagnostics.checks_of_data import IGNORED, micro_batch_of, rows_of, with_token_labels
from toolkit.diagnostics.checks_of_labels import CAUSAL, shown_tokens
from toolkit.diagnostics.findings import Finding, Outcome, found, skipped
from toolkit.diagnostics.records import Forward, MadeBatch, Record
from toolkit.models.encoder_decoder import decoder_start


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
            if not packed or number == len(made.documents) - 1:  # others may get a gradient from documents that see them
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
