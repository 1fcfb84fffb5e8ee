"""Correcting for another sampler: weights of tokens whose log-probabilities the sampler and the trained model disagree on.

A server that samples in other kernels or another precision draws from a distribution that is not quite the policy's. Its tokens
are weighted by the ratio of both, truncated, because a few ratios are enormous.
"""

from collections.abc import Mapping

import torch

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def sampler_weights(
    old_logps: torch.Tensor,
    sampler_logps: torch.Tensor,
    mask: torch.Tensor,
    totals: Mapping[str, float],
    *,
    mode: str = "token_truncate",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weights π_old / π_sampler for the losses of tokens, without a gradient, and how far both are apart.

    Truncated importance sampling (Ionides 2008; of another engine's samples: https://fengyao.notion.site/off-policy-rl). Modes
    have TRL's names. `*_truncate`: min(max(w, clip_min), clip_max). `*_mask`: 0 outside of [clip_min, clip_max]. `token_*`: w
    of each token; `sequence_*`: the product over a completion's tokens, for all of them.

    Args:
        old_logps: of the model that is trained, before the first update, of the distribution that was sampled,
            `[completions, longest]`, nats.
        sampler_logps: what the sampler reported; not a number where it reported nothing: as old_logps.
        mask, totals: as `policy_loss` takes them.

    Returns weights, `[completions, longest]` or `[completions, 1]`, and parts of means over the tokens of the global batch:
    `sampler_logp_gap`, |log π_old - log π_sampler|, nats (`_max`: the largest); `sampler_weight`, as used;
    `sampler_weight_clipped`, the share of tokens whose weight was truncated or masked.
    """
    if mode not in MODES:
        raise ValueError(f"importance_sampling_mode {mode}: one of {', '.join(MODES)}")
    counts, tokens = mask.bool(), totals["completion_tokens"] or 1.0
    difference = (old_logps - sampler_logps).detach().where(counts, 0.0).nan_to_num(nan=0.0)
    total = difference.sum(1, keepdim=True) if mode.startswith("sequence") else difference
    exact = total.clamp(max=20.0).exp()
    weights = exact.clamp(min=clip_min or 0.0, max=clip_max)
    outside = weights != exact
    if mode.endswith("mask"):
        weights = exact.masked_fill(outside, 0.0)
    metrics = {
        "sampler_logp_gap": difference.abs().sum() / tokens,
        "sampler_logp_gap_max": difference.abs().max(),
        "sampler_weight": (weights * counts).sum() / tokens,
        "sampler_weight_clipped": (outside & counts).sum() / tokens,
    }
    return weights, metrics
