"""Runs that go wrong without an error are warned of, and runs that go well are not. Each test names the change under which it fails."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from toolkit.tracking.step_metrics import StepMetrics
from toolkit.training.anomalies import IN_A_ROW, WITHOUT_GRADIENT, Divergence
from toolkit.training.run_state import RunState

pytestmark = pytest.mark.warm

ROOT = Path(__file__).resolve().parents[2]


def saved_and_restored(watch: Divergence) -> Divergence:
    """As a checkpoint does."""
    return RunState.from_record(json.loads(json.dumps(RunState(divergence=watch).record()))).divergence


def found_in(losses: list[float], norms: list[float] | None = None) -> list[str]:
    watch = Divergence()
    for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True):
        watch.after_step(loss, norm, applied=True)
    return watch.found


@pytest.mark.parametrize(
    ("losses", "norms", "found"),
    [
        ([8.3, *[900.0] * 20], None, ["high loss"]),  # it goes up with the second step
        ([2.1, 2.0, 2.2, *np.linspace(2.2, 9.0, 30)], None, ["high loss"]),  # a trained model that is destroyed
        ([8.3, 40.0, *[9.9] * 30], [1.0, 5.0, *[0.0] * 30], ["dead gradient"]),
        ([0.7, *[0.0] * 20], [1.0, *[0.0] * 20], []),  # all is learned: no gradient is needed
        ([1.0, *[0.9] * 20], [1.0, *[0.0, 0.5] * 10], []),  # never in a row
        ([2.0, *[math.nan, 9.0] * 9], None, []),
        ([-1.0, *[-0.9] * 20], None, []),
        ([-1.0, *[8.0] * 20], None, ["high loss"]),
    ],
    ids=["at once", "slowly", "dead", "all learned", "not in a row", "few high ones", "negative", "negative, high"],
)  # fmt: skip
def test_what_is_warned_of(losses: list[float], norms: list[float] | None, found: list[str]) -> None:
    """Fails when: the highest of the first losses is taken though it went up at once, or zero loss counts as dead."""
    assert found_in(losses, norms) == found


@pytest.mark.parametrize(("shares", "norm", "found"), [
    ([1.0] * 5, 0.0, ["no spread"]), ([1.0] * 4, 0.0, []), ([1.0, 1.0, 0.5, *[1.0] * 20], 0.0, []), ([1.0] * 9, 0.1, []), ([None] * 9, 0.0, []),
])  # fmt: skip
def test_a_run_whose_first_groups_have_no_spread_is_warned_of(shares: list[float | None], norm: float, found: list[str]) -> None:
    """Rewards that never differ within a group, the loss 0 with them. Fails when: the steps need not be the first ones, or a step
    with a gradient, as PPO's is, counts as one that teaches nothing."""
    state, warnings = RunState(source="", fingerprint=""), list[str]()
    for number, share in enumerate(shares):
        values = {"loss": 0.0, "grad_norm": norm} | ({"groups_without_spread": share} if share is not None else {})
        state.divergence.steps, state.divergence.applied = number, number
        warnings += state.add_metrics(StepMetrics(number + 1, values, {}, number, 1, []))[1]
    assert (state.divergence.found, len(warnings)) == (found, len(found))
    assert all("toolkit rollouts" in each for each in warnings)


def test_noise_between_single_examples_is_no_divergence() -> None:
    """Losses of single examples, log-normal around 1.6 with a spread of 0.5, and falling: 400 runs, no alarm.

    Fails when: a loss is compared with that of the first step alone.
    """
    random_numbers = np.random.default_rng(0)
    for _ in range(400):
        losses = np.exp(random_numbers.normal(0.5, 0.5, size=300)) * np.linspace(1.0, 0.8, 300)
        assert found_in(losses.tolist()) == []


def test_each_is_said_once_also_after_a_resume() -> None:
    """Fails when: a checkpoint's state is not restored, or a warning comes with every step."""
    watch, said = Divergence(), []
    for step in range(60):
        said += watch.after_step(0.5 if step < 3 else 90.0, 0.0 if step > 30 else 1.0, applied=True)
        watch = saved_and_restored(watch)
    high, flat = said
    assert re.match(rf"the loss .*first .*\b{IN_A_ROW} steps", high)
    assert re.match(rf"the gradient .*\b0 .*\b{WITHOUT_GRADIENT} steps .*\(loss 90\)", flat)
    assert RunState.from_record({}).divergence == Divergence()  # a checkpoint that is older than it


def test_skipped_steps_and_a_worse_metric_are_found_at_the_end() -> None:
    """Fails when: half of the steps is most of them, a metric's direction is ignored, one that isn't finite is no worse, or one is
    worse than what is no number."""
    watch = Divergence()
    for step in range(10):
        watch.after_step(1.0, 1.0, applied=step % 2 == 0)
    assert watch.after_last_step() == []
    watch.after_step(math.inf, math.inf, applied=False)
    assert watch.after_last_step()[0].startswith("6 of 11 steps were skipped")
    worse = {
        ("eval_loss", (2.0, 1.0, 2.5)): True, ("eval_loss", (2.0, 3.0, 2.3)): False, ("eval_loss", (2.0,)): False,
        ("eval_accuracy", (0.5, 0.3)): True, ("eval_accuracy", (0.5, 0.45)): False, ("eval_accuracy", (0.5, 0.6)): False, ("eval_loss", (2.0, math.nan)): True,
        ("eval_reward", (math.nan, math.nan)): False, ("eval_reward", (math.nan, 0.5)): False,
    }  # fmt: skip
    for (name, values), is_worse in worse.items():
        assert bool(Divergence().of_metric(name, values)) == is_worse
    assert Divergence().of_metric("eval_delay", (2.0, 3.0), given=False)


