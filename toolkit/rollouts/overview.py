"""What the rollouts of a step are like: their metrics, and the completions to look at."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from toolkit.rollouts.advantages import group_has_spread, reward_table, standard_deviation
from toolkit.rollouts.rollout import Rollout, groups_of

if TYPE_CHECKING:
    from toolkit.rollouts.ledger import Phase


def rollout_metrics(
    rollouts: Sequence[Rollout], phase: Phase | None = None, learned: Sequence[Rollout] | None = None
) -> dict[str, torch.Tensor]:
    """What the rollouts of a step are like, 0-d each.

    `reward`, the mean weighted sum, and `reward_std`, the mean of the groups' standard deviations (of all rewards where a group
    is one completion); `reward_<name>`, the mean of a reward over the completions that it applies to (not a number where there
    is none), and `reward_<name>_std`, their standard deviation; `groups_without_spread`, the share of groups whose rewards are
    equal, of groups that are several; `completion_length`, tokens, mean, and `completion_length_min` and `_max`, those of the
    shortest and the longest; `truncated`, the share without an end.

    With `phase`, in which they were sampled and saved, called when all updates are done: `sampling_seconds`, `scoring_seconds`
    (rewards, and writing the ledger), `learning_seconds`; tokens of completions over the first, `sampled_tokens_per_second`
    (not a number where all were in the ledger), and over the last, `learned_tokens_per_second`: there of those `learned` from,
    where these are not all.
    """
    table = reward_table(rollouts)
    several = table.shape[1] > 1
    lengths = torch.tensor([float(len(rollout.completion_ids)) for rollout in rollouts])
    found = {
        "reward": table.nanmean(),
        "reward_std": standard_deviation(table, 1 if several else None).mean(),
        **({"groups_without_spread": (~group_has_spread(table)).double().mean()} if several else {}),
        "completion_length": lengths.mean(), "completion_length_min": lengths.min(), "completion_length_max": lengths.max(),
        "truncated": torch.tensor([float(rollout.truncated) for rollout in rollouts]).mean(),
    }
    for name in rollouts[0].rewards:
        column = [rollout.rewards[name] for rollout in rollouts]
        values = torch.tensor([math.nan if value is None else value for value in column], dtype=torch.float64)
        found[f"reward_{name}"], found[f"reward_{name}_std"] = values.nanmean(), standard_deviation(values)[0]
    return found | (_times(rollouts if learned is None else learned, phase) if phase else {})


def _times(learned: Sequence[Rollout], phase: Phase) -> dict[str, torch.Tensor]:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # else what is still queued would count as the next step's sampling
    learning, tokens = time.monotonic() - phase.saved, sum(len(rollout.completion_ids) for rollout in learned)
    found = {
        "sampling_seconds": phase.sampling, "scoring_seconds": phase.saved - phase.began - phase.sampling,
        "learning_seconds": learning, "sampled_tokens_per_second": phase.fresh / phase.sampling if phase.fresh else math.nan,
        "learned_tokens_per_second": tokens / learning,
    }  # fmt: skip
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


def best_and_worst(rollouts: Sequence[Rollout], count: int) -> list[dict[str, str]]:
    """Of the first `count` groups the completions with the highest and the lowest reward, as `Run.add_samples` takes them."""
    samples = []
    for group in groups_of(rollouts)[:count]:
        scored = [rollouts[place] for place in group if not math.isnan(rollouts[place].reward)]
        ordered = sorted(scored, key=lambda rollout: rollout.reward, reverse=True)
        for each in ordered[:1] + ordered[1:][-1:]:
            prompt = each.row.get("prompt", "")
            asked = prompt if isinstance(prompt, str) else "\n".join(turns_of(prompt))
            text = each.completion if each.messages is None else "\n".join(turns_of(each.messages))
            samples.append({"prompt": asked, "text": text, "score": f"reward {each.reward:g}"})
    return samples


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each turn of a conversation as text, behind its role."""
    return [f"{turn['role']}: {turn.get('content') or ''}" for turn in messages]
