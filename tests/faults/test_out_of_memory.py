"""Out of memory: the micro-batch is halved before the first step, and the result is that of the smaller one."""

import json
import re

import pytest

SMALL = ["--per-device-train-batch-size", "8", "--auto-find-batch-size"]


@pytest.mark.parametrize("above", [5, 2, 1])
def test_the_micro_batch_is_halved_until_it_fits_and_the_result_is_the_same(tiny, tally, above: int) -> None:
    """The loss raises torch.OutOfMemoryError above N examples. Fails when: the trial leaves a trace (a gradient, random
    numbers), the global batch changes, or run.json tells the size that was asked for."""
    fits = {5: 4, 2: 2, 1: 1}[above]
    line = tally("memory", f"out of memory above {above} examples: micro-batch 8 becomes {fits}, result as if that was given")
    given = tiny.reference("--per-device-train-batch-size", str(fits), "--gradient-accumulation-steps", str(8 // fits))
    tiny.fresh()
    run = tiny(*SMALL, ill={"out_of_memory_above": above})
    with line.trial():
        assert run.code == 0, run.out
        assert re.search(rf"out of memory with 8 examples .*: .*\b{fits}\b", run.out)
        assert run.outcome == given.outcome
        layout = json.loads((run.folder / "run.json").read_text())["layout"]
        assert (layout["micro_batch_size"], layout["global_batch_size"], layout["gradient_accumulation_steps"]) == (fits, 8, 8 // fits)
    line.check()


@pytest.mark.slow
def test_a_real_limit_halves_the_micro_batch(tiny, tally) -> None:
    """RLIMIT_AS, and examples that need more than it allows. Fails when: the CPU's own error is not known as one of memory."""
    line = tally("memory", "RLIMIT_AS: the micro-batch is halved and the run finishes")
    tiny.fresh()
    wide = ["--hidden-size", "256", "--intermediate-size", "16384", "--max-steps", "1", "--save-strategy", "no"]
    run = tiny(*wide, "--per-device-train-batch-size", "30", "--auto-find-batch-size", plan={"limit_memory": 550}, ill={"long_rows": 60})
    with line.trial():
        assert "out of memory with 30 examples" in run.out, run.out
        assert run.code == 0, run.out
        layout = json.loads((run.folder / "run.json").read_text())["layout"]
        assert layout["micro_batch_size"] < 30
        assert layout["global_batch_size"] == 30
    line.check()


def test_not_even_one_example_is_a_refusal(tiny, tally) -> None:
    """Fails when: halving continues for ever or the error is torch's own."""
    line = tally("memory", "not even one example fits: refused, exit code 2, what helps is named")
    tiny.fresh()
    run = tiny(*SMALL, ill={"out_of_memory_above": 0})
    with line.trial():
        assert run.code == 2, run.out
        assert "not even one example" in run.out
    line.check()


def test_an_array_that_does_not_fit_in_the_middle_of_a_run_is_one_message(tiny) -> None:
    """numpy raises a MemoryError, which is no RuntimeError. Fails when: open_run or `is_out_of_memory` knows torch's errors alone."""
    tiny.fresh()
    run = tiny(*SMALL, ill={"nonfinite": "memory", "at": [3]})
    assert run.code == 1, run.out
    assert "out of memory in step 3" in run.out
    assert "Traceback" not in run.out
