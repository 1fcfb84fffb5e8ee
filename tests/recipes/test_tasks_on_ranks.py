"""Each task on two ranks, with ragged micro-batches and another evaluation batch: the numbers of one process, to 1e-5."""

from pathlib import Path
from typing import Any

import pytest

TASKS = ["token_classification", "masked_lm", "embedding", "reranker", "multiple_choice"]  # the others have tests of their own
SMALL = [
    "--hidden-size", "32", "--num-hidden-layers", "1", "--max-train-examples", "31", "--max-eval-examples", "7", "--max-length", "64",
    "--max-steps", "3", "--logging-steps", "1", "--global-batch-size", "11", "--dropout", "0", "--eval-strategy", "steps", "--eval-steps",
    "3", "--optim", "adamw_torch", "--learning-rate", "0.0005", "--use-cpu",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_two_ranks_have_the_losses_norms_and_metrics_of_one_process(task: str, tiny: Any) -> None:
    """11 examples a step in micro-batches of 11, and of 3 on two ranks; 7 held-out ones in batches of 8, and of 3.

    Fails when: the gradient is the mean over ranks (`weight * accelerator.num_processes` is `weight`).
    """
    script = str(Path(__file__).resolve().parents[2] / f"recipes/{task}.py")
    sizes = ["--per-device-train-batch-size", "11", "--per-device-eval-batch-size", "8"]
    one = tiny(*SMALL, *sizes, script=script, output_dir="one")
    assert one.code == 0, one.out[-3000:]
    sizes = ["--per-device-train-batch-size", "3", "--per-device-eval-batch-size", "3"]
    ranks = tiny.ranks(2, *SMALL, *sizes, script=script, output_dir="two")
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    names = {name for event in one.metrics for name in event if name in ("loss", "grad_norm") or name.startswith("eval_")}
    assert len(names) >= 4
    for name in names - {"eval_seconds"}:
        found, expected = ([event[name] for event in run.metrics if name in event] for run in (ranks[0], one))
        assert found == pytest.approx(expected, rel=1e-5), name
