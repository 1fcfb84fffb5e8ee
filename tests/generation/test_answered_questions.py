"""Questions answered from text: the best answers of all windows, and no answer among them."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from toolkit.config import DataConfig, QuestionAnsweringConfig, Refusal
from toolkit.generation.answered_questions import SampledQuestions, answer_questions, sample_answers, sample_questions
from toolkit.models.tokenizer import train_tokenizer


@dataclass(frozen=True)
class Config(DataConfig, QuestionAnsweringConfig):
    pass


CONTEXT = " ".join(f"word{i}" for i in range(60))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([CONTEXT, "Which one? alpha beta"] * 20, 400, encoder=True)


class Finder(nn.Module):
    """A start where the tokens of a word begin, an end where they end; the first token has a score of its own."""

    def __init__(self, tokenizer: Any, scores: dict[str, float], none: float) -> None:
        super().__init__()
        self.words = {tuple(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]): score for word, score in scores.items()}
        self.none, self.calls = none, 0

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **other: torch.Tensor) -> SimpleNamespace:
        self.calls += 1
        start, end = torch.full(input_ids.shape, -50.0), torch.full(input_ids.shape, -50.0)
        for row, ids in enumerate(input_ids.tolist()):
            start[row, 0] = end[row, 0] = self.none
            for word, score in self.words.items():
                for at in range(len(ids) - len(word) + 1):
                    if tuple(ids[at : at + len(word)]) == word:
                        start[row, at] = end[row, at + len(word) - 1] = score
        return SimpleNamespace(start_logits=start, end_logits=end)


def row(**changed: Any) -> dict[str, Any]:
    answers = {"text": ["word7"], "answer_start": [CONTEXT.index("word7")]}
    return {"question": "Which one?", "context": CONTEXT, "answers": answers, **changed}


def test_the_best_answers_of_all_windows_come_in_their_order(tokenizer: Any) -> None:
    """The words of three windows, with their places in the whole context and probabilities as a softmax has them.

    Fails when: only the last window is searched, or places are those within a window.
    """
    model = Finder(tokenizer, {"word7": 2.0, "word33": 3.0, "word58": 1.0}, none=-9.0)
    (found,) = answer_questions(model, tokenizer, [row()], max_length=64, doc_stride=12, n_best_size=3)
    assert model.calls > 2
    assert [(answer.text, answer.start) for answer in found] == [(word, CONTEXT.index(word)) for word in ("word33", "word7", "word58")]
    assert [answer.score for answer in found] == pytest.approx([6.0, 4.0, 2.0])
    total = sum(math.exp(score) for score in (6, 4, 2))
    assert [answer.probability for answer in found] == pytest.approx([math.exp(score) / total for score in (6, 4, 2)])


@pytest.mark.parametrize(("threshold", "wanted"), [(None, ["word33", "word7"]), (0.0, ["", "word33", "word7"]), (3.0, ["word33", "", "word7"])])
def test_no_answer_is_the_first_where_it_leads_by_more_than_the_threshold(tokenizer: Any, threshold: float | None, wanted: list[str]) -> None:
    """It scores 8, the best span 6. Fails when: the threshold is left out, or questions that have answers get none."""
    model = Finder(tokenizer, {"word7": 2.0, "word33": 3.0}, none=4.0)
    (found,) = answer_questions(
        model, tokenizer, [row()], max_length=64, doc_stride=12, n_best_size=2, null_score_diff_threshold=threshold
    )
    assert [answer.text for answer in found] == wanted


def test_a_question_without_words_is_refused(tokenizer: Any) -> None:
    """Fails when: an empty question is answered."""
    with pytest.raises(Refusal, match="question 1: question is empty"):
        answer_questions(Finder(tokenizer, {}, 0.0), tokenizer, [row(question="")])


def test_samples_hold_the_n_best_and_what_the_data_say(tokenizer: Any) -> None:
    """Evenly spread rows; no answer is possible only where a row of the split has none.

    Fails when: the same text is written for each question, or a threshold is used on data of which all questions have answers.
    """

    rows = [row(question=f"Which one? {i}") for i in range(9)]
    asked = sample_questions({"validation": rows}, 3)
    assert [each["question"] for each in asked.rows] == ["Which one? 1", "Which one? 4", "Which one? 7"]
    assert not asked.may_have_none
    assert sample_questions({"validation": [*rows, row(answers={"text": [], "answer_start": []})]}, 1).may_have_none
    model = Finder(tokenizer, {"word7": 2.0, "word33": 3.0}, none=40.0)
    samples = sample_answers(Accelerator(cpu=True), model, tokenizer, asked, Config(max_length=64, doc_stride=12))
    assert [sample["prompt"][-12:] for sample in samples] == ["Which one? 1", "Which one? 4", "Which one? 7"]
    assert {(sample["text"], sample["reference"]) for sample in samples} == {("word33", "word7")}
    assert samples[0]["n_best"][1]["text"] == "word7"
    none = sample_answers(Accelerator(cpu=True), model, tokenizer, SampledQuestions(rows[:1], True), Config(max_length=64, doc_stride=12))
    assert none[0]["text"] == ""
