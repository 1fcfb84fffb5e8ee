"""The gradient of losses over answers, by finite differences, where the head is computed again in backward and draws dropout."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

import toolkit as tk
from toolkit.data.loading.collate_pairs import collate_answers, collate_pairs
from toolkit.data.loading.order import seed_micro_batch
from toolkit.losses.answer_logps import answer_logps, pair_logps
from toolkit.losses.chunked import rows_in_a_chunk
from toolkit.losses.pair_losses import PairLogps
from toolkit.losses.preference import needs_reference, preference_loss
from toolkit.losses.unpaired import unpaired_loss
from toolkit.models.attention.interface import DOCUMENTS, register_attention
from toolkit.models.layers import checkpoint_layers, compile_layers

VOCABULARY = 4096
BACKEND = "aot_eager"
ANSWER = 300  # tokens: the eight answers of four pairs are three of the chunks that are shipped, the last one short


def model_of(dropout: float, **changes: Any) -> Any:
    """A small GPT-2 in float64, whose layers drop, with an adapter on its head and on a layer, both of which drop too."""
    register_attention()
    body = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 1024, "initializer_range": 0.5}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = transformers.GPT2Config(**{**body, **drops, "pad_token_id": 0, "tie_word_embeddings": False, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=DOCUMENTS)
        adapter = LoraConfig(r=2, lora_alpha=4, lora_dropout=dropout, target_modules=["lm_head", "attn.c_proj"], init_lora_weights=False)
        return get_peft_model(model, adapter).double().train()


def pairs() -> dict[str, Any]:
    numbers = np.random.default_rng(0)
    lengths = [(5, ANSWER, ANSWER - 7), (1, ANSWER - 90, ANSWER), (9, ANSWER, 1 + ANSWER), (3, ANSWER, ANSWER)]
    return collate_pairs([
        {"input_ids": numbers.integers(3, VOCABULARY, p + c + r), "prompt_tokens": p, "chosen_tokens": c, "rejected_tokens": r, "pair": i}
        for i, (p, c, r) in enumerate(lengths)
    ], layout="shared")  # fmt: skip


def answers() -> dict[str, Any]:
    numbers = np.random.default_rng(1)
    return collate_answers([
        {"input_ids": numbers.integers(3, VOCABULARY, 4 + tokens), "prompt_tokens": 4, "completion_tokens": tokens,
         "desirable": i % 3 != 1, "answer": i}
        for i, tokens in enumerate([ANSWER, ANSWER - 9, ANSWER, 2 * ANSWER, 7])
    ], layout="packed")  # fmt: skip


def pair_loss(loss_type: str) -> Any:
    batch = pairs()
    totals = {"pairs": 4.0, "chosen_tokens": 1200.0}

    def loss(model: Any) -> torch.Tensor:
        policy = pair_logps(model, batch)
        steady = PairLogps(policy.chosen.detach() * 0 - 2500.0, policy.rejected.detach() * 0 - 2500.0, *policy[2:])
        return preference_loss(policy, steady if needs_reference([loss_type]) else None, totals, loss_type=[loss_type], beta=0.002)[0]

    return loss


def answer_loss(loss_type: str) -> Any:
    batch = answers()
    totals = {"examples": 5.0, "desirable": 3.0, "undesirable": 2.0}

    def loss(model: Any) -> torch.Tensor:
        policy = answer_logps(model, batch)
        return unpaired_loss(policy, torch.full_like(policy, -2500.0), batch["desirable"], 3.0, totals, loss_type=loss_type, beta=0.002)[0]

    return loss


def token_loss(z_loss: float) -> Any:
    batch = pairs()
    positions = batch["answer_positions"]
    row = {name: batch[name] for name in ("input_ids", "position_ids")}
    labels = torch.full_like(batch["input_ids"], -100)
    labels.view(-1)[positions[positions + 1 < labels.numel()] + 1] = 5
    bounds = torch.tensor([0, labels.numel()], dtype=torch.int32)
    row |= {"labels": labels, "supervised_positions": (labels.flatten()[1:] != -100).nonzero().flatten()}
    row |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": labels.numel(), "max_length_k": labels.numel()}
    row["position_ids"] = torch.arange(labels.numel())[None] % 1024
    return lambda model: tk.causal_lm_loss(model, row, {"tokens": 1200.0}, z_loss=z_loss)[0]


LOSSES = {
    **{name: partial(pair_loss, name) for name in ("sigmoid", "ipo", "apo_zero", "simpo", "cpo", "orpo", "sft")},
    **{name: partial(answer_loss, name) for name in ("kto", "apo_zero_unpaired")},
    "causal_lm": partial(token_loss, 0.0), "causal_lm with z": partial(token_loss, 1e-3),
}  # fmt: skip


def value(model: Any, loss: Any) -> torch.Tensor:
    seed_micro_batch(3)
    return loss(model)


def slopes(model: Any, loss: Any, step: float = 1e-6) -> tuple[float, float]:
    """Along the gradient of all trained parameters: autograd's slope, and that of two values with the same random numbers."""
    model.zero_grad()
    value(model, loss).backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [parameter.grad.clone() for parameter in trained]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            torch._foreach_add_(trained, gradients, alpha=sign * step / float(norm))
            ends.append(float(value(model, loss)))
            torch._foreach_sub_(trained, gradients, alpha=sign * step / float(norm))
    return float(norm), (ends[0] - ends[1]) / (2 * step)


