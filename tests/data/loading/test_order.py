"""The order of examples: a pure function of (size, seed, epoch), cut into steps alike for every world size."""

import numpy as np
import pytest
import torch

from toolkit.data.loading.order import cut_step, epoch_order, hash_numbers, plan_steps, seed_micro_batch


def steps_of_all_ranks(world_size: int, micro: int, **kwargs: int) -> list[list[int]]:
    """The examples that count in each step, over all ranks, put back into the order of the global batch."""
    per_rank = [list(plan_steps(micro_batch_size=micro, data_rank=r, num_data_ranks=world_size, **kwargs)) for r in range(world_size)]
    steps = []
    for plans in zip(*per_rank, strict=True):
        assert len({len(plan.pieces) for plan in plans}) == 1  # the same number of forward passes on every rank
        dealt = [plan.pieces[slot] for slot in range(len(plans[0].pieces)) for plan in plans]
        steps.append([example for piece, real in dealt if real for _, example in piece])
        assert all(plan.everyone == steps[-1] for plan in plans)
    return steps


def test_an_epoch_visits_every_example_once_and_differs_from_the_next() -> None:
    """Fails when: epoch_order leaves out `epoch` from its key."""
    orders = [epoch_order(1000, 7, epoch) for epoch in range(3)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(1000))
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(epoch_order(1000, 8, 0), orders[0])


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    """A fixed value: changing the order is changing everybody's runs. Fails when: any constant of the hash changes."""
    assert epoch_order(10, 42, 0).tolist() == [8, 7, 1, 4, 9, 5, 0, 2, 6, 3]
    assert hash_numbers(42, 0) == 8278042634035044771


@pytest.mark.parametrize(("world_size", "micro"), [(1, 8), (1, 1), (2, 4), (2, 3), (4, 2), (3, 5)])
def test_every_split_of_the_global_batch_has_the_same_examples_in_the_same_steps(world_size: int, micro: int) -> None:
    """A short last batch and steps across the end of an epoch included. Fails when: ranks take `examples[rank::world]`."""
    settings = {"num_examples": 21, "examples_to_consume": 50, "seed": 3, "position": 0, "global_batch_size": 8}
    plain = [i for epoch in range(3) for i in epoch_order(21, 3, epoch)][:50]
    expected = [plain[i : i + 8] for i in range(0, 50, 8)]
    assert steps_of_all_ranks(world_size, micro, **settings) == expected


def test_a_run_continued_at_any_position_sees_what_it_would_have_seen() -> None:
    """Also with another global batch size from there on: none twice, none missed.

    Fails when: the order of an epoch depends on the epoch in which a run begins.
    """
    settings = {"num_examples": 21, "examples_to_consume": 63, "seed": 3}
    whole = [i for step in steps_of_all_ranks(1, 4, position=0, global_batch_size=8, **settings) for i in step]
    rest = [i for step in steps_of_all_ranks(2, 4, position=24, global_batch_size=5, **settings) for i in step]
    assert whole[24:] == rest


def test_grouping_by_length_keeps_the_epoch_whole_and_does_not_depend_on_batch_sizes() -> None:
    """Fails when: a window is dropped, or lengths are not sorted in it."""
    lengths = np.random.default_rng(0).integers(1, 500, size=3000)
    order = epoch_order(3000, 1, 0, lengths)
    assert sorted(order.tolist()) == list(range(3000))
    spread = [np.ptp(lengths[order[i : i + 32]]) for i in range(0, 1024, 32)]
    plain = epoch_order(3000, 1, 0)
    assert np.mean(spread) < 0.1 * np.mean([np.ptp(lengths[plain[i : i + 32]]) for i in range(0, 1024, 32)])


def test_a_filler_is_a_real_example_that_does_not_count() -> None:
    """Fails when: it has no example."""
    plans = [cut_step([(0, 5), (0, 9), (0, 1)], 0, 2, rank, 3) for rank in range(3)]
    assert [plan.pieces for plan in plans] == [[([(0, 5), (0, 9)], True)], [([(0, 1)], True)], [([(0, 5)], False)]]


def test_random_numbers_of_a_micro_batch_depend_on_its_seed_alone() -> None:
    """Fails when: a generator is left out of seed_micro_batch."""
    import random

    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    seed_micro_batch(hash_numbers(1, 2, 3))
    first = draw()
    draw()
    seed_micro_batch(hash_numbers(1, 2, 3))
    assert draw() == first