def run(output_dir: Path, *flags: str, **ill: object) -> tuple[int, str, dict]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/tiny_run.py"), "--output-dir", str(output_dir), *flags], capture_output=True, text=True,
        timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1", "TINY_RUN": json.dumps(ill)},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, json.loads((output_dir / "summary.json").read_text())


DIVERGES = ("--learning-rate", "1000", "--max-steps", "30", "--eval-on-start", "--eval-strategy", "epoch")


def test_a_run_that_diverges_says_so_in_its_log_and_its_summary(tmp_path: Path) -> None:
    """Fails when: nothing looks at the losses, or the summary leaves the warnings out."""
    code, said, summary = run(tmp_path / "run", *DIVERGES)
    assert (code, summary["status"]) == (0, "finished")
    assert summary["warnings"]
    for warning in summary["warnings"]:
        assert f"WARNING: {warning}" in said
    assert any(warning.startswith("the gradient was exactly 0") for warning in summary["warnings"])
    assert re.search(r"finished: eval_loss .*first evaluation \(5\.56\d*\)$", said.strip())


def test_with_divergence_stop_the_run_ends_there_with_code_1(tmp_path: Path) -> None:
    """Fails when: the setting isn't asked, or the run goes on to its end and is called finished."""
    code, said, summary = run(tmp_path / "run", *DIVERGES, "--divergence", "stop")
    assert (code, summary["status"]) == (1, "diverged")
    assert summary["steps"] < 30
    assert "--divergence stop" in said
    assert "Traceback" not in said
    assert json.loads((tmp_path / "run/run.json").read_text())["end"]["status"] == "diverged"


def test_a_worse_metric_stops_a_run_before_its_model_is_saved(tmp_path: Path) -> None:
    """Made-up evaluations. Fails when: the end is looked at after the block alone, or the best weights are taken for the last ones."""
    flags = ["--max-steps", "8", "--eval-steps", "4", "--save-steps", "4", "--eval-on-start", "--divergence", "stop"]
    code, _, summary = run(tmp_path / "run", *flags, eval_losses=[1.0, 0, 0, 0, 0.5, 0, 0, 0, 2.0])
    assert (code, summary["status"]) == (1, "diverged")
    assert re.match(r"eval_loss is worse .*: 2, .*\b1 ", summary["warnings"][0])
    assert not (tmp_path / "run/result.json").exists()
    best = run(tmp_path / "best", *flags, "--load-best-model-at-end", eval_losses=[1.0, 0, 0, 0, 0.5, 0, 0, 0, 2.0])
    assert (best[0], best[2]["status"], best[2]["warnings"], best[2]["eval_loss"]) == (0, "finished", [], 0.5)


def test_skipped_steps_are_counted_over_a_resume(tmp_path: Path) -> None:
    """Fails when: a resumed run begins to count again."""
    at = [2, 3, 5, 6, 8, 9, 11, 12]
    run(tmp_path / "run", "--max-steps", "8", nonfinite="loss", at=at)
    flags = ["--max-steps", "12", "--resume", "--allow-change", "max_steps"]
    code, said, summary = run(tmp_path / "run", *flags, nonfinite="loss", at=at)
    assert code == 0, said
    assert summary["warnings"] == [warning for warning in summary["warnings"] if warning.startswith("8 of 12 steps were skipped")] != []


def test_with_divergence_stop_a_run_ends_as_soon_as_most_of_its_last_steps_were_skipped(tmp_path: Path) -> None:
    """Two of three steps are skipped, never three in a row: the 11th skipped one is step 17. Fails when: only the end is looked at."""
    at = [step for step in range(1, 61) if step % 3 != 1]
    code, _, summary = run(tmp_path / "run", "--max-steps", "60", "--divergence", "stop", nonfinite="loss", at=at)
    assert (code, summary["status"], summary["steps"]) == (1, "diverged", 17)
    assert re.match(r"11 of .*\b17 steps .*skipped", summary["warnings"][0])
    watch = Divergence()
    for step in range(100):  # half of them are not most of them
        assert watch.after_step(math.nan if step % 2 else 1.0, 1.0, applied=not step % 2) == []
    said_at = [step for step in range(20) if watch.after_step(math.inf, 1.0, applied=False)]
    assert said_at == [0]
    assert saved_and_restored(watch) == watch


def test_a_run_that_ends_with_steps_that_are_not_finite_says_that_the_loss_had_diverged_before(tmp_path: Path) -> None:
    """Fails when: the rows are named as the cause of a rate that is too high, or the rate as that of a bad row."""
    code, said, summary = run(tmp_path / "run", "--learning-rate", "1000", "--max-steps", "30", nonfinite="loss", at=[4, 5, 6])
    assert (code, summary["status"], summary["steps"]) == (1, "diverged", 6)
    assert re.match(r"the loss diverged: 5\.\d+ .*, \S*\d .*--learning-rate", summary["warnings"][-1])
    assert summary["warnings"][-1] in said.strip().splitlines()[-1]
    assert "Look at the rows" not in said
    code, said, summary = run(tmp_path / "rows", "--max-steps", "30", nonfinite="loss", at=[4, 5, 6])
    assert (code, summary["status"], summary["warnings"]) == (1, "failed", [])
    assert "Look at the rows" in said
