"""PPO's view of the rollouts of a step: rewards of tokens, advantages, what values learn, and how good the values were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from toolkit.losses.policy import kl_estimate
from toolkit.losses.value import gae, token_rewards, whiten
from toolkit.rollouts.batches import counted_tokens, token_table
from toolkit.rollouts.rollout import Rollout
from toolkit.rollouts.shaping import shaped_rewards


def token_advantages(
    rollouts: Sequence[Rollout], *, beta: float = 0.0, kl_estimator: str = "k1", gamma: float = 1.0, lam: float = 0.95,
    whiten_rewards: bool = False, missing_eos_penalty: float = 0.0, mask_truncated_completions: bool = False,
) -> tuple[list[Rollout], torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """The rollouts with their `returns`, the advantages of their tokens, and metrics: of all of a step, in float64.

    `token_rewards`, `gae` and `whiten`, which is over the tokens that count: not those of completions without any reward, nor
    of truncated ones where `mask_truncated_completions`.

    Args:
        rollouts: of a step, the same on every rank, with `old_logps` and `old_values`, and `reference_logps` unless beta is 0.
        missing_eos_penalty: subtracted from the reward of a completion without an end. The value behind it is 0 either way.

    Returns advantages `[completions, longest]`, 0 where a token doesn't count, and 0-d: `explained_variance`,
    1 - Var(return - value) / Var(return) over the tokens that count, 1 for values that are right and 0 for the best constant
    (not a number where returns are equal); and `kl`, the mean of `kl_estimate`, nats a token, unless beta is 0.
    """
    width = max(len(rollout.completion_ids) for rollout in rollouts)

    def table(rows: Sequence[Sequence[float] | None]) -> torch.Tensor:
        return token_table(rows, width, torch.float64)

    written = table([[1.0] * len(rollout.completion_ids) for rollout in rollouts])
    counts = table(counted_tokens(rollouts, mask_truncated_completions, mask_unscored_completions=True))
    logps, values = table([each.old_logps for each in rollouts]), table([each.old_values for each in rollouts])
    reference = table([each.reference_logps for each in rollouts]) if beta else logps
    scores = shaped_rewards(rollouts, missing_eos_penalty=missing_eos_penalty).flatten()
    rewards = token_rewards(scores, logps, reference, written, beta=beta, kl_estimator=kl_estimator)
    if whiten_rewards:
        rewards = whiten(rewards, counts, shift_mean=False)
    advantages, returns = gae(rewards, values, written, gamma, lam)
    known = counts.bool()
    metrics = {"explained_variance": 1 - (returns - values)[known].var(correction=0) / returns[known].var(correction=0)}
    if beta:
        metrics["kl"] = kl_estimate(logps, reference, kl_estimator)[known].mean()
    learned = [row[: len(each.completion_ids)].tolist() for each, row in zip(rollouts, returns, strict=True)]
    targets = [replace(each, returns=row) for each, row in zip(rollouts, learned, strict=True)]
    return targets, whiten(advantages, counts), metrics
