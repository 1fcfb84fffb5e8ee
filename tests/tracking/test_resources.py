"""Time that waits for data and memory that only grows: said once, and only where it is so."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.tracking.resources import ResourceWatch, memory_in_use


def watched(memory: Any, steps: int = 3000, seconds: float = 0.1, data_wait: float = 0.0) -> list[str]:
    watch, found = ResourceWatch(), []
    for step in range(10, steps + 1, 10):
        found += watch.after_event(step, seconds, data_wait, {"this process": memory(step)})
    return found


def noise(step: int) -> float:
    return 0.1 * float(np.random.default_rng(step).random())


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("level, with noise", lambda step: 2 + noise(step)),
        ("more while it evaluates", lambda step: 2 + noise(step) + (3 if step % 500 == 0 else 0)),
        ("a cache that fills", lambda step: 2 + min(step / 1000, 0.6)),
        ("a little more", lambda step: 2 + step / 30_000),
        ("much at once", lambda step: 2 + 3 * (step > 900)),
        ("ever less", lambda step: 2 + step / (step + 300)),
    ],
)
def test_memory_that_levels_off_is_not_called_a_leak(name: str, memory: Any) -> None:
    """Fails when: the largest of a block is compared, or a single rise is enough (`is_steady = True`)."""
    assert watched(memory, steps=5000) == []


@pytest.mark.parametrize(("per_step", "steps"), [(1e-3, 2000), (1e-4, 20_000)])
def test_memory_that_grows_in_each_step_is_said_once(per_step: float, steps: int) -> None:
    """A slow leak too, in a run long enough. Fails when: blocks are dropped and not merged, so that the beginning is forgotten."""
    (warning,) = watched(lambda step: 2 + per_step * step + noise(step) / 10, steps)
    assert re.search(r"memory .*grows: 2\.[01]", warning)


@pytest.mark.parametrize(("data_wait", "seconds", "said"), [(0.3, 0.1, 1), (0.1, 0.1, 0), (0.3, 0.01, 0)])
def test_waiting_for_data_is_said_once_where_it_is_a_fifth_of_the_time(data_wait: float, seconds: float, said: int) -> None:
    """Not of a run of a few seconds. Fails when: the bound is not looked at, or the warning is not remembered."""
    warnings = watched(lambda step: 2, seconds=seconds, data_wait=data_wait)
    assert len(warnings) == said
    assert all("30% of the time" in warning and "--dataloader-num-workers" in warning for warning in warnings)


def test_memory_in_use_is_that_of_this_process() -> None:
    """Within 20 % of a tensor that is made and held. Fails when: the unit is another, or pages that are shared count."""
    before = memory_in_use(torch.device("cpu"))["this process"]
    held = torch.ones(100_000_000)
    assert memory_in_use(torch.device("cpu"))["this process"] - before == pytest.approx(0.4, rel=0.2)
    assert held.sum() > 0
