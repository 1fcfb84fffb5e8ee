"""Metrics of several steps in one logging event."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.data.loading.batch import Batch
from toolkit.tracking import step_metrics
from toolkit.tracking.step_metrics import Window


def test_an_event_has_means_over_its_steps_and_maxima_of_what_is_one() -> None:
    """Steps that were not finite count for neither. Fails when: a metric named _max is averaged, or the skipped step's is the largest."""
    window = Window()
    for number, (ratio, largest, skipped) in enumerate([(1.0, 3.0, 0.0), (2.0, 5.0, 0.0), (9.0, 99.0, 1.0), (3.0, 4.0, 0.0)]):
        values = {"loss": 1.0, "grad_norm": 1.0, "ratio": ratio, "ratio_max": largest, "ratio_min": -largest, "nonfinite": skipped}
        window.add(number, Batch([], {"examples": 2.0}, []), {name: torch.tensor(value) for name, value in values.items()})
    window.read()
    window.seconds = 1.0
    optimizer: Any = SimpleNamespace(param_groups=[{"lr": 0.1}])
    nothing: Any = SimpleNamespace(device=torch.device("cpu"))
    event = window.event(optimizer, nothing, nothing)
    assert event["ratio"] == 2.0
    assert event["ratio_max"] == 5.0
    assert event["ratio_min"] == -5.0
    assert event["nonfinite_steps"] == 1


@pytest.mark.parametrize("micro_batch", [{"prompt_ids": [[1, 2]]}, {"input_ids": torch.zeros(2, 3)}])
def test_utilization_is_logged_where_a_batch_says_what_was_computed(
    micro_batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of prompts, whose completions a step samples. Fails when: that is logged as 0."""
    monkeypatch.setattr(step_metrics, "peak_flops", lambda _: 1e12)
    window = Window()
    metrics = {"loss": torch.tensor(1.0), "grad_norm": torch.tensor(1.0)}
    window.add(1, Batch([micro_batch], {"examples": 2.0}, []), metrics)
    window.read()
    window.seconds = 1.0
    model: Any = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(get_text_config=SimpleNamespace)
    anything: Any = SimpleNamespace(device=torch.device("cpu"), param_groups=[{"lr": 0.1}])
    assert ("mfu" in window.event(anything, model, anything)) == ("input_ids" in micro_batch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_metrics_of_a_step_may_be_on_several_devices() -> None:
    """As those of rollouts are. Fails when: all are stacked together."""
    window = Window()
    loss = torch.tensor(2.0, device="cuda")
    window.add(1, Batch([], {"examples": 2.0}, []), {"loss": loss, "grad_norm": loss, "reward": torch.tensor(0.5)})
    (step,) = window.read()
    assert step.values == {"loss": 2.0, "grad_norm": 2.0, "reward": 0.5}


def test_numbers_and_metrics_of_some_steps_alone_are_means_over_those() -> None:
    """A recipe adds a number to what its step returned, every other step. Fails when: values are taken to be tensors, or the
    first step's names are those of all."""
    window = Window()
    for number in range(4):
        metrics: dict[str, Any] = {"loss": torch.tensor(float(number)), "grad_norm": torch.tensor(1.0), "temperature": 0.5 * number}
        if number % 2:
            metrics["every_other"] = torch.tensor(10.0 * number)
        window.add(number, Batch([], {"examples": 2.0}, []), metrics)
    window.read()
    window.seconds = 1.0
    optimizer: Any = SimpleNamespace(param_groups=[{"lr": 0.1}])
    nothing: Any = SimpleNamespace(device=torch.device("cpu"))
    event = window.event(optimizer, nothing, nothing)
    assert (event["loss"], event["temperature"], event["every_other"]) == (1.5, 0.75, 20.0)


@pytest.mark.parametrize(
    ("metrics", "named"),
    [({"loss": torch.ones(()), "grad_norm": torch.ones(()), "mine": torch.ones(3)}, "mine"),
     ({"loss": torch.ones(()), "grad_norm": torch.ones(()), "mine": "warm"}, "mine"),
     ({"mine": torch.ones(())}, "grad_norm")],
)  # fmt: skip
def test_what_is_no_metric_of_a_step_is_refused_by_its_name(metrics: dict[str, Any], named: str) -> None:
    """Fails when: it is only found out where the metrics are read, or not at all."""
    with pytest.raises(ValueError, match=named):
        Window().add(1, Batch([], {"examples": 2.0}, []), metrics)
