"""Losses of policy gradients, as functions of token log-probabilities, advantages and totals, and their metrics.

Everything is a table of tokens `[completions, longest]`: log-probabilities in nats, and a mask that is 1 at each token that the
policy wrote and that counts. Each loss is a sum over the micro-batch divided by totals of the *global* batch, which are known
from the rollouts before the first forward pass: the parts of all micro-batches and ranks add up to the loss of the whole.
"""

from collections.abc import Mapping

import torch

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "rloo", "reinforce", "ppo")


def policy_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    totals: Mapping[str, float],
    *,
    loss_type: str = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    importance_sampling_level: str = "token",
    max_completion_length: int | None = None,
    beta: float = 0.0,
    reference_logps: torch.Tensor | None = None,
    kl_estimator: str = "k3",
    use_bias_correction_kl: bool = True,
    entropy_coef: float = 0.0,
    entropies: torch.Tensor | None = None,
    sampler_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the loss over the global batch. Names of losses and settings are TRL's, with its meaning.

    | loss_type | a token's loss | counted as |
    | --- | --- | --- |
    | grpo | `clipped_surrogate` | mean over completions of each one's mean (arXiv:2402.03300, equation 3) |
    | dr_grpo | the same | sum / (completions * max_completion_length) (arXiv:2503.20783) |
    | dapo | the same; epsilon_high is its clip-higher | mean over all tokens (arXiv:2503.14476, equation 8) |
    | bnpo | the same | the same: TRL divides by the tokens of a micro-batch, and there is no such mean here |
    | gspo | the same, of the ratio of the whole completion | as grpo (arXiv:2507.18071, equations 5 and 7) |
    | cispo | `cispo_surrogate` | mean over all tokens (arXiv:2506.13585, equations 4 and 5) |
    | rloo | the same as grpo, of the product of a completion's ratios | mean over completions (TRL's; its gradient on the \
