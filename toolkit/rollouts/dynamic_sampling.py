"""Dynamic sampling: groups whose rewards are all equal teach nothing, so further prompts take their places.

Of DAPO, arXiv:2503.14476, section 3.2. Which prompts those are follows from the rewards alone: the next ones in the order of
the training. So a resumed step asks for the same again, and two ranks for the same as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from toolkit.rollouts.advantages import group_has_spread, reward_table
from toolkit.rollouts.rollout import Rollout, groups_of


def prompts_to_add(rollouts: Sequence[Rollout], num_prompts: int, most: int) -> int:
    """How many further prompts a step should sample, 0 where it has enough groups with spread or may not sample more.

    As many as fill the step at the share of groups with spread so far, and at most `num_prompts` at once.

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
