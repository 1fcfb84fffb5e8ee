"""Over-long pairs: both sides are cut alike, so that they keep one prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from toolkit.data.tokenize.documents import Cut, Documents, leave_out
from toolkit.data.tokenize.preferences import PARTS


def cut_pairs(documents: Documents, max_length: int, overlong: str, bos: int | None) -> tuple[Documents, Cut]:
    """No prompt with either of its answers longer than `max_length`: by truncating, dropping or refusing.

    Truncation takes the same from both sides of a pair, so that they keep one prompt. That gives way first, from its left
    (a BOS stays), as far as the longer answer needs the room, down to half of `max_length`. Then answers longer than the
    room that is left lose their end, both at the same place. TRL 1.16 never cuts a prompt: it cuts the end of prompt and
    answer together, so that a long prompt leaves its answers a few tokens and no end, and it drops the pair when the prompt
    alone fills `max_length`. Here the answers come first, since the comparison is about them and their end is part of it.

    A pair whose answers are the same once they are cut is dropped.
    """
    is_over = documents.whole > max_length
    if not is_over.any():
        return documents, Cut()
    if overlong != "truncate":
        return leave_out(documents, max_length, overlong, "the prompt with its longer answer")
    cut, is_clipped = _truncate(documents, max_length, bos)
    is_same = np.zeros(len(cut), dtype=bool)
    is_same[is_over] = [has_one_answer(cut, row) for row in np.flatnonzero(is_over).tolist()]
    kept = cut.take(np.flatnonzero(~is_same))
    tokens = len(documents.values) - len(kept.values)
    return kept, Cut(int(is_over.sum()), tokens=tokens, identical=int(is_same.sum()), clipped=int(is_clipped.sum()))


def _truncate(documents: Documents, max_length: int, bos: int | None) -> tuple[Documents, np.ndarray]:
    """All pairs within `max_length`, and which of them lost some of their prompt."""
    whole = np.array([documents.columns[name] for name in PARTS], dtype=np.int64)  # [3, pairs]
    prompt, answer = whole[0], whole[1:].max(axis=0)
    kept_prompt = np.minimum(prompt, np.maximum(max_length - answer, max_length // 2))
    kept = np.stack([kept_prompt, *np.minimum(whole[1:], max_length - kept_prompt)])
    lengths = whole.T.ravel()  # of all parts, in the order of the tokens
    starts = np.cumsum(lengths) - lengths
    place = np.arange(len(documents.values)) - np.repeat(starts, lengths)
    first, end = np.zeros_like(kept), kept.copy()  # what is kept of a part
    first[0], end[0] = prompt - kept_prompt, prompt
    is_kept = (place >= np.repeat(first.T.ravel(), lengths)) & (place < np.repeat(end.T.ravel(), lengths))
    if bos is not None:  # it stays in the place of the first token that would
        begins = documents.bounds[:-1]
        with_bos = np.flatnonzero((first[0] > 0) & (documents.values[begins] == bos))
        is_kept[begins[with_bos] + first[0, with_bos]] = False
        is_kept[begins[with_bos]] = True
    assert documents.labels is not None
    columns = {**documents.columns, **{name: part.tolist() for name, part in zip(PARTS, kept, strict=True)}}
    bounds = np.concatenate([[0], np.cumsum(kept.sum(axis=0))])
    values, labels = documents.values[is_kept], documents.labels[is_kept]
    return replace(documents, values=values, labels=labels, bounds=bounds, columns=columns), kept_prompt < prompt


def has_one_answer(documents: Documents, row: int) -> bool:
    """Whether both answers of a pair are the same tokens: nothing in it is preferred."""
    prompt, chosen, rejected = (documents.columns[name][row] for name in PARTS)
    start = int(documents.bounds[row]) + prompt
    answers = documents.values[start : start + chosen + rejected]
    return bool(np.array_equal(answers[:chosen], answers[chosen:]))
