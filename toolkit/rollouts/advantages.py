"""From rewards to advantages: what a completion's reward is worth once it is shaped and compared with the others.

Rewards are a table `[groups, completions of a prompt]`, whole: those of all ranks, since a mean or a standard deviation over a
part of them would be another one. A completion that no reward function applies to has the reward "not a number". It enters no
mean, no standard deviation and no count, and its advantage is 0, as TRL has it: it moves nothing. It stays a completion of the
loss's totals unless its tokens are masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from toolkit.losses.policy import kl_estimate
from toolkit.losses.value import gae, token_rewards, whiten
from toolkit.rollouts.batches import counted_tokens, token_table
from toolkit.rollouts.rollout import Rollout, groups_of

STD_EPS = 1e-4  # TRL's, added to a standard deviation before dividing by it
ESTIMATORS = ("group", "rloo", "reinforce")
SCALES = ("group", "batch", "none")

# What belongs to a loss by its paper: (estimator, scale_rewards). All others: ("group", "group").
OF_LOSS = {"dr_grpo": ("group", "none"), "rloo": ("rloo", "none"), "reinforce": ("reinforce", "none")}


def reward_table(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """The rewards of a step's rollouts, which come group by group, `[groups, G]`, float64; not a number where none applied."""
    longest = max(rollout.index for rollout in rollouts) + 1
    unscored = [bool(each.rewards) and all(value is None for value in each.rewards.values()) for each in rollouts]
    values = [math.nan if missing else each.reward for each, missing in zip(rollouts, unscored, strict=True)]
    return torch.tensor(values, dtype=torch.float64).view(-1, longest)


def choose_advantages(loss_type: str, estimator: str = "auto", scale_rewards: str = "auto") -> tuple[str, str]:
    """`estimator` and `scale_rewards`, "auto" replaced by what belongs to the loss; only the mean of a group is scaled then."""
    usual, scale = OF_LOSS.get(loss_type, ("group", "group"))
    if estimator not in ("auto", usual):
        usual, scale = estimator, scale if estimator == "group" else "none"
    return usual, scale if scale_rewards == "auto" else scale_rewards


def advantages(
    rewards: torch.Tensor, *, estimator: str = "group", scale_rewards: str = "group", normalize_advantages: bool = False
) -> torch.Tensor:
    """Reward minus baseline, `[groups, G]`, scaled; 0 in groups whose rewards are all equal.

    | | estimator | scale_rewards | normalize_advantages |
    | --- | --- | --- | --- |
    | GRPO, arXiv:2402.03300, section 4.1.2 | group | group | no |
    | Lite PPO, arXiv:2508.08221 | group | batch | no |
    | Dr. GRPO, arXiv:2503.20783 | group | none | no |
    | RLOO, arXiv:2402.14740, "REINFORCE Leave-One-Out" | rloo | none | no; TRL offers it |
    | REINFORCE with the batch's mean as baseline | reinforce | none | no |
    | REINFORCE++, arXiv:2501.03262 (with its KL in the rewards) | reinforce | none | yes |
    | REINFORCE++ with baseline, the same | group | none | yes |

    Args:
        estimator: the baseline. "group": the mean of the group. "rloo": the mean of the others of the group. "reinforce": the
            mean of all.
        scale_rewards: divides by the standard deviation (unbiased) plus 1e-4, of the group's rewards, of all rewards, or not.
        normalize_advantages: then subtract the mean of all advantages and divide by their standard deviation plus 1e-4.
    """
    if estimator not in ESTIMATORS or scale_rewards not in SCALES:
        raise ValueError(f"estimator {estimator}: {', '.join(ESTIMATORS)}; scale_rewards {scale_rewards}: {', '.join(SCALES)}")
    if estimator == "reinforce" and scale_rewards == "group":
        raise ValueError("reinforce is not scaled by group: the advantages of one without spread would be multiplied by 10,000")
    scored = ~rewards.isnan()
    # measured from the first reward of a group, or of all, so that equal rewards give exactly 0
    rows = rewards.double() if estimator != "reinforce" else rewards.double().view(1, -1)
    values = (rows - _first(rows)).view_as(rewards)
    count = scored.sum(1, keepdim=True)
    if estimator == "group":
        found = values - values.nanmean(1, keepdim=True)
    elif estimator == "rloo":
        others = (values.nansum(1, keepdim=True) - values) / (count - 1)
        found = (values - others).where(count > 1, torch.nan)
    else:
        found = values - values.nanmean()
    if scale_rewards == "group":
        found = found / (standard_deviation(values, 1) + STD_EPS)
    elif scale_rewards == "batch":
        found = found / (standard_deviation(rewards.double()) + STD_EPS)
    if normalize_advantages:
        found = (found - found.nanmean()) / (standard_deviation(found) + STD_EPS)
    return found.nan_to_num(nan=0.0).to(rewards.dtype)


