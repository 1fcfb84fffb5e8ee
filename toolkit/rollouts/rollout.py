"""The rollout: one completion of a prompt, sampled from a policy, and what it was worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

ENVIRONMENT = "environment"  # the name of the reward that an environment gives


@dataclass
class Rollout:
    """One completion of a prompt, sampled from a policy, and what it was worth.

    Rollouts of a step are a list of groups one behind the other: those of one prompt in one epoch, by their index.
    """

    prompt: int  # number of the prompt in the training data (its example)
    index: int  # in the group of the prompt's completions, from 0
    prompt_ids: list[int]
    completion_ids: list[int]  # its end-of-sequence token included, where it ended
    logps: list[float]  # of the completion's tokens, of the distribution that was sampled, nats
    truncated: bool  # cut at the longest completion length
    row: dict[str, Any]  # the prompt's columns: "prompt" as given (text, or a list of messages), and all others (answer, ...)
    completion: str  # its text, special tokens left out
    rewards: dict[str, float | None] = field(default_factory=dict)  # of each reward by its name; None: it does not apply
    reward: float = 0.0  # the weighted sum; not a number where none of them applies
    epoch: int = 0  # of the prompt
    kept: list[list[int]] | None = None  # ids that could be drawn at each token, where top-k, top-p or min-p cut some off
    old_logps: list[float] | None = None  # of its tokens under the trained model before the first update, where requested
    reference_logps: list[float] | None = None  # and under the reference
    sampler_weights: list[float] | None = None  # of its tokens in the loss, where another program sampled them
    old_values: list[float] | None = None  # of the states before its tokens, before the first update
    returns: list[float] | None = None  # that these values learn
    written: list[bool] | None = None  # whether the policy wrote a token, or its environment; None: all of them
    messages: list[dict[str, Any]] | None = None  # of a conversation with an environment, behind the prompt


def groups_of(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """The places of each group's rollouts, which are next to each other."""
    groups: list[list[int]] = []
    for place, rollout in enumerate(rollouts):
        if place == 0 or rollout.prompt != rollouts[place - 1].prompt or rollout.index <= rollouts[place - 1].index:
            groups.append([])
        groups[-1].append(place)
    return groups
