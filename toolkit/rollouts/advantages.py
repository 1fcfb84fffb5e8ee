"""Advantages: what a completion's reward says once it is compared with the others.

Rewards are a table `[groups, completions of a prompt]`, whole: those of all ranks, since a mean or a standard deviation over a
part of them would be another one. A completion that no reward function applies to has the reward "not a number". It enters no
mean, no standard deviation and no count, and its advantage is 0, as TRL has it: it moves nothing. It stays a completion of the
loss's totals unless its tokens are masked.
"""

import math
from collections.abc import Sequence

import torch

from toolkit.rollouts.rollout import Rollout

STD_EPS = 1e-4  # TRL's, added to a standard deviation before dividing by it
ESTIMATORS = ("group", "rloo", "reinforce")
SCALES = ("group", "batch", "none")

# What belongs to a loss whose paper says it: (estimator, scale_rewards). All others: ("group", "group").
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
    """Reward minus baseline, `[groups, G]`, scaled; 0 in groups that cannot say anything.

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
