"""What is added to rewards: a penalty for completions that grow too long, and one for leaving the reference model."""

import torch

from toolkit.losses.policy import kl_estimate


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
