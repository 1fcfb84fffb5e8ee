"""PPO's other half: rewards of tokens, generalized advantages, and the loss of the value head.

Tables are `[completions, longest]`, and the mask is 1 at each token that the policy wrote. A value V_t is that of the state
*before* token t: the head's output at the token before it. After a completion's last token it is 0, also where it was cut.
"""

from collections.abc import Mapping

import torch

from toolkit.losses.policy import kl_estimate


def token_rewards(
    rewards: torch.Tensor,
    logps: torch.Tensor,
    reference_logps: torch.Tensor,
    mask: torch.Tensor,
    *,
    beta: float,
    kl_estimator: str = "k1",
) -> torch.Tensor:
    """Rewards of tokens: - beta * KL at each one, and the completion's reward, `[completions]`, at its last one.

    RLHF, arXiv:2203.02155, equation 2, and arXiv:1909.08593, equation 2. `logps`: of the policy that sampled. A completion
    without a reward (not a number) gets 0 at every token; leave it out of the mask of the losses.
    """
    counts = mask.bool()
    given = kl_estimate(logps, reference_logps, kl_estimator).detach().where(counts, 0.0) * -beta
    position = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(counts, position, -1).amax(1, keepdim=True)
    given = given + torch.where(position == last, rewards[:, None].to(given.dtype), 0.0)
    return given.masked_fill(rewards.isnan()[:, None], 0.0)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantages of tokens and the returns that values learn, both `[completions, longest]`, 0 where masked.

    A_t = δ_t + γ λ A_{t+1} with δ_t = r_t + γ V_{t+1} - V_t (GAE, arXiv:1506.02438, equation 16), from the last
    token back; returns are A + V. A masked token (padding, or written by a tool) is no step: the policy's next token follows.
    """
    counts, values = mask.bool(), values.detach()
    advantage = next_value = torch.zeros_like(values[:, 0])
    found = []
    for t in reversed(range(values.shape[1])):
        change = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(counts[:, t], change + gamma * lam * advantage, advantage)
        next_value = torch.where(counts[:, t], values[:, t], next_value)
        found.append(advantage)
    advantages = torch.stack(found[::-1], dim=1).where(counts, 0.0)
    return advantages, (advantages + values).where(counts, 0.0)


def whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the tokens that count, 0 elsewhere: TRL's, with the unbiased variance.

    Take all rollouts of a step together, not a micro-batch. Without `shift_mean` the mean stays, as for rewards.
    """
    counts = mask.bool()
    kept = values[counts].double()
    if kept.numel() < 2:
        return torch.zeros_like(values)
    mean = kept.mean()
    white = (values - mean) * torch.rsqrt(kept.var() + 1e-8) + (0.0 if shift_mean else mean)
    return white.where(counts, 0.0).to(values.dtype)


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    totals: Mapping[str, float],
    *,
    cliprange_value: float | None = 0.2,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the mean over the tokens of the global batch of max((V - R)², (V_clip - R)²) / 2.

    V_clip = clip(V, V_old - cliprange_value, V_old + cliprange_value), as OpenAI's implementation of PPO has it
    (arXiv:2005.12729, section 3) and TRL's; None: (V - R)² / 2.

    Returns the loss, 0-d, and parts of means over tokens: `value_clip_ratio`, the share whose gradient is clipped;
    `value_error`, |V - R|; `value`, V; `value_target`, R.
    """
    counts, tokens = mask.bool(), totals["completion_tokens"] or 1.0
    values, old_values, returns = (table.where(counts, 0.0) for table in (values, old_values, returns))
    errors = (values - returns).square()
    clipped = torch.zeros_like(counts)
    if cliprange_value is not None:
        bounded = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
        bounded_errors = (bounded - returns).square()
        clipped = bounded_errors > errors
        errors = torch.maximum(errors, bounded_errors)
    each = {
        "value_clip_ratio": clipped, "value_error": (values - returns).detach().abs(), "value": values.detach(),
        "value_target": returns,
    }  # fmt: skip
    return errors.sum() / (2 * tokens), {name: value.sum() / tokens for name, value in each.items()}
