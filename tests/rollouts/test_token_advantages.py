"""A whole step of PPO against one plain loop over completions and tokens: advantages, returns, losses and gradients, in float64."""

import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

import toolkit as tk
from toolkit.models.attention.interface import DOCUMENTS, register_attention
from toolkit.training.step import accumulate_gradients

TEMPERATURE, EPSILON, EPSILON_HIGH, CLIP, VF_COEF, ENTROPY, BETA, GAMMA, LAM, MISSING = 0.9, 0.05, 0.08, 0.02, 0.3, 0.01, 0.2, 0.97, 0.9, 0.4


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def model_of(seed: int, like: Any = None) -> Any:
    """A model with a value head; `like`: near to another one."""
    register_attention()
    config = GPT2Config(
        vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=1,
        eos_token_id=2, attn_implementation=DOCUMENTS,
    )  # fmt: skip
    model: Any = tk.add_value_head(GPT2LMHeadModel(config).double())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            first = 0.2 * noise if parameter.dim() > 1 else parameter
            parameter.copy_(first if like is None else dict(like.named_parameters())[name] + 0.02 * noise)
    return model


def rollouts_of(unscored: bool = False) -> list[tk.Rollout]:
    """Twelve: three completions of four prompts, of 1 to 7 tokens, the second one of each cut."""
    generator, made = torch.Generator().manual_seed(0), []
    for prompt in range(4):
        asked = torch.randint(3, 90, (3 + 2 * prompt,), generator=generator).tolist()
        for index in range(3):
            tokens = torch.randint(3, 90, (1 + (prompt + 3 * index) % 7,), generator=generator).tolist()
            reward = math.nan if unscored and prompt == 2 and index == 0 else 0.5 * index - 0.2 * prompt
            made.append(tk.Rollout(prompt, index, asked, tokens, [-1.0] * len(tokens), index == 1, {}, "", reward=reward))
    return made


