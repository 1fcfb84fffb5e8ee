"""Log-probabilities and entropies of completions: in every layout those of a plain loop, and so are their gradients."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from toolkit.generation.distribution import SamplingSettings
from toolkit.generation.random_numbers import completion_key
from toolkit.generation.sampler import sample_groups
from toolkit.losses import chunked
from toolkit.losses.rollout_logps import rollout_logps
from toolkit.models.attention.interface import DOCUMENTS, register_attention
from toolkit.rollouts.batches import collate_rollouts
from toolkit.rollouts.rollout import Rollout

PROMPTS = [np.random.default_rng(length).integers(3, 90, length).tolist() for length in (5, 30, 1)]


def model_of() -> Any:
    register_attention()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=1,
        eos_token_id=2, attn_implementation=DOCUMENTS,
    )  # fmt: skip  # its norms work in float64; those of Llama turn to float32 inside
    model = GPT2LMHeadModel(config).double()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def sampled(model: Any, settings: SamplingSettings) -> list[Rollout]:
    keys = np.array([[completion_key(0, 0, prompt, index) for index in range(3)] for prompt in range(3)], dtype=np.uint64)
    return [
        Rollout(
            prompt, index, ids, each.tokens, each.logps, each.truncated, {}, "",
            kept=None if each.kept is None else [kept.tolist() for kept in each.kept],
        )
        for prompt, (ids, group) in enumerate(zip(PROMPTS, sample_groups(model, PROMPTS, keys, settings), strict=True))
        for index, each in enumerate(group)
    ]  # fmt: skip


SETTINGS = {
    "plain": SamplingSettings(max_new_tokens=9, temperature=0.7, eos_token_ids=(2, 5)),
    "cut": SamplingSettings(max_new_tokens=9, temperature=1.2, top_p=0.8, eos_token_ids=(2, 5)),
}


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("chunk", [4, 4096])
def test_values_and_gradients_are_those_of_a_plain_loop(layout: str, kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 1e-10, with a gradient of the entropy too; and the sampler's log-probabilities to 1e-10.

    Fails when: the temperature is left out, `kept_rows` is not moved by the piece's start, or shared answers begin one too late.
    """
    monkeypatch.setattr(chunked, "rows_in_a_chunk", lambda vocabulary, device: chunk)
    model, settings = model_of(), SETTINGS[kind]
    rollouts = sampled(model, settings)
    weights = torch.randn(len(rollouts), 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        return [gradient.clone() for gradient in torch.autograd.grad(loss, list(model.parameters()))]

    batch = collate_rollouts(rollouts, [0.0] * len(rollouts), layout=layout)
    logps, entropies = rollout_logps(model, batch, settings.temperature, with_entropy_gradient=True)
    width = logps.shape[1]
    found = gradients((logps * weights[:, :width]).sum() + (entropies * weights[:, :width].cos()).sum())
    loss: Any = 0.0
    for row, each in enumerate(rollouts):
        logits = model(torch.tensor([each.prompt_ids + each.completion_ids])).logits[0, len(each.prompt_ids) - 1 : -1]
        logits = logits / settings.temperature
        if each.kept is not None:
            kept = torch.full_like(logits, -1e30)
            for place, ids in enumerate(each.kept):
                kept[place, ids] = 0
            logits = logits + kept
        log_all = logits.log_softmax(-1)
        own = log_all.gather(1, torch.tensor(each.completion_ids)[:, None])[:, 0]
        entropy = -(log_all.exp() * log_all).sum(-1)
        length = len(each.completion_ids)
        torch.testing.assert_close(logps[row, :length], own, atol=1e-10, rtol=0)
        torch.testing.assert_close(entropies[row, :length], entropy, atol=1e-10, rtol=0)
        torch.testing.assert_close(torch.tensor(each.logps, dtype=torch.float64), own, atol=1e-10, rtol=0)
        assert not logps[row, length:].any()
        assert not entropies[row, length:].any()
        loss = loss + (own * weights[row, :length]).sum() + (entropy * weights[row, :length].cos()).sum()
    for one, other in zip(found, gradients(loss), strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-9)
    assert batch["input_ids"].numel() < 200 or layout == "padded"


def test_a_groups_prompt_is_read_once_and_truncated_completions_may_be_masked() -> None:
    """Fails when: `owner` is not compared, so that each completion brings its prompt."""
    rollouts = sampled(model_of(), SETTINGS["plain"])
    collate = partial(collate_rollouts, rollouts, [float(number) for number in range(9)], layout="shared")
    batch = collate()
    assert batch["input_ids"].shape[1] == sum(map(len, PROMPTS)) + sum(len(each.completion_ids) for each in rollouts)
    assert batch["mask"].sum(1).tolist() == [len(each.completion_ids) for each in rollouts]
    assert batch["advantages"].tolist() == list(range(9))
    masked = collate(mask_truncated_completions=True)["mask"].sum(1).tolist()
    assert masked == [0 if each.truncated else len(each.completion_ids) for each in rollouts]
    assert 0 in masked
