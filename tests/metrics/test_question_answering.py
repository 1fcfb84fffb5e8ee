"""Exact match and F1 of answers against the rules of SQuAD's scripts in plain loops, from windows as from whole contexts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from tests.metrics import squad_oracle as oracle
from toolkit.data.loading.batch import Batch
from toolkit.metrics.question_answering import best_spans, question_answering_metrics, squad_metrics
from toolkit.training.evaluation import eval_with_gather

PIECES = [
    "the",
    "a",
    "An",
    "Denver",
    "Broncos",
    "denver",
    "24–10",
    "10",
    "U.S.",
    "us",
    "it's",
    "its",
    "...",
    "theatre",
    "Ann",
    "é",
    "_a",
]


def texts(numbers: np.random.Generator, count: int, least: int = 0) -> list[str]:
    return [" ".join(numbers.choice(PIECES, numbers.integers(least, 5))) for _ in range(count)]


KNOWN = [  # prediction, answers, exact match, F1
    ("The Denver Broncos", ["Denver Broncos", "Broncos"], 1.0, 1.0),
    ("Denver", ["Denver Broncos"], 0.0, 2 / 3),
    ("Carolina", ["Denver Broncos"], 0.0, 0.0),
    ("1988-04-02", ["1988 04 02", "19880402"], 1.0, 1.0),  # a hyphen goes and leaves no space
    ("24–10", ["24-10"], 0.0, 0.0),  # a dash that is not ASCII stays
    ("an a the", ["Broncos"], 0.0, 0.0),
    ("theatre a la carte", ["the theatre la carte"], 1.0, 1.0),
    ("one two two", ["two two two one"], 0.0, 2 * 1 * 0.75 / 1.75),  # words count as often as both have them
]


@pytest.mark.parametrize(("prediction", "answers", "exact", "f1"), KNOWN)
def test_known_answers_score_as_they_must(prediction: str, answers: list[str], exact: float, f1: float) -> None:
    """Fails when: articles are not left out, or each word counts once."""
    assert squad_metrics([prediction], [answers]) == pytest.approx({"exact_match": exact, "f1": f1}, abs=1e-15)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("examples", [1, 7, 97])
def test_metrics_of_answers_are_those_of_the_scripts(examples: int, seed: int) -> None:
    """Both versions; some answers are only articles, some predictions empty, margins have ties. Equal to 14 digits.

    Fails when: 2.0 keeps gold answers that are only articles, `>` of the threshold becomes `>=`, or ties of margins change places.
    """
    numbers = np.random.default_rng(seed)
    predictions = texts(numbers, examples)
    references = [texts(numbers, numbers.integers(1, 4), least=1) for _ in range(examples)]
    assert squad_metrics(predictions, references) == pytest.approx(oracle.version_1(predictions, references), abs=1e-14)
    references = [answers if numbers.random() < 0.6 else [] for answers in references]
    references[0] = []
    margins = np.round(numbers.normal(size=examples), 1).tolist()
    found = squad_metrics(predictions, references, margins, 0.3)
    assert found == pytest.approx(oracle.version_2(predictions, references, margins, 0.3), abs=1e-14)


def test_the_best_threshold_is_found_where_the_scores_say() -> None:
    """Two answerable questions that are right, of small margins, and one without an answer, of a large one.

    Fails when: questions are given their answer from the largest margin on.
    """
    found = squad_metrics(["x", "y", "z"], [["x"], ["y"], []], [-3.0, 1.5, 4.0])
    assert (found["exact_match"], found["best_exact"], found["best_exact_thresh"]) == (pytest.approx(2 / 3), 1.0, 1.5)


WORDS = ["Super", "Bowl", "50", "was", "won", "by", "the", "Denver", "Broncos", "in", "Santa", "Clara"]


def question(number: int, numbers: np.random.Generator, answerable: bool) -> dict[str, Any]:
    """A context of words, one token each, in one to four windows that overlap, with logits drawn by window."""
    count = int(numbers.integers(3, 12))
    words = [WORDS[i] for i in numbers.integers(0, len(WORDS), count)]
    starts = np.cumsum([0, *(len(word) + 1 for word in words[:-1])])
    offsets = [
        (int(start) - (start > 0), int(start) + len(word)) for start, word in zip(starts, words, strict=True)
    ]  # space too
    asked = int(numbers.integers(1, 4))
    bounds = [(at, min(at + 5, count)) for at in range(0, max(count - 5, 0) + 3, 3)] if count > 5 else [(0, count)]
    windows = []
    for a, b in bounds:
        length = 1 + asked + 1 + b - a + 1
        start, end = numbers.normal(size=(2, length)).astype(np.float32)
        windows.append({"start": start, "end": end, "offsets": {asked + 2 + i: offsets[a + i] for i in range(b - a)}})
    return {
        "context": " ".join(words),
        "windows": windows,
        "answers": texts(numbers, 2, least=1) + words[:1] if answerable else [],
    }


class Logits(nn.Module):
    """Start and end logits looked up by the number of the window in its first token; what is padding is large and positive."""

    def __init__(self, windows: list[dict[str, Any]]) -> None:
        super().__init__()
        self.windows = windows

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        found = {}
        for name in ("start", "end"):
            found[name] = torch.full(input_ids.shape, 1e4)
            for row, number in enumerate(input_ids[:, 0].tolist()):
                logits = torch.from_numpy(self.windows[number][name])
                found[name][row, : len(logits)] = logits
        return SimpleNamespace(start_logits=found["start"], end_logits=found["end"])


def batches(windows: list[dict[str, Any]], numbers_in_question: list[int], size: int) -> list[Batch]:
    """Micro-batches in an order of their own, as `collate_windows` makes them."""
    order = sorted(range(len(windows)), key=lambda i: (i * 37) % 101)
    made = []
    for piece in (order[i : i + size] for i in range(0, len(order), size)):
        longest = max(len(windows[i]["start"]) for i in piece)
        batch = {name: torch.full((len(piece), longest), -1) for name in ("char_starts", "char_ends")}
        batch |= {name: torch.zeros(len(piece), longest, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
        for row, i in enumerate(piece):
            batch["input_ids"][row, 0] = i
            batch["attention_mask"][row, : len(windows[i]["start"])] = 1
            for token, (start, end) in windows[i]["offsets"].items():
                batch["char_starts"][row, token], batch["char_ends"][row, token] = start, end
        batch |= {name: torch.ones(len(piece), dtype=torch.int64) for name in ("start_positions", "end_positions")}
        batch["window"] = torch.tensor([numbers_in_question[i] for i in piece])
        made.append(Batch([batch], {}, [True], indices=[piece]))
    return made


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("examples", [1, 7, 97])
@pytest.mark.parametrize("version", [1, 2])
def test_windows_of_any_batch_size_give_the_metrics_of_whole_contexts(version: int, examples: int, size: int) -> None:
    """Every span of every window tried in a loop, and the scripts' rules: equal to 14 digits; the loss to 1e-6.

    Fails when: padding is not masked, windows are joined by their best one alone, the question's tokens may answer, a span may be one
    token too long, or no answer scores as in its best window.
    """
    numbers = np.random.default_rng(examples)
    questions = [question(i, numbers, version == 1 or i % 3 > 0) for i in range(examples)]
    windows = [window for each in questions for window in each["windows"]]
    places = [number for each in questions for number in range(len(each["windows"]))]
    references = [(each["context"], each["answers"]) for each in questions]
    metrics = question_answering_metrics(references, n_best_size=4, max_answer_length=3, null_score_diff_threshold=0.2)
    found = eval_with_gather(Accelerator(cpu=True), Logits(windows), batches(windows, places, size), metrics, prefix="")
    predicted = [oracle.predict(each["context"], each["windows"], 3) for each in questions]
    said, margins, answers = (
        [p for p, _ in predicted],
        [float(m) for _, m in predicted],
        [each["answers"] for each in questions],
    )
    wanted = oracle.version_1(said, answers) if version == 1 else oracle.version_2(said, answers, margins, 0.2)
    losses = []
    for window in windows:
        both = [torch.from_numpy(window[name]).double().log_softmax(0)[1] for name in ("start", "end")]
        losses.append(-float(both[0] + both[1]) / 2)
    assert found.pop("loss") == pytest.approx(np.mean(losses), rel=1e-6)
    assert found == pytest.approx(wanted, abs=1e-6)  # a threshold is a difference of float32 sums
    exact = {name for name in wanted if not name.endswith("_thresh")}
    assert {name: found[name] for name in exact} == pytest.approx({name: wanted[name] for name in exact}, abs=1e-14)


def test_a_row_has_the_same_width_however_few_spans_there_are() -> None:
    """A context of two tokens has three spans; the row has twenty places, more than there are pairs of all four tokens.

    Fails when: rows are as wide as there are spans, which ranks can't gather.
    """
    chars = {"char_starts": torch.tensor([[-1, 0, 4, -1]]), "char_ends": torch.tensor([[-1, 3, 7, -1]])}
    logits = torch.tensor([[9.0, 1.0, 2.0, 9.0]])
    rows = best_spans(logits, logits * 2, chars, 20, 30)
    assert rows["starts"].tolist() == [[4, 0, 0, *[-1] * 17]]
    assert rows["ends"].tolist() == [[7, 7, 3, *[-1] * 17]]
    assert rows["scores"].tolist() == [[6.0, 5.0, 3.0, *[-torch.inf] * 17]]
    assert rows["no_answer"].tolist() == [27.0]