# Losses of pairs differ in what they do with the same values, and so do those of answers, and of tokens.
FAST = ("sigmoid", "orpo", "kto", "causal_lm")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in LOSSES])
def test_a_head_that_drops_has_the_gradient_of_the_values_it_gave(name: str) -> None:
    """Chunks of the shipped size. Fails when: backward computes the head with other random numbers than forward did."""
    assert rows_in_a_chunk(VOCABULARY, torch.device("cpu")) < 4 * ANSWER
    by_autograd, by_difference = slopes(model_of(dropout=0.5), LOSSES[name]())
    assert by_autograd == pytest.approx(by_difference, rel=1e-6)


def test_backward_leaves_the_generators_as_forward_did() -> None:
    """A recipe may draw between two micro-batches. Fails when: backward draws from the generators it found."""
    loss = value(model_of(dropout=0.5), pair_loss("sigmoid"))
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("way", "name"), [
    ("recomputed", "sigmoid"), ("recomputed", "causal_lm"), pytest.param("compiled", "sigmoid", marks=pytest.mark.slow),
    pytest.param("compiled and recomputed", "causal_lm", marks=pytest.mark.slow),
])
def test_layers_that_are_computed_again_or_compiled_draw_the_same_numbers(way: str, name: str) -> None:
    """Dropout of embeddings, attention, residuals and adapters, in the layers and in the head. Captured and differentiated by
    torch.compile, run without inductor, whose C++ would take a minute.

    Fails when: recomputation doesn't keep the random state (`preserve_rng_state=False`).
    """
    torch.compiler.reset()
    model = model_of(dropout=0.5, n_layer=2)
    if way == "recomputed":
        checkpoint_layers(model.get_base_model())
    else:
        compile_layers(model.get_base_model(), recomputed="recomputed" in way, backend=BACKEND)
    by_autograd, by_difference = slopes(model, LOSSES[name]())
    assert by_autograd == pytest.approx(by_difference, rel=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_that_are_computed_again_draw_the_same_numbers_on_an_apple_gpu(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose generator torch doesn't keep. Here it is one of the CPU's, from which the dropout of residuals draws.

    Fails when: `_recomputation` leaves out the context.
    """
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", generator.get_state)
    monkeypatch.setattr(torch.mps, "set_rng_state", generator.set_state)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    def drops(hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (torch.rand(hidden.shape, generator=generator) < 0.5)

    def seeded(model: Any) -> torch.Tensor:
        generator.manual_seed(7)
        return causal_lm(model)

    causal_lm, model = token_loss(0.0), model_of(dropout=0.0, n_layer=2)
    for layer in model.get_base_model().transformer.h:
        layer.mlp.dropout.forward = drops
    (compile_layers if compiled else lambda base, recomputed: checkpoint_layers(base))(model.get_base_model(), recomputed=True)
    seeded(model)  # what is found out once about a model takes a forward pass too
    by_autograd, by_difference = slopes(model, seeded)
    assert by_autograd == pytest.approx(by_difference, rel=1e-6)
