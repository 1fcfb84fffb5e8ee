"""How far a server's log-probabilities are from those of the trained model, and the weights that correct for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from toolkit.config import Refusal
from toolkit.losses.off_policy import sampler_weights
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
        mode, clip_max, clip_min: as `toolkit.losses.off_policy.sampler_weights` says.

    Metrics, over the tokens of the step: those of `sampler_weights`, and of the ratio before it is truncated, trained model to
    server, `sampler_ratio`, its mean, `sampler_ratio_outside`, the share outside of [0.9, 1.1], and `sampler_effective`, the
    effective sample size as a share, (sum of ratios)² / (tokens * sum of squares).

    Raises:
        Refusal: the mean difference is above the server's `max_gap`: it has other weights, or says what it did not draw from.
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
        f"policy {server.served}), or it says other log-probabilities than it draws from: start vLLM with --logprobs-mode "
        "processed_logprobs where --temperature is not 1."
    )
