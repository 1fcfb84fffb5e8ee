"""Distillation of a classifier against a plain loop over examples, each alone and without padding, in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from toolkit.data.loading.collate import collate_padded
from toolkit.distillation.classifier_teacher import ask_classifier
from toolkit.distillation.vocabulary import SharedVocabulary
from toolkit.losses.classification import classification_task
from toolkit.losses.matching import classifier_distillation_loss, pair_layers
from toolkit.models.added_heads import add_projections

CLASSES, VOCABULARY, TEMPERATURE, SHARE, WEIGHT = 3, 29, 1.7, 0.3, 0.4


def bert(width: int, layers: int, outputs: int, seed: int) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=2 * width,
        max_position_embeddings=16, num_labels=outputs, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="eager", initializer_range=0.3,
    )  # fmt: skip
    return BertForSequenceClassification(config).double()


def documents(problem_type: str) -> list[dict[str, Any]]:
    numbers = torch.Generator().manual_seed(3)
    labels: dict[str, Any] = {
        "single_label": lambda i: i % CLASSES, "multi_label": lambda i: [i % 2, i % 3 == 0, 1], "regression": lambda i: i / 4,
    }  # fmt: skip
    lengths = [5, 2, 9, 3, 3, 7, 1]
    return [
        {"input_ids": torch.randint(1, VOCABULARY, (length,), generator=numbers).tolist(), "labels": labels[problem_type](i)}
        for i, length in enumerate(lengths)
    ]


def reference(
    student: nn.Module, projections: dict[int, torch.Tensor], teacher: nn.Module, problem_type: str, pairs: list[tuple[int, int]]
) -> torch.Tensor:  # fmt: skip
    """Example by example, as the module's docstring says it; the student is a plain model, its layers are projected here."""
    losses = []
    for document in documents(problem_type):
        ids, labels = torch.tensor([document["input_ids"]]), torch.tensor(document["labels"])
        own, its = (model(input_ids=ids, output_hidden_states=True, output_attentions=True) for model in (student, teacher))
        a, b = own.logits[0], its.logits[0].detach()
        if problem_type == "single_label":
            p, q = (b / TEMPERATURE).softmax(-1), (a / TEMPERATURE).softmax(-1)
            apart, of_data = TEMPERATURE**2 * sum(p * (p / q).log()), -a.softmax(-1)[labels].log()
        elif problem_type == "multi_label":
            p, q = (b / TEMPERATURE).sigmoid(), (a / TEMPERATURE).sigmoid()
            kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
            apart = TEMPERATURE**2 * kl.mean()
            of_data = -(labels * a.sigmoid().log() + (1 - labels.double()) * (1 - a.sigmoid()).log()).mean()
        else:
            apart, of_data = (a - b).square().mean(), (a[0] - labels) ** 2
        loss = (1 - SHARE) * apart + SHARE * of_data
        for m, g in pairs:
            loss = loss + WEIGHT * nn.functional.mse_loss(own.hidden_states[m] @ projections[m].T, its.hidden_states[g].detach())
            if m:
                p, q = its.attentions[g - 1][0].detach(), own.attentions[m - 1][0]
                loss = loss + WEIGHT * (p * (p / q).log()).sum(-1).mean()
        losses.append(loss)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize(("problem_type", "how"), [("single_label", "uniform"), ("multi_label", "last"), ("regression", "uniform")])
def test_loss_and_gradient_are_the_formula_for_every_split(problem_type: str, how: str, size: int) -> None:
    """Fails when: padding counts in a mean, T^2 is left out, a sum is divided by what is in the micro-batch, or what is projected
    has no gradient for the student's own layers.
    """
    outputs = 1 if problem_type == "regression" else CLASSES
    pairs = pair_layers(how, 2, 4)
    plain, student = bert(8, 2, outputs, seed=1), bert(8, 2, outputs, seed=1)
    add_projections(student, {own for own, _ in pairs}, 12, seed=5)
    projections = {own: student.teacher_projections[str(own)].weight.detach().clone().requires_grad_() for own, _ in pairs}
    teacher = bert(12, 4, outputs, seed=2).eval()
    expected = reference(plain, projections, teacher, problem_type, pairs)
    expected.backward()
    ask = ask_classifier(teacher, SharedVocabulary(VOCABULARY), None, {"output_hidden_states": True, "output_attentions": True})
    rows, found = documents(problem_type), 0.0
    data_loss, _ = classification_task(problem_type, outputs)
    for start in range(0, len(rows), size):
        loss, metrics = classifier_distillation_loss(
            student, collate_padded(rows[start : start + size]), {"examples": float(len(rows))}, teacher=ask, data_loss=data_loss,
            problem_type=problem_type, temperature=TEMPERATURE, cross_entropy_share=SHARE, pairs=pairs, match_weight=WEIGHT,
            match_attention=True,
        )  # fmt: skip
        assert {"divergence", "hidden_mse", "attention_kl"} <= metrics.keys()
        loss.backward()
        found += loss.item()
    assert found == pytest.approx(expected.item(), rel=1e-10)
    wanted = {name: each.grad for name, each in plain.named_parameters()}
    wanted |= {f"teacher_projections.{own}.weight": each.grad for own, each in projections.items()}
    assert wanted.keys() == {name for name, _ in student.named_parameters()}
    for name, own in student.named_parameters():
        torch.testing.assert_close(own.grad, wanted[name], rtol=1e-9, atol=1e-12, msg=name)


def test_a_teacher_in_half_precision_returns_float32() -> None:
    """Close to its own float32, and not the same. Fails when: a softmax is taken of half precision, or there is no autocast."""
    teacher = bert(12, 2, CLASSES, seed=2).float().eval()
    batch = collate_padded([{"input_ids": [1, 2, 3], "labels": 0}, {"input_ids": [3], "labels": 1}])
    wanted = {"output_hidden_states": True}
    full, half = (ask_classifier(teacher, SharedVocabulary(VOCABULARY), None, wanted, kind)(batch) for kind in (None, torch.bfloat16))
    assert {each.dtype for each in (half.logits, *half.hidden_states)} == {torch.float32}
    torch.testing.assert_close(half.logits, full.logits, rtol=5e-2, atol=5e-2)
    assert not torch.equal(half.logits, full.logits)


def test_layers_are_paired_as_in_the_papers() -> None:
    """Fails when: uniform rounds up, or last leaves out the highest layer."""
    assert pair_layers("uniform", 4, 12) == [(0, 0), (1, 3), (2, 6), (3, 9), (4, 12)]
    assert pair_layers("uniform", 2, 3) == [(0, 0), (1, 1), (2, 3)]
    assert pair_layers("last", 2, 6) == [(1, 5), (2, 6)]
    assert pair_layers("none", 2, 6) == []


def test_without_pairs_neither_model_is_asked_for_its_layers() -> None:
    """Fails when: output_hidden_states is always asked for."""
    seen: list[set[str]] = []

    def model(**given: Any) -> Any:
        seen.append(set(given))
        return SimpleNamespace(logits=torch.zeros(2, CLASSES))

    batch = collate_padded([{"input_ids": [1, 2], "labels": 0}, {"input_ids": [3], "labels": 1}])
    ask = ask_classifier(model, SharedVocabulary(VOCABULARY), torch.tensor([1, 0, 2]), {"output_hidden_states": False})  # type: ignore[arg-type]
    data_loss, _ = classification_task("single_label", CLASSES)
    classifier_distillation_loss(model, batch, {"examples": 2.0}, teacher=ask, data_loss=data_loss)  # type: ignore[arg-type]
    assert seen == [{"input_ids", "attention_mask"}] * 2
