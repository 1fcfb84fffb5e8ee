"""Groups without spread are replaced by those of the next prompts, and nothing else changes."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.rollouts.rollouts_of import rollouts_of
from toolkit.rollouts.advantages import groups_with_spread, prompts_to_add
from toolkit.rollouts.ledger import Phase
from toolkit.rollouts.overview import rollout_metrics
from toolkit.rollouts.rollout import Rollout


def scored(*rewards: tuple[float, float]) -> list[Rollout]:
    made = rollouts_of([({}, ("a", "b"))] * len(rewards))
    return [replace(each, reward=reward) for each, reward in zip(made, [value for pair in rewards for value in pair], strict=True)]


EQUAL, SPREAD = (1.0, 1.0), (0.0, 1.0)


@pytest.mark.parametrize(("groups", "num_prompts", "most", "expected"), [
    ([SPREAD, SPREAD], 2, 8, 0),
    ([SPREAD, EQUAL], 2, 8, 2),  # one is missing, and half of them have spread
    ([EQUAL, EQUAL], 2, 8, 2),  # no more than a step's prompts at once
    ([SPREAD, EQUAL], 2, 3, 1),  # no more than it may sample
    ([SPREAD, EQUAL], 2, 2, 0),
    ([SPREAD, EQUAL, (float("nan"), 1.0)], 2, 8, 2),  # one reward has no spread
])  # fmt: skip
def test_a_step_asks_for_as_many_prompts_as_it_lacks(groups: list[tuple[float, float]], num_prompts: int, most: int, expected: int) -> None:
    """Fails when: the share of groups with spread is left out, or `most` bounds what is missing."""
    assert prompts_to_add(scored(*groups), num_prompts, most) == expected


def test_the_first_groups_with_spread_are_kept_in_their_order_and_others_fill_up() -> None:
    """Fails when: groups that fill up come behind those with spread, or the last ones are taken."""
    rollouts = scored(EQUAL, SPREAD, EQUAL, SPREAD, SPREAD)
    assert [each.prompt for each in groups_with_spread(rollouts, 2)] == [1, 1, 3, 3]
    assert [each.prompt for each in groups_with_spread(rollouts, 4)] == [0, 0, 1, 1, 3, 3, 4, 4]
    assert groups_with_spread(rollouts, 5) == rollouts


def test_tokens_learned_per_second_are_those_of_the_groups_that_are_kept() -> None:
    """Fails when: those of the groups that were replaced count."""
    rollouts = scored(EQUAL, SPREAD, EQUAL, SPREAD)
    kept = groups_with_spread(rollouts, 2)
    phase = Phase(Path(), 1, {}, began=0.0, sampling=1.0, saved=1.0)
    for learned, tokens in ((None, rollouts), (kept, kept)):
        found = rollout_metrics(rollouts, phase, learned)
        expected = sum(len(each.completion_ids) for each in tokens)
        assert float(found["learned_tokens_per_second"] * found["learning_seconds"]) == pytest.approx(expected)
