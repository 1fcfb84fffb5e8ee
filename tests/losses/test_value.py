"""PPO's rewards of tokens, advantages and value loss, against the formulas as plain loops over tokens; whole sums, not recursions."""

import pytest
import torch

from toolkit.losses.policy import policy_loss
from toolkit.losses.value import gae, token_rewards, value_loss, whiten

ROWS, LONGEST = 6, 7
NAN = float("nan")
MASK = torch.tensor(
    [
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1],
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 1, 0],  # a tool wrote two of them
        [0, 0, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 1, 0, 0],
    ]
).bool()
TOTALS = {"completions": float(ROWS), "completion_tokens": float(MASK.sum())}
REWARDS = torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0, -1.0], dtype=torch.float64)


def table(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, LONGEST, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_token_is_rewarded_for_staying_near_and_the_last_one_for_the_completion() -> None:
    """A loop, 1e-15. Fails when: the reward is at the last place of the table, the divergence is added, or masked tokens have one."""
    logps, reference = table(0), table(1)
    found = token_rewards(REWARDS, logps, reference.where(MASK, NAN), MASK, beta=0.1)
    for row in range(ROWS):
        places = MASK[row].nonzero()[:, 0].tolist()
        for t in range(LONGEST):
            expected = -0.1 * float(logps[row, t] - reference[row, t]) if t in places else 0.0
            expected += float(REWARDS[row]) if places and t == places[-1] else 0.0
            assert float(found[row, t]) == pytest.approx(expected, abs=1e-15)
    missing = token_rewards(REWARDS.where(torch.arange(ROWS) != 1, NAN), logps, reference, MASK, beta=0.1)
    assert (missing[1] == 0).all()
    assert torch.equal(missing[0], found[0])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_advantages_of_tokens_are_the_sum_of_their_formula(gamma: float, lam: float) -> None:
    """Sum over l of (γλ)^l δ_{t+l}, equation 16 of the paper, over the tokens that the policy wrote; 1e-12. Fails when: γ is left out of
    δ, the value after the end is not 0, or a tool's token counts as a step."""
    rewards, values = table(2) * MASK, table(3)
    advantages, returns = gae(rewards, values, MASK, gamma, lam)
    for row in range(ROWS):
        places = MASK[row].nonzero()[:, 0].tolist()
        r, v = [float(rewards[row, t]) for t in places], [float(values[row, t]) for t in places] + [0.0]
        deltas = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(places))]
        for k, t in enumerate(places):
            expected = sum((gamma * lam) ** n * deltas[k + n] for n in range(len(places) - k))
            assert float(advantages[row, t]) == pytest.approx(expected, abs=1e-12)
            assert float(returns[row, t]) == pytest.approx(expected + v[k], abs=1e-12)
            if (gamma, lam) == (1.0, 1.0):
                assert float(returns[row, t]) == pytest.approx(sum(r[k:]), abs=1e-12)
    assert (advantages[~MASK] == 0).all()
    assert (returns[~MASK] == 0).all()


def test_what_is_masked_is_read_nowhere() -> None:
    """Numbers that are none, in all tables. Fails when: a table is multiplied by the mask."""
    rewards, values, old = table(2), table(3), table(4)
    clean = gae(rewards, values, MASK)
    assert all(torch.equal(a, b) for a, b in zip(clean, gae(rewards.where(MASK, NAN), values.where(MASK, NAN), MASK), strict=True))
    assert torch.equal(whiten(clean[0], MASK), whiten(clean[0].where(MASK, NAN), MASK))
    leaf = values.where(MASK, NAN).requires_grad_()
    loss, metrics = value_loss(leaf, old.where(MASK, NAN), clean[1].where(MASK, NAN), MASK, TOTALS)
    loss.backward()
    assert torch.equal(loss, value_loss(values, old, clean[1], MASK, TOTALS)[0])
    assert leaf.grad is not None
    assert (leaf.grad[~MASK] == 0).all()
    assert all(torch.isfinite(value) for value in metrics.values())


def test_whitened_values_have_mean_0_and_deviation_1() -> None:
    """Over the tokens that count; 1e-7 (the 1e-8 below the root). Fails when: masked zeros count, or the variance is the biased one."""
    values = 3 * table(5) + 2
    white = whiten(values, MASK)[MASK]
    assert float(white.mean()) == pytest.approx(0, abs=1e-12)
    assert float(white.std()) == pytest.approx(1, abs=1e-7)
    kept = whiten(values, MASK, shift_mean=False)[MASK]
    assert float(kept.mean()) == pytest.approx(float(values[MASK].mean()), abs=1e-12)
    assert (whiten(values, torch.zeros_like(MASK)) == 0).all()


@pytest.mark.parametrize("cliprange", [0.2, None])
def test_the_value_loss_is_its_formula_and_its_gradient_that_of_finite_differences(cliprange: float | None) -> None:
    """A loop, 1e-12; differences 1e-6. Fails when: the smaller of both errors is taken, or the half is left out."""
    values, old, returns = table(6), table(6) + 0.3 * table(7), table(8)
    leaf = values.clone().requires_grad_()
    loss, metrics = value_loss(leaf, old, returns, MASK, TOTALS, cliprange_value=cliprange)
    loss.backward()
    assert leaf.grad is not None

    def formula(given: torch.Tensor) -> float:
        total = 0.0
        for v, o, r in zip(given[MASK].tolist(), old[MASK].tolist(), returns[MASK].tolist(), strict=True):
            bounded = v if cliprange is None else min(max(v, o - cliprange), o + cliprange)
            total += max((v - r) ** 2, (bounded - r) ** 2) / 2
        return total / TOTALS["completion_tokens"]

    assert float(loss.detach()) == pytest.approx(formula(values), abs=1e-12)
    for row in range(ROWS):
        for t in range(LONGEST):
            ends = [formula(values + sign * 1e-6 * ((torch.arange(ROWS)[:, None] == row) & (torch.arange(LONGEST) == t))) for sign in (1, -1)]
            assert float(leaf.grad[row, t]) == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-6)
    assert float(metrics["value_error"]) == pytest.approx(float((values - returns)[MASK].abs().mean()), abs=1e-12)
    assert float(metrics["value_target"]) == pytest.approx(float(returns[MASK].mean()), abs=1e-12)
    assert (float(metrics["value_clip_ratio"]) > 0) == (cliprange is not None)


def test_every_split_over_micro_batches_has_one_gradient_of_policy_and_values() -> None:
    """PPO's whole loss, with advantages of tokens; float64, 1e-12. Fails when: either is a mean over the micro-batch."""
    rewards, old_values, logps, old_logps = table(2), table(3), -table(9).abs(), -table(10).abs()
    advantages, returns = gae(rewards, old_values, MASK)
    advantages = whiten(advantages, MASK)
    found = []
    for split in ([6], [1] * 6, [4, 2], [1, 5]):
        leaves = logps.clone().requires_grad_(), (old_values + 0.1 * table(11)).requires_grad_()
        for part in torch.arange(ROWS).split(split):
            mask = MASK[part]
            policy, _ = policy_loss(leaves[0][part], old_logps[part], advantages[part], mask, TOTALS, loss_type="ppo")
            value, _ = value_loss(leaves[1][part], old_values[part], returns[part], mask, TOTALS)
            (policy + 0.1 * value).backward()
        found.append([leaf.grad for leaf in leaves])
    for gradients in found[1:]:
        for gradient, expected in zip(gradients, found[0], strict=True):
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