sampled policy is that of arXiv:2402.14740) |
    | reinforce | - advantage * log π; no ratio: of the policy that sampled alone | sum over a completion's tokens, mean over \
completions (Williams 1992) |
    | ppo | `clipped_surrogate`, with advantages of tokens | mean over all tokens (arXiv:1707.06347, equation 7) |

    Args:
        logps: of the policy, with a gradient, `[completions, longest]`.
        old_logps: of the policy that sampled, of the same distribution; None: `logps` themselves, a ratio of exactly 1.
        advantages: `[completions]`, or of each token `[completions, longest]`.
        mask: true or 1 where a token counts. What is in a table elsewhere is not read.
        totals: "completions" and "completion_tokens" of the global batch: all completions, also those whose tokens are all
            masked, and all tokens that are not.
        epsilon, epsilon_high: a ratio is clipped to [1 - epsilon, 1 + epsilon_high]; None: as epsilon. Of cispo epsilon_high
            is the largest ratio itself.
        delta: the largest ratio also where the advantage is negative (two-sided clip, arXiv:2505.07291).
        importance_sampling_level: "token", or "sequence": the ratio of gspo in another loss.
        max_completion_length: of dr_grpo: the setting, not the longest of the batch.
        beta, reference_logps, kl_estimator: weight of `kl_estimate` in each token's loss.
        use_bias_correction_kl: multiply it by the ratio (DeepSeek-V3.2, arXiv:2512.02556), which makes its gradient that of
            the reverse KL.
        entropy_coef, entropies: of the policy at each token, nats; their mean over all tokens, times entropy_coef, is
            subtracted whatever the loss.
        sampler_weights: of `toolkit.rollouts.server_gap`, multiplied with each token's loss (not with its KL).

    Returns the loss, 0-d, and metrics, likewise parts of means over tokens (of a ratio of whole completions: over completions):

    - `ratio`, `ratio_max`: the mean and the largest ratio to the policy that sampled; `clip_ratio_low`, `clip_ratio_high`:
      the share whose gradient is clipped, below with a negative and above with a positive advantage. Of reinforce there are
      none.
    - `approx_kl`: KL(old || policy) a token, `kl_estimate` k3 of samples of the old policy, nats.
    - `kl`: as it is in the loss, where beta is not 0; `entropy`, where entropies are given.
    """
    counts = mask.bool()
    logps = logps.where(counts, 0.0)
    old_logps = logps.detach() if old_logps is None else old_logps.where(counts, 0.0)
    advantages = (advantages[:, None] if advantages.dim() == 1 else advantages.where(counts, 0.0)).to(logps.dtype)
    level = {"gspo": "sequence", "rloo": "product"}.get(loss_type, importance_sampling_level)
    if level != "token" and advantages.shape[1] > 1:
        raise ValueError(f"a ratio of whole completions ({loss_type}) takes one advantage each, not {list(advantages.shape)}")
    ratio = importance_ratio(logps, old_logps, counts, level)
    high = epsilon if epsilon_high is None else epsilon_high

    if loss_type == "cispo":
        losses = cispo_surrogate(logps, ratio, advantages, high)
        clipped = {"high": (ratio > high) & (advantages > 0)}
    elif loss_type == "reinforce":
        losses, clipped = -advantages * logps, {}
    else:
        losses = clipped_surrogate(ratio, advantages, epsilon, high, delta)
        clipped = {"low": (ratio < 1 - epsilon) & (advantages < 0), "high": (ratio > 1 + high) & (advantages > 0)}

    # of tokens, or, of a ratio for each completion, of completions that have any
    of_ratio = counts if level == "token" else counts.any(1, keepdim=True)
    units = totals["completion_tokens" if level == "token" else "completions"] or 1.0
    metrics = {f"clip_ratio_{side}": (which & of_ratio).sum() / units for side, which in clipped.items()}
    if loss_type != "reinforce":
        metrics["ratio"] = (ratio.detach() * of_ratio).sum() / units
        metrics["ratio_max"] = (ratio.detach() * of_ratio).max()
    metrics["approx_kl"] = _token_mean(kl_estimate(old_logps, logps.detach(), "k3"), counts, totals)

    if sampler_weights is not None:
        losses = losses * sampler_weights
    if beta:
        if reference_logps is None:
            raise ValueError("beta needs reference_logps")
        kl = kl_estimate(logps, reference_logps.where(counts, 0.0), kl_estimator)
        kl = kl * ratio if use_bias_correction_kl else kl
        losses = losses + beta * kl
        metrics["kl"] = _token_mean(kl.detach(), counts, totals)
    loss = (losses * token_weights(counts, totals, loss_type, max_completion_length)).sum()
    if entropies is not None:
        entropy = _token_mean(entropies, counts, totals)
        metrics["entropy"] = entropy.detach()
        loss = loss - entropy_coef * entropy if entropy_coef else loss
    return loss, metrics


def choose_kl(loss_type: str, kl_in: str = "auto", kl_estimator: str = "auto") -> tuple[str, str]:
    """Where the KL counts, "loss" or "reward", and its estimate; "auto": the reward for rloo, k1 in rewards, k3 in the loss."""
    place = kl_in if kl_in != "auto" else "reward" if loss_type == "rloo" else "loss"
    return place, kl_estimator if kl_estimator != "auto" else "k1" if place == "reward" else "k3"


# -- the parts, in the order in which they are used ------------------------------------------------------------------------


def importance_ratio(logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor, level: str = "token") -> torch.Tensor:
    """π / π_old: of each token `[completions, longest]`, or of each completion `[completions, 1]`.

    "token": exp(log π - log π_old), 1 at masked tokens. "sequence": exp of the mean of these differences over a completion's
    tokens (GSPO, arXiv:2507.18071, equation 7). "product": exp of their sum, the ratio of the completion's probabilities.
    Above exp(20) it is cut, so that an advantage of 0 times infinity is not "not a number".
    """
    difference = (logps - old_logps) * mask
    if level == "product":
        difference = difference.sum(1, keepdim=True)
    elif level == "sequence":
        difference = difference.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    elif level != "token":
        raise ValueError(f"importance_sampling_level {level}: token or sequence")
    return difference.clamp(max=20.0).exp()


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, epsilon: float, epsilon_high: float, delta: float | None = None
) -> torch.Tensor:
    """- min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A): PPO, arXiv:1707.06347, equation 7.

    Clip-higher, an epsilon_high above epsilon: DAPO, arXiv:2503.14476, equation 10. With `delta` the first r is min(r, delta):
    the loss of a token with a negative advantage is bounded too (INTELLECT-2, arXiv:2505.07291).
    """
    clipped = ratio.clamp(1.0 - epsilon, 1.0 + epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.min(bounded * advantages, clipped * advantages)


def cispo_surrogate(logps: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, highest: float) -> torch.Tensor:
    """- stop_gradient(min(r, highest)) A log π: every token keeps a gradient, with a bounded weight.

    CISPO, arXiv:2506.13585, equations 4 and 5, whose upper bound 1 + ε_high is `highest` and which sets no lower one; as in
    ScaleRL, arXiv:2510.13786, and TRL, the bound is that of the ratio itself.
    """
    return -ratio.clamp(max=highest).detach() * advantages * logps


def kl_estimate(logps: torch.Tensor, reference_logps: torch.Tensor, estimator: str = "k3") -> torch.Tensor:
    """Estimates of KL(policy || reference) at each token, from samples of the policy (http://joschu.net/blog/kl-approx.html).

    With d = log π - log π_ref. k1: d, unbiased, of any sign. k2: d² / 2, of small bias; its gradient is that of the KL. k3:
    exp(-d) - 1 + d, unbiased and never negative. As a term of a loss k1 has a gradient whose mean is 0, unless it is multiplied
    by the ratio: take it in rewards.
    """
    difference = logps - reference_logps
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(f"kl_estimator {estimator}: k1, k2 or k3")


def token_weights(
    mask: torch.Tensor, totals: Mapping[str, float], loss_type: str, max_completion_length: int | None = None
) -> torch.Tensor:
    """What each token counts in the loss of the global batch, `[completions, longest]`: the table's last column.

    The weights of a global batch add up to 1, those of dr_grpo to the mean length over the longest one, those of reinforce to
    the mean length.
    """
    completions, tokens = totals["completions"] or 1.0, totals["completion_tokens"] or 1.0
    counts = mask.to(torch.float64)
    if loss_type in ("grpo", "gspo", "rloo"):
        weights = counts / (counts.sum(1, keepdim=True).clamp(min=1.0) * completions)
    elif loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("dr_grpo divides by max_completion_length")
        weights = counts / (completions * max_completion_length)
    elif loss_type == "reinforce":
        weights = counts / completions
    elif loss_type in LOSS_TYPES:
        weights = counts / tokens
    else:
        raise ValueError(f"loss_type {loss_type}: one of {', '.join(LOSS_TYPES)}")
    return weights


def _token_mean(values: torch.Tensor, mask: torch.Tensor, totals: Mapping[str, float]) -> torch.Tensor:
    return values.where(mask, 0.0).sum() / (totals["completion_tokens"] or 1.0)
