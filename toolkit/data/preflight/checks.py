"""What no document may have, looked for in all of them at once; each refusal names the row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toolkit.config import Refusal
from toolkit.data.tokenize.documents import IGNORED, Documents


@dataclass(frozen=True)
class Rules:
    """What the checks need to know of a tokenizer."""

    vocabulary: int
    bos: int | None
    turn_ends: tuple[int, ...]  # ids that end a text or a turn


def check_tokens(documents: Documents, rules: Rules) -> None:
    """Refuse a document without tokens, with a doubled BOS, or with an id that the tokenizer doesn't have."""
    lengths, starts, values = documents.lengths, documents.bounds[:-1], documents.values
    _refuse(documents, lengths == 0, "no tokens at all. Remove the row.")
    if rules.bos is not None:
        second = np.minimum(starts + 1, len(values) - 1)
        doubled = (lengths > 1) & (values[starts] == rules.bos) & (values[second] == rules.bos)
        where = "Take it out of the text, or out of the chat template (--chat-template FILE)."
        _refuse(documents, doubled, f"begins with BOS (token {rules.bos}) twice. {where}")
    outside = (values < 0) | (values >= rules.vocabulary)
    if outside.any():
        at = int(np.argmax(outside))
        row = int(np.searchsorted(documents.bounds, at, side="right")) - 1
        raise Refusal(
            f"{documents.origins[row]}: token id {values[at]} is outside the vocabulary of {rules.vocabulary:,}. The data were "
            "tokenized with another tokenizer: name it with --tokenizer"
        )


def check_supervision(documents: Documents) -> None:
    """Refuse a document with nothing to learn."""
    nothing = "no token is supervised: there is nothing to learn from it. Remove the row, or correct its mask."
    single = "a single token: there is nothing to predict. Remove the row."
    _refuse(documents, documents.supervised() == 0, single if documents.labels is None else nothing)


def count_turn_ends(documents: Documents, rules: Rules) -> tuple[int, int]:
    """How many tokens end a text or a turn, and how many of these are supervised."""
    is_end = np.isin(documents.values, rules.turn_ends)
    supervised = is_end if documents.labels is None else is_end & (documents.labels != IGNORED)
    return int(is_end.sum()), int(supervised.sum())


def _refuse(documents: Documents, wrong: np.ndarray, what: str) -> None:
    if wrong.any():
        raise Refusal(f"{documents.origins[int(np.argmax(wrong))]}: {what}")
