"""Every layout trains as one process does: the same examples, losses and gradient norms, whatever shards the model."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

# DeepSpeed would leave parameters of less than 100,000 numbers whole, which here are all of them.
ALL_SHARDED = ["--deepspeed", str(Path(__file__).resolve().parents[1] / "all_sharded.json")]
LAYOUTS = {
    "ddp": [],
    "zero1": ["--zero-stage", "1"],
    "zero2": ["--zero-stage", "2"],
    "zero3": ALL_SHARDED,
    "zero1_offload": ["--zero-stage", "1", "--offload", "optimizer"],
    "zero2_offload": ["--zero-stage", "2", "--offload", "optimizer"],
    "zero3_offload": [*ALL_SHARDED, "--offload", "parameters"],
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


def with_tasks(ways: Iterable[str], first: int) -> list[tuple[str, str]]:
    """Each way with one of the tasks, which take turns: all pairs would take three times as long."""
    return list(zip(itertools.cycle([*TASKS][first:] + [*TASKS][:first]), ways))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "layout"), with_tasks(LAYOUTS, 0))
def test_a_layout_trains_as_one_process_does(tiny: Any, task: str, layout: str) -> None:
    """Loss and norm of 20 steps, order, evaluation before and after. Fails when: a rank's last micro-batch is counted as real
    where it is a padding micro-batch, `accumulating` synchronizes nothing, or the clipping sees a rank's own shard alone.
    """
    one = tiny.reference(*TASKS[task], *RAGGED)
    ranks = tiny.ranks(2, *TASKS[task], *RAGGED, *LAYOUTS[layout])
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    assert_same_training(ranks[0], one)
    (before, after), (its_before, its_after) = curve(ranks[0], "eval_loss"), curve(one, "eval_loss")
    assert before == pytest.approx(its_before, rel=1e-6)  # of the same weights
    assert after == pytest.approx(its_after, rel=1e-5)


# The ways to cut a step of 7 examples: ranks, and examples in a micro-batch.
SPLITS = {
    "one process, micro-batches of 1": (1, ["--per-device-train-batch-size", "1"]),
    "one process, one micro-batch": (1, ["--per-device-train-batch-size", "7"]),
    "2 DDP ranks": (2, []),
    "3 DDP ranks, micro-batches of 1": (3, ["--per-device-train-batch-size", "1"]),
    "ZeRO-1": (2, LAYOUTS["zero1"]),
    "ZeRO-2, micro-batches of 3": (2, [*LAYOUTS["zero2"], "--per-device-train-batch-size", "3"]),
    "ZeRO-3, 3 ranks": (3, LAYOUTS["zero3"]),
    "ZeRO-3 with offload": (2, LAYOUTS["zero3_offload"]),
    "FSDP2, micro-batches of 1": (2, [*LAYOUTS["fsdp2"], "--per-device-train-batch-size", "1"]),
}
ONE_STEP_OF_SGD = [
    "--dropout", "0", "--optim", "sgd", "--momentum", "0", "--max-grad-norm", "0", "--lr-scheduler-type", "constant",
    "--global-batch-size", "7", "--max-steps", "1", "--save-steps", "1",
]  # fmt: skip


# The losses that are not among the tasks above.
OTHER_LOSSES = {
    "label smoothing and z-loss": ["--label-smoothing-factor", "0.1", "--z-loss", "0.1"],
    "class weights": [*TASKS["classification"], "--class-weights", "1,2,5"],
    "label smoothing of classes": [*TASKS["classification"], "--label-smoothing-factor", "0.1"],
    "several classes": [*TASKS["classification"], "--problem-type", "multi_label"],
    "a number": [*TASKS["classification"], "--problem-type", "regression", "--metrics", "mse"],
}


def weights(finished: Any) -> torch.Tensor:
    """All parameters after the only step, in float64, one behind the other by name."""
    tensors = load_file(finished.folder / "checkpoints/step-1/model.safetensors")
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


@pytest.mark.slow
@pytest.mark.parametrize(("task", "split"), with_tasks(SPLITS, 1))
def test_the_gradient_does_not_depend_on_the_layout(tiny: Any, task: str, split: str) -> None:
    """As a vector, from identical weights: what one step of SGD at rate 1 takes away. Fails when: `num_processes` is left out."""
    assert_same_gradient(tiny, TASKS[task], *SPLITS[split])


@pytest.mark.slow
@pytest.mark.parametrize("loss", OTHER_LOSSES)
def test_the_gradient_of_every_loss_is_that_of_one_process(tiny: Any, loss: str) -> None:
    """Fails when: a loss divides by what its own micro-batch holds."""
    assert_same_gradient(tiny, OTHER_LOSSES[loss], *SPLITS["3 DDP ranks, micro-batches of 1"])


def assert_same_gradient(tiny: Any, task: list[str], world_size: int, split: list[str]) -> None:
    flags = [*task, *ONE_STEP_OF_SGD]
    start = weights(tiny.reference(*flags, "--learning-rate", "1e-30"))
    gradient = start - weights(tiny.reference(*flags, "--learning-rate", "1"))
    flags += ["--learning-rate", "1", *split]
    ranks = tiny.ranks(world_size, *flags) if world_size > 1 else [tiny(*flags)]
    assert ranks[0].code == 0, ranks[0].out[-3000:]
    error = (start - weights(ranks[0]) - gradient).norm() / gradient.norm()
    assert float(error) < 1e-5
