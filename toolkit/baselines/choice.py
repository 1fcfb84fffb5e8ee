"""What a model that chooses must beat: chance, the longest choice, and the words that a choice shares with its question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from toolkit.baselines.bm25 import COUNTED_LISTS, bm25, parts_of_words, plain_words
from toolkit.data.tokenize.multiple_choice import Question, read_questions

if TYPE_CHECKING:
    from datasets import Dataset


def choice_baselines(raw: Mapping[str, Dataset]) -> dict[str, float]:
    """Accuracy on the validation questions of choosing without a model.

    The longest choice is that with the most characters. BM25 scores a choice as a query for its question; how rare a word is,
    is counted in the questions of the first 20,000 training rows. Of n choices that are equally good each is right with 1 / n.
    Nothing without a validation split, and for a stream.
    """
    if not all(hasattr(raw.get(name), "__len__") for name in ("train", "validation")):
        return {}
    held_out = list(read_questions(raw["validation"], "validation"))
    counted = list(dict.fromkeys(each.asked for each in islice(read_questions(raw["train"], "train"), COUNTED_LISTS)))
    found = {
        "chance": _accuracy(held_out, lambda question, choice: 0.0),
        "longest choice": _accuracy(held_out, lambda question, choice: len(choice)),
    }
    for name, words in (("BM25 on words", plain_words), ("BM25 on parts of words", parts_of_words)):
        score = bm25(counted, words)
        found[name] = _accuracy(held_out, lambda question, choice, score=score: score(choice, question))  # type: ignore[misc]
    return found


def _accuracy(questions: Sequence[Question], score: Callable[[str, str], float]) -> float:
    """Mean over questions of 1 / (choices with the highest score) where the right one is among these, else 0."""
    total = 0.0
    for asked, choices, right in questions:
        scores = [score(asked, choice) for choice in choices]
        total += (scores[right] == max(scores)) / scores.count(max(scores))
    return total / len(questions)
