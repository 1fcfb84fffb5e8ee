"""Metrics of generated texts against the libraries' own functions on all texts at once."""

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from rouge_score import rouge_scorer
from sacrebleu import corpus_bleu, corpus_chrf

from toolkit.config import Refusal
from toolkit.data.loading.batch import Batch
from toolkit.metrics import text as text_file
from toolkit.metrics.text import choose_text_metrics, compare_texts, generated_text_metrics, usual_text_metrics
from toolkit.training.evaluation import eval_with_gather

WORDS = ["the", "a", "cat", "cats", "sat", "on", "mat,", "under.", "Big", "running", "dogs", "ran!", "3", "naïve", "größe"]


def texts(examples: int, seed: int) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, draw.integers(1, 12))) for _ in range(examples)]


def by_the_libraries(said: list[str], wanted: list[str]) -> dict[str, float]:
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
    scores = [scorer.score(target=b, prediction=a) for a, b in zip(said, wanted, strict=True)]
    return {
        "bleu": corpus_bleu(said, [wanted]).score,
        "chrf": corpus_chrf(said, [wanted]).score,
        **{name: float(np.mean([score[name].fmeasure for score in scores])) for name in scores[0]},
        "exact_match": float(np.mean([a == b for a, b in zip(said, wanted, strict=True)])),
    }


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("examples", [1, 7, 97])
def test_metrics_of_texts_are_those_of_sacrebleu_and_rouge_score(examples: int, batch_size: int) -> None:
    """The rows come in the order of their lengths, as an evaluation reads them, and every third text is right.

    Fails when: rows are compared in the order in which they came; predictions and references change places; the words of ROUGE
    are not stemmed.
    """
    wanted = texts(examples, 1)
    said = [
        reference if i % 3 == 0 else other for i, (reference, other) in enumerate(zip(wanted, texts(examples, 2), strict=True))
    ]
    width = max(len(text.encode()) for text in said) + 2

    def generate(model: torch.nn.Module, micro_batch: dict[str, Any]) -> torch.Tensor:
        rows = [list(said[i].encode()) for i in micro_batch["example"]]
        longest = max(map(len, rows))
        return torch.tensor([row + [0] * (longest - len(row)) for row in rows])

    def decode(ids: np.ndarray) -> list[str]:
        return [bytes(row[row != 0].tolist()).decode() for row in ids]

    order = sorted(range(examples), key=lambda i: len(said[i]))
    pieces = [order[start : start + batch_size] for start in range(0, examples, batch_size)]
    loader = [Batch([{"example": piece}], {}, [True], indices=[piece]) for piece in pieces]
    metrics = generated_text_metrics(generate, decode, wanted, choose_text_metrics([]), width=width, pad_token_id=0)
    found = eval_with_gather(Accelerator(cpu=True), torch.nn.Identity(), loader, metrics)
    expected = by_the_libraries(said, wanted)
    assert found.keys() == {f"eval_{name}" for name in expected}
    assert {name: round(found[f"eval_{name}"], 10) for name in expected} == {
        name: round(expected[name], 10) for name in expected
    }


def test_a_function_of_the_users_sees_texts_without_the_white_space_around_them() -> None:
    """Fails when: texts are compared as they were decoded; a function gets references in the place of predictions; a name alone is
    taken apart."""
    seen: list[Any] = []

    def longer(predictions: list[str], references: list[str]) -> dict[str, float]:
        seen.append((predictions, references))
        return {"longer": float(np.mean([len(a) > len(b) for a, b in zip(predictions, references, strict=True)]))}

    values = compare_texts(choose_text_metrics("exact_match") | choose_text_metrics([longer]), [" a b", "cc"], ["a b\n", "c"])
    assert values == {"exact_match": 0.5, "longer": 0.5}
    assert seen == [(["a b", "cc"], ["a b", "c"])]


def test_rouge_of_texts_without_latin_letters_is_not_a_number() -> None:
    """Fails when: the means are returned as they are, all 0, though every text is right."""
    values = compare_texts(choose_text_metrics(["rouge", "chrf"]), ["猫はマット"], ["猫はマット"])
    assert np.isnan([values["rouge1"], values["rougeLsum"]]).all()
    assert round(values["chrf"], 6) == 100


def test_a_metric_without_its_library_is_refused_by_name_and_left_out_of_the_usual_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails when: the library is not looked for before training."""
    found = importlib.util.find_spec
    monkeypatch.setattr(text_file.importlib.util, "find_spec", lambda name: None if name == "sacrebleu" else found(name))
    assert usual_text_metrics() == (["rouge", "exact_match"], ["bleu", "chrf"])
    assert choose_text_metrics([]).keys() == {"rouge", "exact_match"}
    with pytest.raises(Refusal, match="pip install sacrebleu"):
        choose_text_metrics(["rouge", "bleu"])
    with pytest.raises(Refusal, match="Type --metrics rouge"):
        choose_text_metrics(["rougeL"])
