"""The bound of masked diffusion against its formula over full logits, cut in every way, and its value on held-out rows."""

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from toolkit.data.loading.collate import collate_packed, collate_padded
from toolkit.data.loading.noise import hide_tokens
from toolkit.data.loading.order import generator_of
from toolkit.losses.diffusion import diffusion_loss, diffusion_metrics
from toolkit.models.attention.interface import choose_attention
from toolkit.models.attention.packable import make_bidirectional

VOCABULARY, MASK = 61, 60
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
PACKED, PADDED = partial(collate_packed, aligned=True), partial(collate_padded, aligned=True)


def model_of(family: str, dtype: torch.dtype = torch.float32, packed: bool = False) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE, **({"is_causal": False} if family == "Llama" else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}))
    if packed:
        config._attn_implementation = choose_attention(config, "auto", True, "cpu")
    model = getattr(transformers, f"{family}For{'CausalLM' if family == 'Llama' else 'MaskedLM'}")(config)
    if family == "Llama":
        make_bidirectional(model)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model.to(dtype)


def documents(count: int = 12, shift: bool = False, progress: float = 1.0, annealing: float = 0.0) -> list[dict[str, Any]]:
    rows = []
    for i in range(count):
        numbers = generator_of(0, i)
        document = {"input_ids": numbers.integers(5, MASK, 3 + (5 * i) % 11)}
        if i % 2:
            document["labels"] = np.where(np.arange(len(document["input_ids"])) < 2, -100, document["input_ids"])
        rows.append(hide_tokens(document, numbers, progress, mask_token_id=MASK, shift_logits=shift, annealing=annealing))
    return rows


def by_formula(model: Any, rows: list[dict[str, Any]]) -> torch.Tensor:
    """Full logits, one document at a time."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        logits = model(input_ids=torch.tensor(row["input_ids"])[None]).logits[0]
        places = np.flatnonzero(row["labels"] != -100)
        for place, weight in zip(places, row["token_weights"], strict=True):
            total = total - float(weight) * logits[place].log_softmax(-1)[row["labels"][place]]
        tokens += row["supervised_tokens"]
    return total / tokens


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize(("family", "shift"), [("Llama", False), ("Llama", True), ("Bert", False)])
@pytest.mark.parametrize("packed", [True, False])
def test_every_split_has_the_loss_and_gradient_of_the_formula(family: str, shift: bool, packed: bool, dtype: Any, most: float) -> None:
    """1 x 12, 3 x 4, 5 + 5 + 2. Fails when: a micro-batch divides by its own tokens, the weights are left out or are of another
    order than the positions, or a document of a packed row sees its neighbors.
    """
    rows, plain = documents(shift=shift), model_of(family, dtype)
    expected = by_formula(plain, rows)
    expected.backward()
    totals = {"tokens": sum(row["supervised_tokens"] for row in rows)}
    for size in (12, 4, 5):
        model, total = model_of(family, dtype, packed), 0.0
        for start in range(0, 12, size):
            loss, _ = diffusion_loss(model, (PACKED if packed else PADDED)(rows[start : start + size]), totals)
            loss.backward()
            total += float(loss.detach())
        assert total == pytest.approx(float(expected.detach()), rel=most)
        assert (gradient(model) - gradient(plain)).norm() / gradient(plain).norm() < most, size


@pytest.mark.parametrize("packed", [True, False])
def test_while_attention_is_annealed_a_token_sees_its_share_of_what_follows(packed: bool) -> None:
    """None of it: the logits of the causal model. All: those of both sides. Between: the same packed, padded and alone.

    Fails when: the mask of a document depends on its place in the row, or documents see each other through it.
    """
    model = model_of("Llama", torch.float64, packed)
    collate = PACKED if packed else PADDED

    def loss_of(rows: list[dict[str, Any]]) -> float:
        return float(diffusion_loss(model, collate(rows), {"tokens": 1.0})[0])

    causal = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).double()
    causal.load_state_dict(model.state_dict())
    begin = documents(progress=0.0, annealing=0.5)
    tokens = sum(row["supervised_tokens"] for row in begin)
    assert loss_of(begin) == pytest.approx(tokens * float(by_formula(causal, begin)), rel=1e-10)
    end = documents(progress=0.5, annealing=0.5)
    assert loss_of(end) == pytest.approx(tokens * float(by_formula(model, end)), rel=1e-10)
    halfway = documents(progress=0.25, annealing=0.5)
    together, alone = loss_of(halfway), sum(loss_of([row]) for row in halfway)
    assert together == pytest.approx(alone, rel=1e-10)
    assert min(abs(together - loss_of(begin)), abs(together - loss_of(end))) > 1e-3


def test_without_a_hidden_token_the_loss_is_a_zero_that_reaches_every_parameter() -> None:
    """Fails when: an empty micro-batch returns a constant, at which DDP would wait."""
    model = model_of("Llama")
    row = hide_tokens({"input_ids": np.arange(3), "labels": np.full(3, -100)}, generator_of(0), 0.0, mask_token_id=MASK)
    loss, _ = diffusion_loss(model, PADDED([row]), {"tokens": 5.0})
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("packed", [True, False])
def test_metrics_and_their_error_are_those_of_a_loop_for_any_batch_size(packed: bool) -> None:
    """The error against numpy's over documents. Fails when: it is that of tokens, or of batches."""
    model, rows = model_of("Llama", torch.float64, packed).eval(), documents(37)
    for size in (1, 5, 37):
        sums: dict[str, Any] = {}
        with torch.no_grad():
            for start in range(0, len(rows), size):
                for name, value in diffusion_metrics.update(model, (PACKED if packed else PADDED)(rows[start : start + size])).items():
                    sums[name] = sums.get(name, 0) + value
            found = diffusion_metrics.finalize({name: value.numpy() for name, value in sums.items()})
            nll = np.array([float(by_formula(model, [row])) * row["supervised_tokens"] for row in rows])
        tokens = np.array([row["supervised_tokens"] for row in rows])
        loss = nll.sum() / tokens.sum()
        assert found["loss"] == pytest.approx(loss, rel=1e-6)  # the weights are float32
        assert found["loss_stderr"] == pytest.approx(np.sqrt(len(rows)) * np.std(nll - loss * tokens, ddof=1) / tokens.sum(), rel=1e-5)
        assert found["perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)


def test_the_mean_over_draws_is_the_bound_over_all_subsets() -> None:
    """Of one document of four tokens, by a real model. Fails when: the weights of the bound and of the draws differ."""
    model, ids = model_of("Llama", torch.float64), np.array([7, 8, 9, 10])
    exact = 0.0
    with torch.no_grad():
        for count in range(1, 5):
            subsets = list(itertools.combinations(range(4), count))
            for hidden in subsets:
                noised = torch.tensor([MASK if i in hidden else int(ids[i]) for i in range(4)])
                logps = model(input_ids=noised[None]).logits[0].log_softmax(-1)
                exact -= sum(float(logps[i, ids[i]]) for i in hidden) / count / len(subsets)
        rows = [hide_tokens({"input_ids": ids}, generator_of(1, i), 0.0, mask_token_id=MASK) for i in range(4000)]
        drawn = [float(diffusion_loss(model, PADDED(rows[i : i + 500]), {"tokens": 500.0})[0]) for i in range(0, 4000, 500)]
    assert np.mean(drawn) == pytest.approx(exact, abs=4 * float(np.std(drawn)) / len(drawn) ** 0.5 + 1e-9)
    assert np.std(drawn) < 0.05 * exact
