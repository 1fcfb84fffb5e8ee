"""Every layout trains as one process does: the same examples, losses and gradient norms, whatever shards the model."""

from typing import Any

import pytest

LAYOUTS = {
    "ddp": [],
    "zero1": ["--zero-stage", "1"],
    "zero2": ["--zero-stage", "2"],
    "zero3": ["--zero-stage", "3"],
    "zero1_offload": ["--zero-stage", "1", "--offload", "optimizer"],
    "zero2_offload": ["--zero-stage", "2", "--offload", "optimizer"],
    "zero3_offload": ["--zero-stage", "3", "--offload", "parameters"],
    "fsdp2": ["--fsdp"],
    "fsdp2_offload": ["--fsdp", "--offload", "parameters"],
}
TASKS = {"causal_lm": [], "classification": ["--model", "tiny-bert"], "pairs": ["--pairs"]}
# 137 examples in 20 steps of 7: micro-batches of 2 and 1, ranks with 4 and 3 examples, and a last step of 4.
RAGGED = [
    "--dropout", "0", "--learning-rate", "1e-3", "--global-batch-size", "7", "--num-train-epochs", "4.56",
    "--save-strategy", "no", "--eval-strategy", "steps", "--eval-steps", "20", "--eval-on-start", "--per-device-eval-batch-size", "4",
]  # fmt: skip


def curve(finished: Any, name: str) -> list[float]:
    return [event[name] for event in finished.metrics if name in event]


def assert_same_training(found: Any, expected: Any, steps: int = 20) -> None:
    assert found.result["order"] == expected.result["order"]
    assert len(curve(expected, "loss")) == steps
    assert curve(found, "loss") == pytest.approx(curve(expected, "loss"), rel=1e-5)
    assert curve(found, "grad_norm") == pytest.approx(curve(expected, "grad_norm"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("task", TASKS)
def test_a_layout_trains_as_one_process_does(tiny: Any, task: str, layout: str) -> None:
    one = tiny.reference(*TASKS[task], *RAGGED)
    ranks = tiny.ranks(2, *TASKS[task], *RAGGED, *LAYOUTS[layout])
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    assert_same_training(ranks[0], one)
    first, last = curve(ranks[0], "eval_loss"), curve(one, "eval_loss")
    assert first[0] == pytest.approx(last[0], rel=1e-6)
