"""What the rollouts of a step are like: their metrics, and the completions to look at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from toolkit.rollouts.advantages import group_has_spread, reward_table, standard_deviation
from toolkit.rollouts.rollout import Rollout, groups_of


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, torch.Tensor]:
    """What the rollouts of a step are like, 0-d each.

    `reward`, the mean weighted sum, and `reward_std`, the mean of the groups' standard deviations (of all rewards where a group
    is one completion); `reward_<name>`, the mean of a reward over the completions that it applies to (not a number where there
    is none); `groups_without_spread`, the share of groups whose rewards are equal, of groups that are several;
    `completion_length`, tokens, mean; `truncated`, the share without an end.
    """
    table = reward_table(rollouts)
    several = table.shape[1] > 1
    found = {
        "reward": table.nanmean(),
        "reward_std": standard_deviation(table, 1 if several else None).mean(),
        **({"groups_without_spread": (~group_has_spread(table)).double().mean()} if several else {}),
        "completion_length": torch.tensor([float(len(rollout.completion_ids)) for rollout in rollouts]).mean(),
        "truncated": torch.tensor([float(rollout.truncated) for rollout in rollouts]).mean(),
    }
    for name in rollouts[0].rewards:
        values = [rollout.rewards[name] for rollout in rollouts]
        known = [value for value in values if value is not None]
        found[f"reward_{name}"] = torch.tensor(sum(known) / len(known) if known else float("nan"))
    return found


def best_and_worst(rollouts: Sequence[Rollout], count: int) -> list[dict[str, str]]:
    """Of the first `count` groups the completions with the highest and the lowest reward, as `Run.add_samples` takes them."""
    samples = []
    for group in groups_of(rollouts)[:count]:
        scored = [rollouts[place] for place in group if not math.isnan(rollouts[place].reward)]
        ordered = sorted(scored, key=lambda rollout: rollout.reward, reverse=True)
        for each in (ordered[0], ordered[-1])[: len(ordered)]:
            prompt = each.row.get("prompt", "")
            asked = prompt if isinstance(prompt, str) else "\n".join(turns_of(prompt))
            text = each.completion if each.messages is None else "\n".join(turns_of(each.messages))
            samples.append({"prompt": asked, "text": text, "score": f"reward {each.reward:g}"})
    return samples


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each turn of a conversation as text, behind its role."""
    return [f"{turn['role']}: {turn.get('content') or ''}" for turn in messages]
