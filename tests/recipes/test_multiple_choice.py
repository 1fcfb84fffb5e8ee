"""recipes/multiple_choice.py as users run it: what it saves is what was evaluated, an adapter of it too, and mistakes end with 2."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMultipleChoice, AutoTokenizer

import toolkit as tk

QUESTIONS = 9
FLAGS = ["--max-train-examples", "24", "--max-eval-examples", str(QUESTIONS), "--max-steps", "3", "--max-length", "64"]
FLAGS += ["--learning-rate", "0.02", "--save-strategy", "no"]
SHAPE = ["--hidden-size", "32", "--num-hidden-layers", "1"]


def merge(adapter: Path, into: Path) -> None:
    from typer.testing import CliRunner

    from toolkit.cli.main import app

    done = CliRunner().invoke(app, ["merge", str(adapter), "--into", str(into)])
    assert done.exit_code == 0, done.output


def evaluate(folder: Path, *more: str) -> dict[str, Any]:
    from typer.testing import CliRunner

    from toolkit.cli.main import app

    flags = ["evaluate", str(folder), "--json", "--per-device-eval-batch-size", "1", "--device", "cpu", *more]
    found = CliRunner().invoke(app, flags)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_a_saved_model_chooses_as_it_was_evaluated(run_recipe: Any) -> None:
    """Read by transformers alone, choice by choice, and by `toolkit evaluate`.

    Fails when: a choice is cut before its question, "ForMultipleChoice" is not in `AUTO_CLASSES`, or `toolkit evaluate RUN --split
    NAME` is of another data set than the run's.
    """
    run = run_recipe("multiple_choice", *FLAGS, *SHAPE)
    assert run.code == 0, run.err
    tokenizer = AutoTokenizer.from_pretrained(run.output_dir / "model")
    model = AutoModelForMultipleChoice.from_pretrained(run.output_dir / "model").eval()
    losses, hits = [], 0
    for row in tk.load_splits("stdlib:choose")["validation"].select(range(QUESTIONS)):
        pairs = [tokenizer(row["question"], choice, truncation="only_first", max_length=64, return_tensors="pt") for choice in row["choices"]]
        with torch.no_grad():
            scores = torch.stack([model(**{name: values[None] for name, values in pair.items()}).logits[0, 0] for pair in pairs])
        losses.append(torch.nn.functional.cross_entropy(scores[None], torch.tensor([row["label"]])).item())
        hits += int(scores.argmax()) == row["label"]
    assert run.summary["eval_loss"] == pytest.approx(sum(losses) / QUESTIONS, rel=1e-5)
    assert run.summary["eval_accuracy"] == hits / QUESTIONS
    assert "eval_accuracy: chance 0.2500  longest choice" in run.out
    record = evaluate(run.output_dir)
    assert evaluate(run.output_dir, "--split", "validation", "--max-eval-examples", str(QUESTIONS)) == record
    assert (record["task"], record["rows"]) == ("multiple_choice", QUESTIONS)
    for name in ("loss", "accuracy"):
        assert record["metrics"][name] == pytest.approx(run.summary[f"eval_{name}"], rel=1e-5), name


def test_an_adapter_is_evaluated_and_merged_as_it_was_trained(run_recipe: Any, tmp_path: Path) -> None:
    """peft has no name for the task. Merged, it is a model that transformers opens, with the head that was trained.

    Fails when: the class that its adapter_config.json names is not read.
    """
    base = run_recipe("multiple_choice", *FLAGS, *SHAPE, output_dir="base")
    assert base.code == 0, base.err
    run = run_recipe("multiple_choice", *FLAGS, "--model", str(tmp_path / "base/model"), "--use-peft", "--lora-r", "2")
    assert run.code == 0, run.err
    assert not (run.output_dir / "model/model.safetensors").exists()
    metrics = evaluate(run.output_dir)["metrics"]
    assert metrics["loss"] == pytest.approx(run.summary["eval_loss"], rel=1e-5)
    assert run.summary["eval_loss"] != pytest.approx(base.summary["eval_loss"], rel=1e-3)
    merge(run.output_dir, tmp_path / "whole")
    assert AutoModelForMultipleChoice.from_pretrained(tmp_path / "whole").config.architectures == ["BertForMultipleChoice"]
    merged = evaluate(tmp_path / "whole", "--dataset", "stdlib:choose", "--max-length", "64", "--max-eval-examples", str(QUESTIONS))
    assert merged["metrics"]["loss"] == pytest.approx(metrics["loss"], rel=1e-5)


def test_a_question_with_one_choice_ends_the_run_with_file_and_row(run_recipe: Any, tmp_path: Path) -> None:
    """Exit code 2. Fails when: a list of one choice is taken."""
    rows = [{"question": "a?", "choices": ["b", "c"], "answer": "A"}, {"question": "d?", "choices": ["e"], "answer": "A"}]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = run_recipe("multiple_choice", *SHAPE, "--dataset", "asked.jsonl", "--eval-fraction", "0")
    assert run.code == 2
    assert re.search(r"asked\.jsonl:2: choices .*\bone\b", run.err)
