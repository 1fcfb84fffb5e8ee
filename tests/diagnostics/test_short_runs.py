"""Short runs of a recipe inside plan, doctor, profile and find-learning-rate: what a signal does to them, and what they refuse."""

import json
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk
from toolkit.command_line.recipe import read_recipe
from toolkit.config import Refusal
from toolkit.diagnostics.doctor import examine
from toolkit.diagnostics.heap import find_heap
from toolkit.diagnostics.learning_rate import find_learning_rate
from toolkit.diagnostics.plan import plan
from toolkit.diagnostics.profile import profile
from toolkit.diagnostics.watch import Watch
from toolkit.training import opening
from toolkit.training.signals import StopSignal

RECIPE = Path(tk.__file__).parents[1] / "recipes" / "accelerated.py"


def examined(main: Callable[[Any], Any], config: Any) -> None:
    with Watch(str(RECIPE)) as watch:
        examine(main, config, watch)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", [plan, examined, profile, find_learning_rate])
def test_a_signal_ends_it_at_once_and_leaves_nothing(
    command: Callable[[Any, Any], Any], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: the run notes the signal, to save and to say how its temporary directory is resumed; or SIGTERM just kills."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    _, config = read_recipe(RECIPE, [])

    def main(config: Any) -> None:
        with opening.signals_noted(StopSignal()):
            signal.raise_signal(number)
            pytest.fail("goes on")

    with pytest.raises(KeyboardInterrupt):
        command(main, config)
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers


def rows(folder: Path, count: int) -> str:
    """A file of rows to classify, all with the input of the first where there is only one."""
    lines = [json.dumps({"text": f"row {number % count}", "label": "ab"[number % 2]}) for number in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return str(folder / "rows.jsonl")


@pytest.mark.parametrize("command", [plan, examined, profile, find_learning_rate])
@pytest.mark.parametrize(
    ("flags", "said"), [([], "too few"), (["--eval-fraction", "0", "--eval-strategy", "epoch"], "no rows to evaluate on")]
)
def test_what_a_run_refuses_of_its_evaluation_is_refused(
    command: Callable[[Any, Any], Any], flags: list[str], said: str, tmp_path: Path
) -> None:
    """Fails when: the settings of the evaluation are switched off, not what they do."""
    main, config = read_recipe(RECIPE, ["--dataset", rows(tmp_path, 1), *flags])
    with pytest.raises(Refusal, match=said):
        command(main, config)


TINY = ["--hidden-size", "16", "--num-hidden-layers", "1", "--intermediate-size", "16", "--num-attention-heads", "2", "--use-cpu"]


@pytest.mark.parametrize(
    ("command", "recipe", "batch"), [(plan, "accelerated", "16"), (plan, "basic", "16"), (plan, "basic", "64"), (profile, "accelerated", "16")]
)
def test_what_is_evaluated_is_the_end_of_a_plan_alone(
    command: Callable[..., Any], recipe: str, batch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its beginning, for a CPU; of several steps and of one. test_learning_rate.py looks at find-learning-rate.

    Fails when: a run evaluates where its settings say so; or the plan of basic.py, whose loop is its own, goes on behind its last step.
    """
    calls, evaluate = list[int](), tk.eval_with_gather
    monkeypatch.setattr(tk, "eval_with_gather", lambda *values: calls.append(1) or evaluate(*values))
    often = ["--eval-strategy", "steps", "--eval-on-start"] if recipe == "accelerated" else ["--save-steps", "1"]
    words = ["--dataset", rows(tmp_path, 40), *TINY, *often, "--eval-steps", "1", "--per-device-train-batch-size", batch]
    main, config = read_recipe(RECIPE.with_name(f"{recipe}.py"), [*words, "--num-train-epochs", "1" if command is plan else "20"])
    assert command(main, config, *[1] * (command is profile)) is not None
    in_a_plan = 2 if find_heap() else 1  # before the steps, for what that leaves in the heap, and after them
    assert len(calls) == (in_a_plan if command is plan and recipe == "accelerated" else 0)


def test_a_run_without_evaluation_is_examined_without_one(tmp_path: Path) -> None:
    """Of rows that fit into one packed row, by a recipe that evaluates nothing: the two tokens that try its head are no micro-batch.

    Fails when: doctor evaluates all the same, or takes a part of a row for the row.
    """
    lines = [json.dumps({"prompt": f"what is {number}", "completion": f"it is {number}"}) for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    recipe = RECIPE.with_name("sft.py")
    with Watch(str(recipe)) as watch:
        main, config = read_recipe(recipe, ["--dataset", str(tmp_path / "rows.jsonl"), "--eval-fraction", "0"])
        report = examine(main, config, watch, only=("padding",))
    assert report.findings == []
    assert report.outcomes["padding"].note == "0 padded and 12 packed micro-batches"
