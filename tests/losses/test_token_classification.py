"""The loss of tagged words against a plain loop over the words, for every cut of the global batch."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from toolkit.data.loading.collate import IGNORED
from toolkit.losses.classification import token_classification_loss

CLASSES, WIDTH, EXAMPLES = 4, 6, 12


class Tagger(nn.Module):
    """The shape of a transformers token classifier; positions see each other, and padding counts for nothing."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(30, WIDTH, dtype=torch.float64), nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
        self.to(dtype)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        seen = self.embedding(input_ids) * attention_mask[..., None]
        return SimpleNamespace(logits=self.head((seen + seen.sum(1, keepdim=True)).tanh()))


def examples() -> list[tuple[list[int], list[int]]]:
    """Ids and labels of unequal lengths; some tokens, and all of one example, have no label."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(EXAMPLES):
        length = int(torch.randint(1, 9, (1,), generator=generator))
        ids = torch.randint(30, (length,), generator=generator).tolist()
        labels = torch.randint(CLASSES, (length,), generator=generator)
        labels[torch.rand(length, generator=generator) < (1.0 if i == 4 else 0.3)] = IGNORED
        made.append((ids, labels.tolist()))
    return made


def micro_batch(rows: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    longest = max(len(ids) for ids, _ in rows)

    def filled(values: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([row + [fill] * (longest - len(row)) for row in values])

    ids, labels = [ids for ids, _ in rows], [labels for _, labels in rows]
    return {
        "input_ids": filled(ids, 7),
        "labels": filled(labels, IGNORED),
        "attention_mask": filled([[1] * len(row) for row in ids], 0),
    }


def plain_loop(smoothing: float) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """Mean loss over all labeled tokens, one example at a time without padding, in float64; the share of right tags; gradients."""
    model, terms, right = Tagger(torch.float64), [], []
    for ids, labels in examples():
        logits = model(torch.tensor([ids]), torch.ones(1, len(ids))).logits[0]
        for scores, label in zip(logits, labels, strict=True):
            if label != IGNORED:
                logs = [score - math.log(sum(math.exp(each) for each in scores.tolist())) for score in scores]
                exact = scores - torch.logsumexp(scores, 0)
                assert [log.item() for log in logs] == pytest.approx(exact.tolist(), rel=1e-10)
                terms.append(-(1 - smoothing) * exact[label] - smoothing * exact.mean())
                right.append(int(scores.argmax()) == label)
    loss = torch.stack(terms).mean()
    loss.backward()
    return loss.detach(), sum(right) / len(right), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1, 4, 5, 12])
def test_parts_add_up_to_the_mean_over_all_labeled_tokens(size: int, dtype: torch.dtype, smoothing: float) -> None:
    """1 x 12, 3 x 4, 5 + 5 + 2 and 12 x 1, which has one micro-batch without a label. Fails when: the sum is divided by the labels of
    the micro-batch, or a label counts at the position before it."""
    wanted, right, gradients = plain_loop(smoothing)
    model, rows = Tagger(dtype), examples()
    totals = {"examples": float(EXAMPLES), "tokens": float(sum(label != IGNORED for _, labels in rows for label in labels))}
    parts = [
        token_classification_loss(model, micro_batch(rows[i : i + size]), totals, label_smoothing_factor=smoothing)
        for i in range(0, EXAMPLES, size)
    ]
    for loss, _ in parts:
        loss.backward()
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(wanted.item(), rel=tolerance)
    assert sum(metrics["accuracy"].item() for _, metrics in parts) == pytest.approx(right, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), gradients[name], rtol=tolerance, atol=tolerance)
