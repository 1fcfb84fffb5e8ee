"""Checks of the ends of texts: whether they are written, learned, and what generation of the saved model stops at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.config import Settings
from toolkit.config.reading import values_of
from toolkit.diagnostics.checks_of_data import IGNORED, are_in_place, rows_of, with_token_labels
from toolkit.diagnostics.checks_of_labels import CAUSAL, shown_tokens
from toolkit.diagnostics.checks_of_shift import offset_of_labels
from toolkit.diagnostics.findings import Finding, Outcome, found, skipped
from toolkit.diagnostics.records import Record

_NEAR_END = 3  # tokens: a chat template may write a line break behind the end of a turn


def check_ends(record: Record, config: Settings) -> Outcome:
    """One BOS where the tokenizer writes one; an end that stops generation behind each answer, and it is learned."""
    made = [each for each in with_token_labels(record) if each.kind == "train"]
    if record.task not in CAUSAL or record.tokenizer is None or not made:
        return skipped("no texts to be continued")
    tokenizer, findings = record.tokenizer, list[Finding | None]()
    longest = values_of(config).get("max_length") or 10**9
    stops, bos = stop_tokens(record), tokenizer.bos_token_id
    documents = [document for each in made for document in each.documents]
    twice = next((d for d in documents if bos is not None and list(d["input_ids"][:2]) == [bos, bos]), None)
    if twice is not None:
        what = f"{twice.get('origin', 'A text')} begins with two beginning-of-text tokens ({tokenizer.bos_token})."
        findings.append(Finding("ends", what, "Tokenize texts of a chat template with add_special_tokens=False."))
    whole = [d for d in documents if len(d["input_ids"]) < min(longest, 256)]
    ended = [d for d in whole if stops & set(map(int, d["input_ids"][-_NEAR_END:]))]
    if record.task == "sft" and whole and len(ended) < len(whole) / 2:
        what = (
            f"{len(whole) - len(ended)} of {len(whole)} answers have no end that stops generation "
            f"({shown_tokens(stops, tokenizer)})."
        )
        change = f"Write {tokenizer.eos_token} behind each answer; tk.tokenize_for_sft does."
        findings.append(Finding("ends", what, change))
    learned, asked, offset = 0, 0, offset_of_labels(record)
    where = ""
    for each in made:
        for (labels, document), is_in_place in zip(rows_of(each), are_in_place(each), strict=True):
            ids, own = list(map(int, document["input_ids"])), document.get("labels")
            at = next((i for i in range(len(ids) - 1, max(len(ids) - 1 - _NEAR_END, 0), -1) if ids[i] in stops), None)
            if not is_in_place or at is None or (own is not None and own[at] == IGNORED):
                continue
            asked += 1
            learned += bool(labels[at - offset] != IGNORED)
        where = where or each.where
    if asked and learned < asked:
        what = f"The end of {asked - learned} of {asked} texts is not supervised: the model never learns to stop."
        change = "Leave out padding by the attention_mask, and not by the id: labels[attention_mask == 0] = -100."
        findings.append(Finding("ends", what, change, where))
    if not asked and not any(findings):
        moved = not any(any(are_in_place(each)) for each in made)
        return skipped("no tokens are where their rows have them" if moved else "no supervised end was seen")
    return found(f"{learned} of {asked} ends are learned; they are {shown_tokens(stops, tokenizer)}", *findings)


def check_stops(record: Record, directory: Path) -> Outcome:
    """The token behind the answers is one at which the saved model's generation stops."""
    path = directory / "generation_config.json"
    if record.task != "sft" or record.tokenizer is None or not path.exists():
        return skipped("no answers, or no generation_config.json was written")
    known = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    stops = {known} if isinstance(known, int) else set(known or [])
    documents = [document for each in with_token_labels(record) for document in each.documents if "labels" in document]
    learned = [[int(label) for label in document["labels"] if label != IGNORED] for document in documents]
    answers = [labels for labels in learned if labels]
    ended = sum(bool(stops & set(labels[-_NEAR_END:])) for labels in answers)
    shown = shown_tokens(stops, record.tokenizer) or "no token"
    note = f"{ended} of {len(answers)} answers end with a token at which it stops: {shown}"
    if not answers:
        return skipped("no answers were seen")
    if ended >= len(answers) / 2:
        return found(note)
    what = (
        f"Generation stops at {shown}, and {len(answers) - ended} of {len(answers)} answers end with another token: the model "
        "goes on behind its answer."
    )
    change = "Save with tk.save_model and the run's tokenizer: it writes the end of a turn there."
    return found(note, Finding("stops", what, change))


def stop_tokens(record: Record) -> set[int]:
    """Tokens at which generation stops: the tokenizer's end of text, and those of the model's generation config."""
    model: Any = record.model
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    own = own if isinstance(own, list) else [own]
    ends = {token for token in (record.tokenizer.eos_token_id, *own) if token is not None}
    names = (
        "<|im_end|>",
        "<|eot_id|>",
        "<end_of_turn>",
        "<|end|>",
        "<|return|>",
    )  # where a template ends turns by another token
    known = record.tokenizer.get_vocab()
    return ends | ({known[name] for name in names if name in known} if record.tokenizer.chat_template else set())
