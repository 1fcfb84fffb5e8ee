"""Rollouts that no model has sampled, for tests of what they are worth."""

from collections.abc import Sequence
from typing import Any

from toolkit.rollouts.rollout import Rollout


def rollouts_of(groups: Sequence[tuple[dict[str, Any], Sequence[str]]]) -> list[Rollout]:
    """A group for each row and its completions; a completion's tokens are its characters."""
    return [
        Rollout(number, index, [1, 2], [ord(sign) for sign in text], [-1.0] * len(text), False, {"origin": f"made.jsonl:{number + 1}", **row}, text)
        for number, (row, completions) in enumerate(groups)
        for index, text in enumerate(completions)
    ]
