"""Metrics of several steps in one logging event."""

from types import SimpleNamespace
from typing import Any

import torch

from toolkit.data.loading.batch import Batch
from toolkit.tracking.step_metrics import Window


def test_an_event_has_means_over_its_steps_and_maxima_of_what_is_one() -> None:
    """Steps that were not finite count for neither. Fails when: a metric named _max is averaged, or the skipped step's is the largest."""
    window = Window()
    for number, (ratio, largest, skipped) in enumerate([(1.0, 3.0, 0.0), (2.0, 5.0, 0.0), (9.0, 99.0, 1.0), (3.0, 4.0, 0.0)]):
        values = {"ratio": ratio, "ratio_max": largest, "nonfinite": skipped}
        window.add(number, Batch([], {"examples": 2.0}, []), {name: torch.tensor(value) for name, value in values.items()})
    window.read()
    window.seconds = 1.0
    optimizer: Any = SimpleNamespace(param_groups=[{"lr": 0.1}])
    nothing: Any = SimpleNamespace(device=torch.device("cpu"))
    event = window.event(optimizer, nothing, nothing)
    assert event["ratio"] == 2.0
    assert event["ratio_max"] == 5.0
    assert event["nonfinite_steps"] == 1
