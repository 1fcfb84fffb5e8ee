"""Advantages against TRL's own code on the same rewards, and against the papers' formulas as plain loops over groups."""

import math
import statistics
from typing import Any

import pytest
import torch

from tests.losses import trl_policy
from toolkit.rollouts.advantages import (
    advantages,
    choose_advantages,
    group_has_spread,
    overlong_penalty,
    reward_table,
    shaped_rewards,
)
from toolkit.rollouts.rollout import Rollout

NAN = float("nan")
REWARDS = torch.tensor(
    [
        [1.0, 0.0, 0.5, 2.0],
        [0.1, 0.1, 0.1, 0.1],  # no spread
        [NAN, 1.0, 0.0, NAN],
        [NAN, NAN, 0.7, NAN],  # a single reward
        [NAN, NAN, NAN, NAN],
        [-3.0, 4.0, 4.0, NAN],
    ]
)


def scored(rewards: torch.Tensor, logps: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> list[Rollout]:
    """Rollouts in groups of four, of whose tokens the policy wrote those of the mask."""
    rows = zip(rewards.tolist(), logps.tolist(), reference.tolist(), mask.bool().tolist(), strict=True)
    return [
        Rollout(i // 4, i % 4, [1], [2] * len(own), own, False, {}, "", {}, reward, reference_logps=other, written=written)
        for i, (reward, own, other, written) in enumerate(rows)
    ]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpo_advantages_are_those_of_trl(scale: str) -> None:
    """Largest difference 2e-7. Fails when: the standard deviation is the biased one, STD_EPS is 1e-6, a missing reward counts as 0."""
    found = advantages(REWARDS, estimator="group", scale_rewards=scale)
    torch.testing.assert_close(found, trl_policy.advantages("GRPO", REWARDS, scale_rewards=scale), rtol=1e-5, atol=1e-5)
    assert (found[REWARDS.isnan()] == 0).all()


@pytest.mark.parametrize("normalize", [False, True])
def test_rloo_advantages_are_those_of_trl(normalize: bool) -> None:
    """Largest difference 3e-7. Fails when: the baseline divides by the count, or the own reward stays in it."""
    found = advantages(REWARDS, estimator="rloo", scale_rewards="none", normalize_advantages=normalize)
    theirs = trl_policy.advantages("RLOO", REWARDS, normalize_advantages=normalize, beta=0.0)
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
def test_reinforce_advantages_are_those_of_a_loop(normalize: bool) -> None:
    """REINFORCE with the mean of all rewards as baseline, and REINFORCE++. Fails when: the mean is that of each group."""
    given = [r for r in REWARDS.double().flatten().tolist() if not math.isnan(r)]
    mean, spread = statistics.fmean(given), statistics.stdev(given) + 1e-4
    expected = [0.0 if math.isnan(r) else (r - mean) / (spread if normalize else 1) for r in REWARDS.double().flatten().tolist()]
    found = advantages(REWARDS.double(), estimator="reinforce", scale_rewards="none", normalize_advantages=normalize)
    torch.testing.assert_close(found.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "kind",
    [
        {"estimator": "group", "scale_rewards": "group"},
        {"estimator": "group", "scale_rewards": "batch"},
        {"estimator": "rloo", "scale_rewards": "none"},
        {"estimator": "reinforce", "scale_rewards": "none"},
        {"estimator": "reinforce", "scale_rewards": "none", "normalize_advantages": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_are_worth_exactly_nothing(kind: dict[str, Any], reward: float) -> None:
    """Also where their sum is rounded, divided by 1e-4. Fails when: rewards are not measured from the first of the group."""
    rewards = torch.full((3, 7), reward, dtype=torch.float64)
    rewards[1, 2] = NAN
    assert (advantages(rewards, **kind) == 0).all()
    assert not group_has_spread(rewards).any()


def test_rewards_of_rollouts_are_a_table_of_groups_without_those_that_nothing_applied_to() -> None:
    """A rollout whose rewards are all None has none, whatever its sum says; one that was never scored has its sum. Fails when: the sum is
    taken in any case."""
    rewards: list[dict[str, float | None]] = [{"a": 1.0, "b": None}, {"a": None, "b": None}, {}, {"a": 0.0, "b": 0.0}]
    rollouts = [Rollout(7, i % 2, [], [], [], False, {}, "", each, float(i)) for i, each in enumerate(rewards)]
    torch.testing.assert_close(reward_table(rollouts), torch.tensor([[0.0, NAN], [2.0, 3.0]], dtype=torch.float64), equal_nan=True)


def test_groups_with_spread_are_those_with_two_different_rewards() -> None:
    """Fails when: a missing reward counts as a value of its own, or a group without rewards as one with spread."""
    assert group_has_spread(REWARDS).tolist() == [True, False, True, False, False, True]
    assert group_has_spread(torch.tensor([[-1.0, NAN, -1.0], [1.0, NAN, 1.0], [-1.0, NAN, 1.0]])).tolist() == [False, False, True]


def test_a_loss_brings_the_advantages_of_its_paper_unless_told() -> None:
    """Fails when: dr_grpo is scaled by group, or rloo's own baseline loses to a setting's default."""
    assert choose_advantages("dapo") == choose_advantages("cispo") == ("group", "group")
    assert choose_advantages("dr_grpo") == ("group", "none")
    assert choose_advantages("rloo") == ("rloo", "none")
    assert choose_advantages("reinforce", scale_rewards="batch") == ("reinforce", "batch")
    assert choose_advantages("dapo", "rloo") == ("rloo", "none")
    assert choose_advantages("dr_grpo", "auto", "group") == ("group", "group")
    with pytest.raises(ValueError, match="without spread"):
        advantages(REWARDS, estimator="reinforce", scale_rewards="group")


def test_the_penalty_of_long_completions_is_that_of_dapo_and_trl() -> None:
    """At, between and beyond both ends. Fails when: the line begins at the longest length, or ends at 0."""
    from trl.rewards import get_soft_overlong_punishment

    lengths = [0, 1, 79, 80, 81, 95, 99, 100, 101, 500]
    theirs = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)(completion_ids=[[0] * n for n in lengths])
    found = overlong_penalty(torch.tensor(lengths), 100, 20)
    torch.testing.assert_close(found, torch.tensor(theirs, dtype=torch.float32), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="cache 0"):
        overlong_penalty(torch.tensor(lengths), 100, 0)


def test_rloo_with_the_divergence_in_its_rewards_is_that_of_trl() -> None:
    """Completions of 1 to 5 tokens; 1e-5. Fails when: k3 is the default of rewards, beta is left out, or masked tokens count."""
    generator = torch.Generator().manual_seed(2)
    logps, reference = (-3 * torch.rand(24, 5, generator=generator) for _ in range(2))
    mask = torch.arange(5) < torch.randint(1, 6, (24, 1), generator=generator)
    theirs = trl_policy.advantages("RLOO", REWARDS, logps, reference.where(mask, NAN), beta=0.3)
    rewards = shaped_rewards(scored(REWARDS.flatten(), logps, reference, mask), beta=0.3)
    theirs = theirs.double()
    torch.testing.assert_close(advantages(rewards, estimator="rloo", scale_rewards="none"), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_penalty_of_the_divergence_is_its_sum_over_the_tokens_that_count(estimator: str) -> None:
    """A loop is the reference. Fails when: tokens that the policy did not write count, or the mean is taken."""
    generator = torch.Generator().manual_seed(1)
    logps, reference = (-3 * torch.rand(4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]])
    rewards = torch.tensor([1.0, 2.0, 3.0, NAN], dtype=torch.float64)
    formulas = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
    expected = []
    for row in range(4):
        kl = sum(formulas[estimator](float(logps[row, t] - reference[row, t])) for t in range(5) if mask[row, t])
        expected.append(float(rewards[row]) - 0.3 * kl)
    found = shaped_rewards(scored(rewards, logps, reference.where(mask > 0, NAN), mask), beta=0.3, kl_estimator=estimator)
    torch.testing.assert_close(found.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-5, equal_nan=True)
