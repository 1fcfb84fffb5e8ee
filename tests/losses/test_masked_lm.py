"""The loss at hidden tokens against the encoders' own loss over full logits, and cut in every way."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from toolkit.data.loading.collate import collate_packed, collate_padded
from toolkit.losses import selective_head
from toolkit.losses.masked_lm import masked_lm_loss, masked_lm_metrics
from toolkit.models.attention.interface import choose_attention

VOCABULARY = 61
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64, "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {}, "ModernBert": {"global_attn_every_n_layers": 2, "local_attention": 6}, "Roberta": {},
    "Albert": {"embedding_size": 8}, "Electra": {"embedding_size": 8}, "MPNet": {},
    "DebertaV2": {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"], "legacy": True},
    "DistilBert": {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2, "dropout": 0.0, "attention_dropout": 0.0},
}  # fmt: skip
COUNTED = {"Bert", "ModernBert", "Roberta", "Albert", "Electra", "MPNet", "DebertaV2", "DistilBert"}  # head at masks only


def encoder(family: str, dtype: torch.dtype = torch.float32, packed: bool = False) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **ENCODERS[family]})
    if packed:
        config._attn_implementation = choose_attention(config, "auto", True, "cpu")
    model = getattr(transformers, f"{family}ForMaskedLM")(config)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model.to(dtype)


def documents(count: int = 12) -> list[dict[str, Any]]:
    numbers, rows = np.random.default_rng(0), []
    for i in range(count):
        ids = numbers.integers(5, VOCABULARY, 3 + (5 * i) % 11)
        labels = np.full_like(ids, -100)
        at = numbers.random(len(ids)) < 0.3
        at[0] |= i == 0
        labels[at] = ids[at]
        ids[at] = 4
        rows.append({"input_ids": ids, "labels": labels, "supervised_tokens": int(at.sum())})
    return rows


PACKED, PADDED = partial(collate_packed, aligned=True), partial(collate_padded, aligned=True)


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def own_loss(model: nn.Module, rows: list[dict[str, Any]]) -> torch.Tensor:
    """Full logits, one document at a time, and torch's cross-entropy over all hidden tokens."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        logits = model(input_ids=torch.tensor(row["input_ids"])[None]).logits[0]
        total = total + functional.cross_entropy(
            logits if logits.dtype == torch.float64 else logits.float(), torch.tensor(row["labels"]), reduction="sum", ignore_index=-100
        )
        tokens += row["supervised_tokens"]
    return total / tokens


@pytest.mark.parametrize("family", ENCODERS)
def test_loss_and_gradient_are_those_of_the_model_itself(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """On padded rows, against the `loss` that the model returns for the same labels; the head sees hidden tokens only.

    Fails when: labels are shifted by one, or a family's head is not seen to come last and gets all positions silently.
    """
    model, rows = encoder(family), documents()
    batch = PADDED(rows)
    of_model = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
    of_model.backward()
    expected = gradient(model)
    model.zero_grad()
    loss, metrics = masked_lm_loss(model, batch, {"tokens": sum(row["supervised_tokens"] for row in rows)})
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(of_model.detach()), rel=1e-5)
    assert (gradient(model) - expected).norm() / expected.norm() < 1e-5
    assert selective_head._HEAD_COMES_LAST[model] == (family in COUNTED)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    hidden = batch["labels"] != -100
    assert float(metrics["masked_accuracy"]) == pytest.approx(float((logits.argmax(-1) == batch["labels"])[hidden].float().mean()))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
@pytest.mark.parametrize("packed", [True, False])
def test_every_split_has_the_loss_and_gradient_of_a_loop_over_documents(family: str, packed: bool, dtype: Any, most: float) -> None:
    """1 x 12, 3 x 4, 5 + 5 + 2, packed and padded, against documents one by one with transformers' own attention.

    Fails when: a micro-batch divides by its own number of masks, or documents of a packed row see each other.
    """
    rows, plain = documents(), encoder(family, dtype)
    expected = own_loss(plain, rows)
    expected.backward()
    totals = {"tokens": sum(row["supervised_tokens"] for row in rows)}
    for size in (12, 4, 5):
        model = encoder(family, dtype, packed)
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, 12, size):
            loss, _ = masked_lm_loss(model, (PACKED if packed else PADDED)(rows[start : start + size]), totals)
            loss.backward()
            total += loss.detach()
        assert float(total) == pytest.approx(float(expected.detach()), rel=most)
        assert (gradient(model) - gradient(plain)).norm() / gradient(plain).norm() < most, (size, family)


def test_without_a_hidden_token_the_loss_is_a_zero_that_reaches_every_parameter() -> None:
    """Fails when: an empty micro-batch returns a constant, at which DDP would wait."""
    model, row = encoder("Bert"), documents(1)
    row[0]["labels"][:] = -100
    loss, _ = masked_lm_loss(model, PADDED(row), {"tokens": 5.0})
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(p.grad is not None for p in model.cls.parameters())


@pytest.mark.parametrize("count", [1, 7, 97])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_metrics_are_those_of_a_loop_for_any_batch_size(count: int, size: int) -> None:
    """Fails when: metrics are means of batches, or pseudo-perplexity is a mean of exponentials."""
    model, rows = encoder("Bert", torch.float64).eval(), documents(count)
    sums: dict[str, Any] = {}
    with torch.no_grad():
        for start in range(0, count, size):
            for name, value in masked_lm_metrics.update(model, PADDED(rows[start : start + size])).items():
                sums[name] = sums.get(name, 0) + value
        found = masked_lm_metrics.finalize({name: value.numpy() for name, value in sums.items()})
        nll, right, tokens = 0.0, 0, 0
        for row in rows:
            logits = model(input_ids=torch.tensor(row["input_ids"])[None]).logits[0].log_softmax(-1)
            for place, label in enumerate(row["labels"].tolist()):
                if label != -100:
                    nll, right, tokens = nll - float(logits[place, label]), right + int(logits[place].argmax() == label), tokens + 1
    assert found["loss"] == pytest.approx(nll / tokens, rel=1e-12)
    assert found["pseudo_perplexity"] == pytest.approx(np.exp(nll / tokens), rel=1e-12)
    assert found["masked_accuracy"] == right / tokens