def group_has_spread(rewards: torch.Tensor) -> torch.Tensor:
    """Whether a group has two rewards that differ, `[groups]`; without, a baseline of the group leaves no gradient.

    Rewards that are not a number count for nothing. Dynamic sampling replaces groups without spread (DAPO, arXiv:2503.14476,
    equation 11).
    """
    scored = ~rewards.isnan()
    highest, lowest = rewards.where(scored, -torch.inf).amax(1), rewards.where(scored, torch.inf).amin(1)
    return highest > lowest


def _first(values: torch.Tensor) -> torch.Tensor:
    """Of each row the first number, `[rows, 1]`; not a number where there is none."""
    return values.gather(1, (~values.isnan()).to(torch.uint8).argmax(1, keepdim=True))


def standard_deviation(values: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Unbiased standard deviation of what is a number, 0 of fewer than two of them."""
    dims = tuple(range(values.dim())) if dim is None else (dim,)
    count = (~values.isnan()).sum(dims, keepdim=True)
    squares = (values - values.nanmean(dims, keepdim=True)).square().nansum(dims, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def overlong_penalty(lengths: torch.Tensor, max_completion_length: int, cache: int) -> torch.Tensor:
    """DAPO's soft punishment of long completions, from 0 to -1, `[completions]` (arXiv:2503.14476, equation 13).

    0 up to max_completion_length - cache tokens, from there down to -1 in a line at max_completion_length, -1 above. Add it
    to the rewards.
    """
    if not 0 < cache <= max_completion_length:
        raise ValueError(f"cache {cache}: must be above 0 and at most the longest completion, {max_completion_length}")
    start = max_completion_length - cache
    return ((start - lengths.to(torch.get_default_dtype())) / cache).clamp(-1.0, 0.0)


def shaped_rewards(
    rollouts: Sequence[Rollout], *, max_completion_length: int = 0, overlong_cache: int = 0, beta: float = 0.0,
    kl_estimator: str = "k1", missing_eos_penalty: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """The rewards of a step `[groups, completions of a prompt]`, float64, with the requested penalties.

    `overlong_cache`: tokens of `overlong_penalty`; `beta`: weight of the sum of `kl_estimate` over a completion's tokens, from
    `logps` and `reference_logps` (RLOO, arXiv:2402.14740, with k1);
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


def prompts_to_add(rollouts: Sequence[Rollout], num_prompts: int, most: int) -> int:
    """How many further prompts a step should sample, 0 where it has enough groups with spread or may not sample more.

    Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): groups whose rewards are all equal teach nothing, so the next
    prompts in the order of the training take their places. Which those are follows from the rewards alone: a resumed step
    samples the same again, and two ranks the same as one. As many as fill the step at the share of groups with spread so far,
    and at most `num_prompts` at once.

    Args:
        rollouts: all of the step so far, scored.
        num_prompts: groups that the step learns from.
        most: prompts that the step may sample in all.
    """
    spread = group_has_spread(reward_table(rollouts))
    missing, sampled = num_prompts - int(spread.sum()), len(spread)
    if missing <= 0:
        return 0
    wanted = math.ceil(missing * sampled / max(int(spread.sum()), 1))
    return max(0, min(wanted, num_prompts, most - sampled))


def groups_with_spread(rollouts: Sequence[Rollout], num_prompts: int) -> list[Rollout]:
    """The rollouts of the first `num_prompts` groups with spread, in their order; the first others fill what is missing."""
    groups = groups_of(rollouts)
    spread = group_has_spread(reward_table(rollouts)).tolist()
    first = sorted(range(len(groups)), key=lambda number: not spread[number])[:num_prompts]
    return [rollouts[place] for number in sorted(first) for place in groups[number]]


def token_advantages(
    rollouts: Sequence[Rollout], *, beta: float = 0.0, kl_estimator: str = "k1", gamma: float = 1.0, lam: float = 0.95,
    whiten_rewards: bool = False, missing_eos_penalty: float = 0.0, mask_truncated_completions: bool = False,
) -> tuple[list[Rollout], torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """PPO's: the rollouts with their `returns`, the advantages of their tokens, and metrics: of all of a step, in float64.

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
    estimated, returns = gae(rewards, values, written, gamma, lam)
    known = counts.bool()
    metrics = {"explained_variance": 1 - (returns - values)[known].var(correction=0) / returns[known].var(correction=0)}
    if beta:
        metrics["kl"] = kl_estimate(logps, reference, kl_estimator)[known].mean()
    learned = [row[: len(each.completion_ids)].tolist() for each, row in zip(rollouts, returns, strict=True)]
    targets = [replace(each, returns=row) for each, row in zip(rollouts, learned, strict=True)]
    return targets, whiten(estimated, counts), metrics
