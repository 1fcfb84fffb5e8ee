"""Mistakes that others make, planted on purpose: the comparisons of our own tests find each of them, or the run itself does."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from toolkit.training.anomalies import RANKS_APART

LAYOUTS = runpy.run_path(str(Path(__file__).with_name("test_layouts.py")))
RAGGED, assert_same_training, curve = LAYOUTS["RAGGED"], LAYOUTS["assert_same_training"], LAYOUTS["curve"]
# Six rows in batches of four on two ranks leave no padding micro-batch: of two there is one.
FLAGS = [*RAGGED, "--per-device-eval-batch-size", "2"]
# One step of SGD at rate 1 over every document: what the weights lost is the gradient.
ONE_STEP = [
    "--dropout", "0", "--optim", "sgd", "--max-grad-norm", "0", "--max-steps", "1", "--save-steps", "1",
    "--lr-scheduler-type", "constant", "--per-device-train-batch-size", "2",
]  # fmt: skip
PADDED, PACKED = ["--global-batch-size", "30"], ["--packing", "--global-batch-size", "11"]


def on_two_ranks(tiny: Any, *flags: str, mistake: str | None = None) -> Any:
    tiny.fresh()
    ranks = tiny.ranks(2, *flags, ill={"mistake": mistake} if mistake else None)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    return ranks[0]


def assert_same_evaluation(found: Any, expected: Any) -> None:
    assert curve(found, "eval_loss") == pytest.approx(curve(expected, "eval_loss"), rel=1e-5)


def gap(found: Any, expected: Any, name: str) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a / b - 1) for a, b in zip(curve(found, name), curve(expected, name), strict=True))


@pytest.mark.slow
def test_without_a_mistake_the_comparisons_hold(tiny: Any) -> None:
    """Fails when: the loss of a rank is not multiplied by the number of ranks before backward (step.py)."""
    one, ranks = tiny.reference(*FLAGS), on_two_ranks(tiny, *FLAGS)
    assert_same_training(ranks, one)
    assert_same_evaluation(ranks, one)


@pytest.mark.slow
def test_a_mean_of_micro_batches_means_is_found(tiny: Any) -> None:
    """Micro-batches with unequal numbers of tokens, as in https://huggingface.co/blog/gradient_accumulation.

    Measured: losses apart by 8e-3, norms by 0.34; the comparison allows 1e-5.

    Fails when: the mistake is not planted.
    """
    one, planted = tiny.reference(*FLAGS), on_two_ranks(tiny, *FLAGS, mistake="mean of means")
    with pytest.raises(AssertionError):
        assert_same_training(planted, one)
    assert gap(planted, one, "loss") > 100 * 1e-5
    assert gap(planted, one, "grad_norm") > 100 * 1e-5


@pytest.mark.slow
def test_a_schedule_that_every_rank_moves_on_is_found(tiny: Any) -> None:
    """Measured: losses apart by 3e-2. Fails when: the mistake is not planted."""
    one, planted = tiny.reference(*FLAGS), on_two_ranks(tiny, *FLAGS, mistake="schedule stepped by every rank")
    with pytest.raises(AssertionError):
        assert_same_training(planted, one)
    assert curve(planted, "loss")[:2] == pytest.approx(curve(one, "loss")[:2], rel=1e-5)  # one update, at a rate still like it
    assert gap(planted, one, "loss") > 100 * 1e-5


@pytest.mark.slow
def test_rows_that_are_evaluated_twice_are_found(tiny: Any) -> None:
    """The padding micro-batch of the rank with less to do, counted: evaluation losses apart by 2e-3, while the training is the same.

    Fails when: the mistake is not planted.
    """
    one, planted = tiny.reference(*FLAGS), on_two_ranks(tiny, *FLAGS, mistake="duplicated evaluation rows")
    assert_same_training(planted, one)
    with pytest.raises(AssertionError):
        assert_same_evaluation(planted, one)
    assert gap(planted, one, "eval_loss") > 100 * 1e-5


@pytest.mark.slow
def test_documents_of_a_packed_row_that_see_each_other_are_found(tiny: Any) -> None:
    """The gradient of all documents, padded or packed. The loss of a model that has not learned barely moves.

    Measured: packed 3e-6 from padded; contaminated 0.82, where the loss differs by 1e-4. Fails when: the mistake is not planted.
    """
    flags = [*ONE_STEP, "--learning-rate", "1"]
    before, one = tiny.reference(*ONE_STEP, "--learning-rate", "1e-30", *PADDED), tiny.reference(*flags, *PADDED)
    clean = on_two_ranks(tiny, *flags, *PACKED)
    error = gradient_error(clean, one, before)
    planted = on_two_ranks(tiny, *flags, *PACKED, mistake="contaminated packing")
    assert error < 1e-5
    assert gradient_error(planted, one, before) > 100 * 1e-5


def gradient_error(found: Any, expected: Any, before: Any) -> float:
    """The largest distance of a parameter's gradient from the expected one, relative to its length."""
    start, reference, weights = (load_file(run.folder / "checkpoints/step-1/model.safetensors") for run in (before, expected, found))
    return max(((weights[name] - tensor).norm() / (tensor - start[name]).norm()).item() for name, tensor in reference.items())


def test_ranks_whose_weights_come_apart_are_warned_of_once(tiny: Any) -> None:
    """Noise on the weights from a generator that each rank has seeded for its own micro-batches.

    Fails when: weights are not compared between ranks, the warning is repeated at each save, or ranks always count as apart.
    """
    found = on_two_ranks(tiny, *FLAGS, "--save-strategy", "steps", "--save-steps", "1", mistake="noise of each rank")
    assert found.out.count(RANKS_APART) == 1
    warnings = json.loads((found.folder / "summary.json").read_text())["warnings"]
    assert [RANKS_APART in each for each in warnings].count(True) == 1
    states = [file.read_text() for file in found.folder.glob("checkpoints/step-*/state.json")]
    assert [RANKS_APART in state for state in states] == [True, True]
    assert RANKS_APART not in on_two_ranks(tiny, *FLAGS).out
