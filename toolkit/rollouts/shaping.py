"""What is added to rewards: penalties for completions that grow too long or have no end, and for leaving the reference."""

from collections.abc import Sequence

import torch

from toolkit.losses.policy import kl_estimate
from toolkit.rollouts.advantages import reward_table
from toolkit.rollouts.rollout import Rollout


def overlong_penalty(lengths: torch.Tensor, max_completion_length: int, cache: int) -> torch.Tensor:
    """DAPO's soft punishment of long completions, from 0 to -1, `[completions]` (arXiv:2503.14476, equation 13).

    0 up to max_completion_length - cache tokens, from there down to -1 in a line at max_completion_length, -1 above. Add it
    to the rewards.
    """
    if not 0 < cache <= max_completion_length:
        raise ValueError(f"cache {cache}: must be above 0 and at most the longest completion, {max_completion_length}")
    start = max_completion_length - cache
    return ((start - lengths.to(torch.get_default_dtype())) / cache).clamp(-1.0, 0.0)


def penalize_kl(
    rewards: torch.Tensor,
    logps: torch.Tensor,
    reference_logps: torch.Tensor,
    mask: torch.Tensor,
    *,
    beta: float,
    kl_estimator: str = "k1",
) -> torch.Tensor:
    """Rewards `[completions]` minus beta times the sum of `kl_estimate` over each completion's tokens.

    RLOO, arXiv:2402.14740, with k1, as TRL has it. `logps`: of the policy that sampled, `[completions, longest]`.
    A reward that is not a number stays so.
    """
    kl = kl_estimate(logps, reference_logps, kl_estimator).where(mask.bool(), 0.0)
    return rewards - beta * kl.sum(1).to(rewards.dtype)


def shaped_rewards(
    rollouts: Sequence[Rollout], *, max_completion_length: int = 0, overlong_cache: int = 0, beta: float = 0.0,
    kl_estimator: str = "k1", missing_eos_penalty: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """The rewards of a step `[groups, completions of a prompt]`, float64, with the penalties that were asked for.

    `overlong_cache`: tokens of `overlong_penalty`; `beta`: weight of `penalize_kl`, for rollouts that have `reference_logps`;
    `missing_eos_penalty`: subtracted from the reward of a completion without an end. 0: none.
    """
    table = reward_table(rollouts)
    if overlong_cache:
        lengths = torch.tensor([len(rollout.completion_ids) for rollout in rollouts])
        table = table + overlong_penalty(lengths, max_completion_length, overlong_cache).view_as(table)
    if missing_eos_penalty:
        truncated = torch.tensor([rollout.truncated for rollout in rollouts], dtype=table.dtype)
        table = table - missing_eos_penalty * truncated.view_as(table)
    if beta:
        kl = [_kl_of(each, kl_estimator) for each in rollouts]
        table = table - beta * torch.tensor(kl, dtype=table.dtype).view_as(table)
    return table


def _kl_of(rollout: Rollout, estimator: str) -> float:
    """Summed over the tokens that the policy wrote, nats."""
    estimates = kl_estimate(torch.tensor(rollout.logps), torch.tensor(rollout.reference_logps), estimator).double()
    return float(estimates.sum() if rollout.written is None else estimates[torch.tensor(rollout.written)].sum())