def tokens_of(model: Any, each: tk.Rollout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, entropies and values of a completion's tokens, of a pass of its own."""
    ids = torch.tensor([each.prompt_ids + each.completion_ids])
    hidden = model.transformer(ids).last_hidden_state[0, len(each.prompt_ids) - 1 : -1]
    log_all = (model.lm_head(hidden) / TEMPERATURE).log_softmax(-1)
    logps = log_all.gather(1, torch.tensor(each.completion_ids)[:, None])[:, 0]
    return logps, -(log_all.exp() * log_all).sum(-1), hidden @ model.value_head.weight[0]


def whole_step(new: Any, old: Any, reference: Any, rollouts: list[tk.Rollout], masks: bool, whitens: bool) -> dict[str, Any]:
    """PPO from its formulas: each sum written out."""
    advantages, returns, rewards, kls, found = [], [], [], [], {}
    counts = [not math.isnan(each.reward) and not (masks and each.truncated) for each in rollouts]
    with torch.no_grad():
        before = [tokens_of(old, each) for each in rollouts]
        others = [tokens_of(reference, each)[0] for each in rollouts]
    for each, (logps, _, _), other in zip(rollouts, before, others, strict=True):
        own = [-BETA * float(a - b) for a, b in zip(logps, other, strict=True)]
        kls.append([float(a - b) for a, b in zip(logps, other, strict=True)])
        own[-1] += each.reward - (MISSING if each.truncated else 0.0)
        rewards.append(own if not math.isnan(each.reward) else [0.0] * len(own))
    if whitens:
        flat = torch.tensor([r for own, count in zip(rewards, counts, strict=True) if count for r in own])
        scale = 1 / math.sqrt(float(((flat - flat.mean()) ** 2).sum() / (len(flat) - 1)) + 1e-8)
        rewards = [[(r - float(flat.mean())) * scale + float(flat.mean()) for r in own] for own in rewards]
    for own, (_, _, values) in zip(rewards, before, strict=True):
        v = [*values.tolist(), 0.0]
        deltas = [own[t] + GAMMA * v[t + 1] - v[t] for t in range(len(own))]
        a = [sum((GAMMA * LAM) ** (k - t) * deltas[k] for k in range(t, len(own))) for t in range(len(own))]
        advantages.append(a)
        returns.append([x + y for x, y in zip(a, v, strict=False)])
    flat = torch.tensor([a for own, count in zip(advantages, counts, strict=True) if count for a in own])
    white = [[(a - float(flat.mean())) / math.sqrt(float(flat.var()) + 1e-8) for a in own] for own in advantages]
    known = torch.tensor([r for own, count in zip(returns, counts, strict=True) if count for r in own])
    left = torch.tensor([r - float(v) for own, (_, _, vs), count in zip(returns, before, counts, strict=True) if count
                         for r, v in zip(own, vs, strict=True)])  # fmt: skip
    number = sum(len(each.completion_ids) for each, count in zip(rollouts, counts, strict=True) if count)
    loss, clipped, value_clipped = torch.zeros(()), 0, 0
    for row, each in enumerate(rollouts):
        if not counts[row]:
            continue
        logps, entropies, values = tokens_of(new, each)
        for t in range(len(each.completion_ids)):
            ratio, a = (logps[t] - before[row][0][t]).exp(), white[row][t]
            bounded = ratio.clamp(1 - EPSILON, 1 + EPSILON_HIGH)
            clipped += int(bool(bounded * a < ratio * a))
            v, v_old, target = values[t], before[row][2][t], returns[row][t]
            near = v_old + (v - v_old).clamp(-CLIP, CLIP)
            value_clipped += int(bool((near - target) ** 2 > (v - target) ** 2))
            loss = loss - torch.minimum(ratio * a, bounded * a) / number - ENTROPY * entropies[t] / number
            loss = loss + VF_COEF * torch.maximum((v - target) ** 2, (near - target) ** 2) / 2 / number
    loss.backward()
    found |= {"loss": loss.detach(), "clipped": clipped / number, "value_clipped": value_clipped / number}
    found["explained_variance"] = 1 - float(left.var(correction=0) / known.var(correction=0))
    found["kl"] = sum(k for own, count in zip(kls, counts, strict=True) if count for k in own) / number
    found |= {"advantages": white, "returns": returns, "counts": counts}
    found["gradients"] = {name: parameter.grad.clone() for name, parameter in new.named_parameters()}
    new.zero_grad()
    return found


def loss_fn(model: Any, completions: dict[str, Any], totals: dict[str, float]) -> Any:
    """That of recipes/ppo.py."""
    logps, entropies, values = tk.logps_and_values(model, completions, TEMPERATURE, True)
    policy, of_policy = tk.policy_loss(
        logps, completions["old_logps"], completions["advantages"], completions["mask"], totals, loss_type="ppo", epsilon=EPSILON,
        epsilon_high=EPSILON_HIGH, entropy_coef=ENTROPY, entropies=entropies,
    )  # fmt: skip
    value, of_values = tk.value_loss(
        values, completions["old_values"], completions["returns"], completions["mask"], totals, cliprange_value=CLIP
    )
    return policy + VF_COEF * value, {**of_policy, **of_values}


@pytest.mark.parametrize(("layout", "masks", "whitens", "unscored"), [
    ("shared", False, False, False), ("packed", True, True, False), ("padded", False, True, True),
])  # fmt: skip
def test_a_step_is_that_of_a_plain_loop_for_every_split(layout: str, masks: bool, whitens: bool, unscored: bool) -> None:
    """1e-10: 1 x 12, 3 x 4, 12 x 1 and two ranks; ratios and values are clipped; masked and unscored completions count nowhere.

    Fails when: the value is of the token itself, whitening takes masked tokens, the advantages of a table are those of its first
    rows, or the penalty of a cut completion is added.
    """
    old, reference = model_of(0), model_of(1, like=model_of(0))
    new, rollouts, accelerator = model_of(2, like=old), rollouts_of(unscored), Accelerator(cpu=True)
    expected = whole_step(new, old, reference, rollouts, masks, whitens)
    assert 0.05 < expected["clipped"] < 0.9
    assert 0.05 < expected["value_clipped"] < 0.9
    collate = partial(tk.collate_rollouts, layout=layout, mask_truncated_completions=masks, mask_unscored_completions=True)

    def before(model: Any, completions: dict[str, Any]) -> dict[str, Any]:
        logps, _, values = tk.logps_and_values(model, completions, TEMPERATURE)
        return {"old_logps": logps, "old_values": values}

    rollouts = tk.with_logps(
        accelerator, old, rollouts, collate, micro_batch_size=5, old=before,
        reference_logps=lambda _, completions: tk.rollout_logps(reference, completions, TEMPERATURE)[0],
    )  # fmt: skip
    rollouts, advantages, metrics = tk.token_advantages(
        rollouts, beta=BETA, gamma=GAMMA, lam=LAM, whiten_rewards=whitens, missing_eos_penalty=MISSING,
        mask_truncated_completions=masks,
    )  # fmt: skip
    for row, each in enumerate(rollouts):
        if expected["counts"][row]:
            length = len(each.completion_ids)
            assert advantages[row, :length].tolist() == pytest.approx(expected["advantages"][row], abs=1e-10)
            assert each.returns == pytest.approx(expected["returns"][row], abs=1e-10)
        else:
            assert not advantages[row].any()
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {name: expected[name] for name in ("explained_variance", "kl")}, abs=1e-10
    )
    for size, ranks in ((12, 1), (4, 1), (1, 1), (4, 2)):
        gradients, loss, clipped = {name: torch.zeros_like(p) for name, p in new.named_parameters()}, 0.0, 0.0
        for rank in range(ranks):
            own: Any = SimpleNamespace(process_index=rank, num_processes=ranks)
            (batch,) = tk.policy_batches(own, rollouts, advantages, collate, micro_batch_size=size)
            parts = accumulate_gradients(accelerator, new, batch, loss_fn)
            loss, clipped = loss + float(parts["loss"]), clipped + float(parts["clip_ratio_low"] + parts["clip_ratio_high"])
            for name, parameter in new.named_parameters():
                gradients[name] += parameter.grad
            new.zero_grad()
        assert loss == pytest.approx(float(expected["loss"]), abs=1e-10)
        assert clipped == pytest.approx(expected["clipped"], abs=1e-10)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected["gradients"][name], atol=1e-10, rtol=1e-9)
        assert float(gradients["value_head.weight"].abs().max()) > 1e-4


