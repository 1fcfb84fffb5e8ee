"""How far a server's log-probabilities are from those of the trained model, and the weights that correct for it.

A server that samples in other kernels or another precision draws from a distribution that is not quite the policy's. Its tokens
are weighted by the ratio of both, truncated, because a few ratios are enormous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from toolkit.config import Refusal
from toolkit.rollouts.batches import token_table
from toolkit.rollouts.rollout import Rollout
from toolkit.rollouts.server import RolloutServer


def correct_for_server(
    server: RolloutServer | None, rollouts: Sequence[Rollout], *, correction: bool = True, mode: str = "token_truncate",
    clip_max: float | None = 3.0, clip_min: float | None = None,
) -> tuple[list[Rollout], dict[str, torch.Tensor]]:  # fmt: skip
    """The rollouts with their `sampler_weights`, and metrics of the difference; as they are, and none, without a server.

    Args:
        rollouts: of the step, with `old_logps`, the same tokens' log-probabilities by the trained model.
        correction: False: only measure.
        mode, clip_max, clip_min: as `sampler_weights` has them.

    Metrics, over the tokens of the step: those of `sampler_weights`, and of the ratio before it is truncated, trained model to
    server, `sampler_ratio`, its mean, `sampler_ratio_outside`, the share outside of [0.9, 1.1], and `sampler_effective`, the
    effective sample size as a share, (sum of ratios)² / (tokens * sum of squares).

    Raises:
        Refusal: the mean difference is above the server's `max_gap`: it has other weights, or returns others than it drew from.
    """
    if server is None or not rollouts:
        return list(rollouts), {}
    width = max(len(each.completion_ids) for each in rollouts)
    ours = token_table([each.old_logps for each in rollouts], width, torch.float64)
    theirs = token_table([each.logps for each in rollouts], width, torch.float64)
    mask = token_table([[1.0] * len(each.completion_ids) for each in rollouts], width, torch.float64)
    totals = {"completion_tokens": float(mask.sum())}
    weights, metrics = sampler_weights(ours, theirs, mask, totals, mode=mode, clip_max=clip_max, clip_min=clip_min)
    gap = float(metrics["sampler_logp_gap"])
    if not gap <= server.max_gap:
        raise Refusal(_too_far(server, gap, float(metrics["sampler_logp_gap_max"])))
    ratios = (ours - theirs)[mask.bool()].clamp(max=20.0).exp()
    metrics |= {
        "sampler_ratio": ratios.mean(),
        "sampler_ratio_outside": ((ratios < 0.9) | (ratios > 1.1)).double().mean(),
        "sampler_effective": ratios.sum().square() / (len(ratios) * ratios.square().sum()),
    }
    if not correction:
        return list(rollouts), metrics
    rows = weights.expand_as(mask).tolist()
    corrected = [
        replace(each, sampler_weights=row[: len(each.completion_ids)]) for each, row in zip(rollouts, rows, strict=True)
    ]
    return corrected, metrics


def _too_far(server: RolloutServer, gap: float, largest: float) -> str:
    reason = "it did not load the weights of this step"
    if server.steps <= 1:
        reason = "it serves another model, or loads weights from elsewhere"
    return (
        f"--rollout-server {server.client.url}: its log-probabilities are {gap:.3g} nats from those of the trained model in "
        f"the mean ({largest:.3g} at most), above --rollout-server-max-gap {server.max_gap:g}: {reason} ({server.directory}, "
        f"policy {server.served}), or it returns other log-probabilities than it draws from: start vLLM with --logprobs-mode "
        "processed_logprobs where --temperature is not 1."
    )


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
