"""Whether teacher and student mean the same tokens, and how the numbers of one are those of the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from toolkit.config import Refusal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SharedVocabulary:
    """The first `size` tokens of the student are the teacher's too; `of_teacher` `[size]`: their numbers there, if others."""

    size: int
    of_teacher: torch.Tensor | None = None

    def inputs(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The same text in the teacher's numbers."""
        return input_ids if self.of_teacher is None else self.of_teacher.to(input_ids.device)[input_ids]

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The teacher's logits `[positions, its vocabulary]` of the shared tokens, in the student's order."""
        if self.of_teacher is None:
            return logits[:, : self.size]
        return logits.index_select(1, self.of_teacher.to(logits.device))


def shared_vocabulary(
    teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase, teacher_rows: int, student_rows: int, name: str
) -> SharedVocabulary:
    """What both share. Models often have more rows than tokens: those that only one of them has are cut off.

    Args:
        teacher_rows, student_rows: logits of each model.
        name: of the teacher, for the message.

    Raises:
        Refusal: a token that only one of them has, or a model with fewer rows than tokens.
    """
    theirs, ours = teacher.get_vocab(), student.get_vocab()
    if theirs.keys() != ours.keys():
        only = [_first(theirs, ours, "teacher"), _first(ours, theirs, "student")]
        raise Refusal(
            f"--teacher {name}: has another vocabulary than the student ({len(theirs):,} and {len(ours):,} tokens; "
            f"{'; '.join(filter(None, only))}), so that their distributions can't be compared. Name a teacher of the student's "
            "family, or give a student that begins from scratch the teacher's tokens: --tokenizer THE_TEACHER"
        )
    for who, vocabulary, rows in (("the teacher", theirs, teacher_rows), ("the student", ours, student_rows)):
        if vocabulary and max(vocabulary.values()) >= rows:
            raise Refusal(f"--teacher {name}: {who} has {rows:,} logits and a token with number {max(vocabulary.values())}.")
    if theirs == ours:
        return SharedVocabulary(min(teacher_rows, student_rows))
    return _in_other_order(theirs, ours, name)


def _in_other_order(theirs: dict[str, int], ours: dict[str, int], name: str) -> SharedVocabulary:
    size = len(ours)
    if sorted(ours.values()) != list(range(size)):
        token, number = next((token, number) for token, number in ours.items() if theirs[token] != number)
        raise Refusal(
            f"--teacher {name}: has the student's tokens under other numbers ({token!r} is {theirs[token]} there and {number} "
            "here), and the student's numbers have gaps, so that they can't be mapped. Name a teacher of the student's family."
        )
    of_teacher = torch.empty(size, dtype=torch.long)
    for token, number in ours.items():
        of_teacher[number] = theirs[token]
    return SharedVocabulary(size, of_teacher)


def _first(some: dict[str, int], others: dict[str, int], who: str) -> str:
    """The first tokens that only one of both has."""
    only = sorted((number, token) for token, number in some.items() if token not in others)[:3]
    return f"only the {who} has " + ", ".join(f"{token!r} ({number})" for number, token in only) if only else ""