def test_the_gradient_of_the_value_head_is_the_difference_of_losses() -> None:
    """Central differences, 1e-7. Fails when: the values are detached."""
    old, accelerator = model_of(0), Accelerator(cpu=True)
    rollouts = [each for each in rollouts_of() if each.prompt < 2]
    for each in rollouts:
        each.old_logps, each.old_values = [-4.5] * len(each.completion_ids), [0.1] * len(each.completion_ids)
    rollouts, advantages, _ = tk.token_advantages(rollouts)
    collate = partial(tk.collate_rollouts, layout="packed", mask_unscored_completions=True)
    (batch,) = tk.policy_batches(accelerator, rollouts, advantages, collate, micro_batch_size=4)
    accumulate_gradients(accelerator, old, batch, loss_fn)
    weight, gradient = old.value_head.weight, old.value_head.weight.grad.clone()
    for column in (0, 7, 31):
        losses = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                weight[0, column] += step
                losses.append(sum(float(loss_fn(old, each, batch.totals)[0]) for each in batch.micro_batches))
                weight[0, column] -= step
        assert float(gradient[0, column]) == pytest.approx((losses[0] - losses[1]) / 2e-5, abs=1e-7)


def test_a_cut_completion_has_no_value_behind_it_and_several_updates_share_what_was_before() -> None:
    """Fails when: `steps_per_generation` slices a table of advantages by columns."""
    rollouts = rollouts_of()
    for each in rollouts:
        each.old_logps = [-1.0] * len(each.completion_ids)
        each.old_values = [0.25] * len(each.completion_ids)
    rollouts, advantages, metrics = tk.token_advantages(rollouts, lam=0.0)
    assert metrics.keys() == {"explained_variance"}
    assert [each.returns[-1] for each in rollouts if each.returns] == pytest.approx([each.reward for each in rollouts])
    assert all(each.returns[:-1] == [0.25] * (len(each.completion_ids) - 1) for each in rollouts if each.returns)
    accelerator: Any = SimpleNamespace(process_index=0, num_processes=1)
    collate = partial(tk.collate_rollouts, layout="padded")
    updates = list(tk.policy_batches(accelerator, rollouts, advantages, collate, micro_batch_size=2, steps_per_generation=3, num_iterations=2))
    assert len(updates) == 6
    for half in (updates[:3], updates[3:]):
        seen = [row[mask.bool()].tolist() for update in half for one in update.micro_batches
                for row, mask in zip(one["advantages"], one["mask"], strict=True)]  # fmt: skip
        assert seen == [row[: len(each.completion_ids)].tolist() for row, each in zip(advantages, rollouts, strict=True)]


def test_groups_of_one_completion_have_the_spread_of_all() -> None:
    """Against torch's standard deviation. Fails when: `several` is left out of `rollout_metrics`."""
    alone = [tk.Rollout(number, 0, [5], [7], [-1.0], False, {}, "", reward=reward) for number, reward in enumerate((0.0, 1.0, 4.0))]
    found = tk.rollout_metrics(alone)
    assert float(found["reward_std"]) == pytest.approx(float(torch.tensor([0.0, 1.0, 4.0]).std()), abs=1e-12)
    assert "groups_without_spread" not in found
    assert "groups_without_spread" in tk.rollout_metrics(rollouts_of())


def test_each_reward_has_its_spread_and_completions_their_shortest_and_longest() -> None:
    """Against torch's standard deviation, without those that a reward does not apply to.

    Fails when: None counts as 0, or the lengths are those of groups.
    """
    values = [None, 0.5e20, 1e20, 4e20]  # whose squares float32 can't hold
    rollouts = [
        tk.Rollout(number // 2, number % 2, [5], [7] * (number + 1), [-1.0] * (number + 1), False, {}, "", rewards={"own": value, "other": 1.0}, reward=1.0)
        for number, value in enumerate(values)
    ]
    found = {name: float(value) for name, value in tk.rollout_metrics(rollouts).items()}
    assert found["reward_own"] == pytest.approx(5.5e20 / 3)
    assert found["reward_own_std"] == pytest.approx(1e20 * float(torch.tensor([0.5, 1.0, 4.0]).std()))
    assert found["reward_other_std"] == 0
    assert [found[f"completion_length{which}"] for which in ("", "_min", "_max")] == [2.5, 1, 4]
