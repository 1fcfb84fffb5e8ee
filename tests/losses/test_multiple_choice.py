"""The loss of choices against transformers' own models one choice at a time, however the global batch is cut; exact accuracy."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score
from torch import nn

from toolkit.data.loading.collate_groups import collate_lists
from toolkit.losses.ranking import multiple_choice_loss, multiple_choice_metrics

WITH_TYPES = ("bert", "deberta-v2")
CHOICES = [4, 2, 5, 3, 4, 2, 4, 7, 3, 2, 4, 5]  # of 12 questions


def model_of(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForMultipleChoice

    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    more: dict[str, Any] = {"pad_token_id": 0, "max_position_embeddings": 64, "initializer_range": 0.5}
    if kind == "modernbert":
        more = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "initializer_range": 0.5}
    if kind in WITH_TYPES:
        more["type_vocab_size"] = 2
    return AutoModelForMultipleChoice.from_config(AutoConfig.for_model(kind, **sizes, **more)).eval()


def questions(counts: list[int], with_types: bool) -> list[dict[str, Any]]:
    numbers = np.random.default_rng(0)
    made = []
    for count in counts:
        lengths = numbers.integers(5, 30, count).tolist()
        right = int(numbers.integers(count))
        made.append({
            "input_ids": numbers.integers(5, 60, sum(lengths)).tolist(), "document_tokens": lengths,
            "labels": [float(i == right) for i in range(count)],
        })  # fmt: skip
        if with_types:
            made[-1]["token_type_ids"] = [int(i >= 4) for length in lengths for i in range(length)]
    return made


def scores_one_by_one(model: nn.Module, question: dict[str, Any]) -> torch.Tensor:
    """Each choice alone, where nothing is padded, as the model's own input of one question with one choice."""
    found, at = [], 0
    for length in question["document_tokens"]:
        names = [name for name in ("input_ids", "token_type_ids") if name in question]
        found.append(model(**{name: torch.tensor(question[name][at : at + length])[None, None] for name in names}).logits[0, 0])
        at += length
    return torch.stack(found)


def gradient(model: nn.Module, losses: list[torch.Tensor]) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    total = torch.stack(losses).sum()
    total.backward()
    return total.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", ["bert", "roberta", "deberta-v2", "modernbert"])
def test_loss_and_gradient_are_those_of_choices_one_by_one_for_every_split(kind: str) -> None:
    """Questions of 2 to 7 choices of 5 to 29 tokens, in float64 to 1e-10.

    Fails when: padding is left in the softmax, or a micro-batch is divided by its own size.
    """
    model = model_of(kind).double()
    rows = questions(CHOICES, kind in WITH_TYPES)
    wanted, wanted_grad = gradient(model, [
        nn.functional.cross_entropy(scores_one_by_one(model, row)[None], torch.tensor([row["labels"].index(1.0)])) / len(rows)
        for row in rows
    ])  # fmt: skip
    for sizes in ([12], [4, 4, 4], [1] * 12, [5, 1, 6]):
        cuts = [rows[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
        parts = [multiple_choice_loss(model, collate_lists(cut), {"examples": 12.0})[0] for cut in cuts]
        loss, grad = gradient(model, parts)
        assert loss == pytest.approx(wanted, rel=1e-10)
        assert (grad - wanted_grad).norm() / wanted_grad.norm() < 1e-10


def test_questions_with_equally_many_choices_have_the_loss_of_transformers() -> None:
    """Its own loss of a batch `[questions, choices, length]` in float32, to 1e-6. Fails when: the labels are off by one choice."""
    model = model_of("bert")
    rows = questions([4] * 6, True)
    batch = collate_lists(rows)
    names = ("input_ids", "attention_mask", "token_type_ids")
    right = torch.tensor([row["labels"].index(1.0) for row in rows])
    its = model(**{name: batch[name].view(6, 4, -1) for name in names}, labels=right).loss
    assert multiple_choice_loss(model, batch, {"examples": 6.0})[0].item() == pytest.approx(its.item(), rel=1e-6)


@pytest.mark.parametrize("number", [1, 7, 97])
def test_metrics_of_any_batch_size_are_those_of_scikit_learn_on_the_whole(number: int) -> None:
    """Fails when: `_update` gives means in place of sums."""
    model = model_of("bert")
    rows = questions([2 + i % 4 for i in range(number)], True)
    with torch.no_grad():
        scores = [scores_one_by_one(model, row) for row in rows]
        right = [row["labels"].index(1.0) for row in rows]
        accuracy = accuracy_score(right, [int(each.argmax()) for each in scores])
        losses = [nn.functional.cross_entropy(each[None], torch.tensor([label])).item() for each, label in zip(scores, right, strict=True)]
        for size in (1, 3, 8):
            batches = [multiple_choice_metrics.update(model, collate_lists(rows[at : at + size])) for at in range(0, number, size)]
            found = multiple_choice_metrics.finalize({name: sum(batch[name] for batch in batches).numpy() for name in batches[0]})
            assert found["accuracy"] == accuracy
            assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-6)


def test_a_model_that_gives_all_choices_the_same_score_is_never_right() -> None:
    """Else a constant one would be right wherever the right choice comes first. Fails when: `>` becomes `>=`."""
    model = model_of("bert")
    nn.init.zeros_(model.classifier.weight)
    rows = questions([3, 4, 2], True)
    for row in rows:
        row["labels"] = [1.0, *[0.0] * (len(row["labels"]) - 1)]
    loss, metrics = multiple_choice_loss(model, collate_lists(rows), {"examples": 3.0})
    assert metrics["accuracy"].item() == 0.0
    assert loss.item() == pytest.approx(np.mean(np.log([3, 4, 2])), rel=1e-6)
