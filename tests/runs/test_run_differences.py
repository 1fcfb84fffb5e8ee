"""Two runs compared: the first difference is found, to the last bit. Each test names the change under which it fails."""

import json
from pathlib import Path

import pytest
import torch

from toolkit import checkpoint as ckpt
from toolkit.runs.differences import first_checkpoint_difference, losses_of_the_same_steps, metric_differences


def checkpointed(output_dir: Path, weight: list[float], momentum: float = 0.5, rate: float = 0.1, step: int = 4) -> Path:
    optimizer = {"state": {0: {"momentum": torch.tensor(momentum)}}, "param_groups": [{"params": [0, 1], "lr": rate}]}
    model = {"bias": torch.zeros(2), "weight": torch.tensor(weight)}
    ckpt.save_checkpoint(output_dir / "checkpoints", step, ckpt.State(model, optimizer, [["bias", "weight"]], {}))
    return output_dir


def logged(output_dir: Path, losses: list[tuple[int, float | None]]) -> Path:
    output_dir.mkdir()
    lines = [{"step": 0, "eval_loss": 9.0}, *({"step": step, "loss": loss} for step, loss in losses)]
    (output_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return output_dir


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"weight": [1.0, 0.0, float("nan"), 2.5]}, "weight: largest difference 0.5, 1 of 4 numbers differ; 1 of 3 tensors differ"),
        ({"weight": [1.0, -0.0, float("nan"), 2.0]}, "weight: largest difference 0, 1 of 4 numbers differ; 1 of 3 tensors differ"),
        ({"weight": [1.0, 0.0, 3.0, 2.0]}, "weight: largest difference nan, 1 of 4 numbers differ; 1 of 3 tensors differ"),
        ({"weight": [1.0]}, "weight: float32 (4,) and float32 (1,); 1 of 3 tensors differ"),
        ({"momentum": 0.75}, "optimizer state/0/momentum: largest difference 0.25, 1 of 1 numbers differ; 1 of 3 tensors differ"),
        ({"rate": 0.2}, "optimizer: its numbers"),
        ({"step": 5}, "final checkpoints: step-4 and step-5"),
    ],
)
def test_the_first_tensor_that_differs_in_any_bit_is_named(tmp_path: Path, changed: dict, said: str | None) -> None:
    """A NaN is itself, and 0.0 is not -0.0. Fails when: tensors are compared as numbers, or the optimizer is left out."""
    weight = [1.0, 0.0, float("nan"), 2.0]
    one = checkpointed(tmp_path / "one", weight)
    other = checkpointed(tmp_path / "other", **{"weight": weight, **changed})
    found = first_checkpoint_difference(one, other)
    assert found is None if said is None else found.startswith(said)


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        ([(1, 0.1), (2, None), (3, 0.3)], None),
        ([(1, 0.1), (2, None), (3, 0.30000000000000004)], (3, "0.3", "0.30000000000000004")),
        ([(1, 0.1), (3, 0.3)], (2, "null", "not logged")),
        ([(1, 0.1), (2, None)], (3, "0.3", "not logged")),
        ([(1, 0.1), (1, 0.1), (2, None), (3, 0.3)], (1, "not logged", "0.1")),
    ],
)
def test_the_first_logged_step_that_differs_is_named(tmp_path: Path, theirs: list, difference: tuple | None) -> None:
    """Fails when: losses are compared as rounded, a step missing or logged twice goes unseen, or a NaN differs from itself."""
    one = logged(tmp_path / "one", [(1, 0.1), (2, None), (3, 0.3)])
    assert metric_differences(one, logged(tmp_path / "other", theirs)).get("loss") == difference


@pytest.mark.parametrize(
    ("theirs", "shared"),
    [
        ([(1, 0.5), (2, 0.25), (4, 0.125)], [(1, 0.5, 0.5), (2, 0.25, 0.25), (4, 0.125, 0.125)]),
        ([(2, 9.0), (4, 0.125)], [(4, 0.125, 0.125)]),
        ([(1, 0.5), (2, 0.5), (3, 9.0), (4, 9.0)], [(1, 0.5, 0.5), (2, 0.25, 0.5)]),
        ([(10, 0.5)], []),
    ],
    ids=["the same", "begun otherwise", "gone on otherwise", "none"],
)
def test_losses_are_compared_where_they_are_means_over_the_same_steps(tmp_path: Path, theirs: list, shared: list) -> None:
    """Fails when: events are matched by their step alone, or one after the other."""
    one = logged(tmp_path / "one", [(1, 0.5), (2, 0.25), (4, 0.125)])
    assert losses_of_the_same_steps(one, logged(tmp_path / "other", theirs)) == shared
