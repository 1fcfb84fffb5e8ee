"""toolkit find-learning-rate: what it reads from a curve, that its rates reach the parameters, and what it refuses."""

import json
import math
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import toolkit as tk
from toolkit.cli.main import app
from toolkit.config import Refusal
from toolkit.diagnostics.learning_rate import HIGHEST, LOWEST, RangeTest, draw, find_learning_rate, judged, rate_at
from toolkit.training.anomalies import Unstable

SMALL = ["--hidden-size", "32", "--num-hidden-layers", "1", "--max-length", "512", "--max-train-examples", "64", "--max-eval-examples", "8"]
RATES = [rate_at(step / 200) for step in range(200)]


def curve(best: float, noise: float = 0.0) -> list[float]:
    """Gradient descent on a quadratic bowl whose curvature is 1 / best, with rates that rise: it diverges above 2 * best."""
    losses, distance = [], 1.0
    for number, rate in enumerate(RATES):
        losses.append(min(1 + distance**2 + noise * math.sin(37 * number), 1e30))
        distance *= 1 - 0.1 * rate / best if rate < 2 * best else -3.0
    return losses


@pytest.mark.fast(1)
@pytest.mark.parametrize("best", [1e-4, 1e-2])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_rate_to_try_is_below_where_the_loss_is_lowest(best: float, noise: float) -> None:
    """Fails when: the raw losses are taken, or what lies behind the divergence."""
    found = judged(RATES, curve(best, noise))
    assert found.steepest < 2 * best
    assert 0.1 * best < found.lowest < 4 * best
    assert found.suggested == pytest.approx(0.1 * found.lowest, rel=0.05)
    assert len(found.smoothed) < 200
    assert found.fall > 0.3


@pytest.mark.parametrize(
    ("losses", "said"), [([1.0] * 200, "does not fall"), ([float("nan")] * 200, "not finite"), ([1.0 + n / 9 for n in range(200)], "does not fall")]
)
def test_a_curve_that_says_nothing_is_refused(losses: list[float], said: str) -> None:
    """Fails when: the first rate of a flat curve is suggested."""
    with pytest.raises(Refusal, match=said):
        judged(RATES, losses)


@dataclass(frozen=True)
class Config(tk.OptimConfig, tk.RunConfig):
    output_dir: str = "unused"


@pytest.mark.parametrize(("finite", "said"), [(0, "from the start: look"), (7, "after 7 steps: take more --steps")])
def test_a_run_that_ends_itself_for_its_losses_is_refused_in_one_message(finite: int, said: str) -> None:
    """Three steps in a row that are not finite. Fails when: the exception that ended the run is what a user sees."""

    def main(config: Config) -> None:
        lines = [{"step": step, "loss": 2.0 if step <= finite else math.nan} for step in range(1, finite + 4)]
        Path(config.output_dir).mkdir()
        Path(config.output_dir, "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        raise Unstable("3 steps in a row")

    with pytest.raises(Refusal, match=said):
        find_learning_rate(main, Config(), 20)


def test_an_error_while_the_loss_still_falls_is_raised() -> None:
    """It has nothing to do with the rate. Fails when: the curve up to there is judged as if the rates behind it had failed."""

    def main(config: Config, last: float) -> None:
        losses = [3.0 - step / 50 for step in range(1, 60)] + [last]
        Path(config.output_dir).mkdir()
        Path(config.output_dir, "metrics.jsonl").write_text("".join(json.dumps({"step": n, "loss": loss}) + "\n" for n, loss in enumerate(losses, 1)))
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        find_learning_rate(partial(main, last=1.8), Config(), 100)
    assert find_learning_rate(partial(main, last=90.0), Config(), 100).suggested > 0


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["find-learning-rate", *words], prog_name="toolkit")


def test_a_recipe_trains_with_each_rate_in_turn_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the recipe's own schedule goes on, its groups lose the ratio of their rates, it evaluates as it would in a run, or nothing shows how far it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("toolkit.system.progress.LOG_SECONDS", 0)
    seen: list[list[float]] = []
    step = tk.train_step

    def counted(accelerator: Any, model: Any, optimizer: Any, batch: Any, loss_fn: Any, rates: list[float], **named: Any) -> Any:
        seen.append(rates)
        return step(accelerator, model, optimizer, batch, loss_fn, rates, **named)

    monkeypatch.setattr(tk, "train_step", counted)
    monkeypatch.setattr(tk, "eval_with_gather", lambda *_: pytest.fail("evaluates"))
    done = invoke("sft", *SMALL, "--learning-rate", "0.002", "--lr-patterns", "embed=0.5", "--steps", "40", "--plot", "curve.svg", "--json")
    assert done.exit_code == 0, done.output + repr(done.exception)
    found = RangeTest(**json.loads(done.stdout))
    assert re.findall(r"(\d+) of 40 steps", done.stderr) == [str(number) for number in range(1, 41)]
    assert [rates[0] for rates in seen] == pytest.approx([rate_at(number / 40) for number in range(40)])
    assert (rate_at(0), rate_at(1)) == pytest.approx((LOWEST, HIGHEST))
    assert any(min(rates) == pytest.approx(0.5 * max(rates)) for rates in seen)
    assert found.rates == pytest.approx([rate_at(number / 40) for number in range(len(found.rates))])
    assert 1e-5 < found.suggested < 0.1
    assert [path.name for path in tmp_path.iterdir()] == ["curve.svg"]
    assert ElementTree.fromstring((tmp_path / "curve.svg").read_text()).tag.endswith("svg")
    assert draw(found).count("<polyline") == 2


def test_the_command_to_begin_with_names_one_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the rate that was typed stays before the one that was found."""
    found = judged(RATES, curve(1e-2))
    monkeypatch.setattr("toolkit.diagnostics.learning_rate.find_learning_rate", lambda *_: found)
    done = invoke("sft", "--learning_rate=0.5", "--max-steps", "9", "--learning-rate", "0.4")
    assert done.stdout.splitlines()[-1] == f"toolkit train sft --max-steps 9 --learning-rate {found.suggested:g}", done.output


@pytest.mark.parametrize("losses", [[1.0] * 200, [1.0 + n / 9 for n in range(200)], [3.0, math.nan]], ids=["flat", "rising", "one step"])
def test_a_curve_without_a_rate_is_drawn_where_a_plot_was_asked_for(losses: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it looks like says what is wrong. Fails when: the refusal comes before the plot is written, or a flat curve has no height."""
    monkeypatch.setattr("toolkit.diagnostics.learning_rate.find_learning_rate", lambda *_: judged(RATES, losses))
    done = invoke("sft", "--plot", str(tmp_path / "curve.svg"))
    assert isinstance(done.exception, Refusal), done.output
    drawn = (tmp_path / "curve.svg").read_text()
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert drawn.count("<polyline") == 2
    assert "stroke-dasharray" not in drawn
    assert "nan" not in drawn


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["grpo"], "samples"), (["distill"], "--teacher"), (["sft", "--plot", str(Path(__file__).parent)], "is a folder"), (["nowhere"], "nowhere"),
        (["sft", "--learning-rate", "-1"], "--learning-rate"), (["sft", "--steps", "3"], "--steps"),
    ],
)  # fmt: skip
def test_what_has_no_range_test_is_one_message(words: list[str], said: str) -> None:
    """Fails when: one of them shows a traceback, or ends with 1."""
    done = invoke(*words)
    assert isinstance(done.exception, Refusal) or getattr(done.exception, "code", 0) == 2, done.output
    assert said in done.output + str(done.exception)
