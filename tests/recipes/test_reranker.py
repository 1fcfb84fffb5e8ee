"""recipes/reranker.py: sentence-transformers opens what it saves, with the same scores, and what that saves trains on here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import toolkit as tk

LISTS = 6
FLAGS = ["--max-train-examples", "24", "--max-eval-examples", str(LISTS), "--max-steps", "3", "--hidden-size", "32"]
FLAGS += ["--num-hidden-layers", "1", "--max-length", "64", "--learning-rate", "0.02", "--save-strategy", "no"]


def pairs_of_held_out_lists() -> tuple[list[tuple[str, str]], list[int]]:
    rows = tk.load_splits(tk.DataConfig(dataset="stdlib:rank"))["validation"].select(range(LISTS))
    pairs = [(row["query"], document) for row in rows for document in row["documents"]]
    return pairs, [label for row in rows for label in row["labels"]]


def test_a_saved_model_scores_as_it_was_evaluated(run_recipe: Any) -> None:
    """Read by transformers alone, pair by pair. Fails when: `_truncated` takes the query's tokens for the document's."""
    run = run_recipe("reranker", *FLAGS, "--ranking-loss", "bce")
    assert run.code == 0, run.err
    tokenizer = AutoTokenizer.from_pretrained(run.output_dir / "model")
    model = AutoModelForSequenceClassification.from_pretrained(run.output_dir / "model").eval()
    assert model.config.num_labels == 1
    pairs, labels = pairs_of_held_out_lists()
    with torch.no_grad():
        scores = torch.stack([
            model(**tokenizer(*pair, truncation=True, max_length=64, return_tensors="pt")).logits[0, 0] for pair in pairs
        ])  # fmt: skip
    loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, torch.tensor(labels).float())
    assert run.summary["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)
    by_list = zip(scores.split(len(pairs) // LISTS), torch.tensor(labels).split(len(pairs) // LISTS), strict=True)
    reciprocal = [1 / (1 + int((of[0] >= of[0][of[1] == 1]).sum()) - 1) for of in by_list]
    assert run.summary["eval_mrr"] == pytest.approx(sum(reciprocal) / LISTS, rel=1e-6)
    assert "eval_ndcg_at_10: any order 0.4942" in run.out


@pytest.mark.slow
def test_sentence_transformers_opens_it_with_the_same_scores_and_what_that_saves_trains_on_here(
    run_recipe: Any, tmp_path: Path
) -> None:
    """To 1e-6, with long documents too. Fails when: the tokenizer keeps its chat template, or its own longest length."""
    cross_encoders = pytest.importorskip("sentence_transformers.cross_encoder")
    run = run_recipe("reranker", *FLAGS)
    assert run.code == 0, run.err
    theirs = cross_encoders.CrossEncoder(str(run.output_dir / "model"), device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(run.output_dir / "model")
    model = AutoModelForSequenceClassification.from_pretrained(run.output_dir / "model").eval()
    pairs, _ = pairs_of_held_out_lists()
    with torch.no_grad():
        ours = torch.stack([
            model(**tokenizer(*pair, truncation=True, max_length=64, return_tensors="pt")).logits[0, 0] for pair in pairs
        ])  # fmt: skip
    found = torch.from_numpy(theirs.predict(pairs, activation_fn=torch.nn.Identity(), show_progress_bar=False))
    torch.testing.assert_close(found, ours, rtol=0, atol=1e-6)

    theirs.save_pretrained(str(tmp_path / "theirs"))
    flags = [flag for flag in FLAGS if flag not in ("--hidden-size", "32", "--num-hidden-layers", "1")]
    on = run_recipe("reranker", *flags, "--model", str(tmp_path / "theirs"), "--eval-on-start", output_dir="on")
    assert on.code == 0, on.err
    first = next(event for event in on.metrics if "eval_loss" in event)
    assert first["step"] == 0
    for name in ("eval_loss", "eval_ndcg_at_10", "eval_mrr"):
        assert first[name] == pytest.approx(run.summary[name], rel=1e-6), name


def test_evaluate_gives_what_training_logged_and_refuses_a_classifier(run_recipe: Any, tmp_path: Path) -> None:
    """Fails when: `ranking` is no task of a model with one label."""
    from typer.testing import CliRunner

    from toolkit.cli.main import app

    run = run_recipe("reranker", *FLAGS, "--ranking-loss", "listnet")
    assert run.code == 0, run.err
    flags = ["evaluate", str(run.output_dir), "--json", "--per-device-eval-batch-size", "1", "--device", "cpu"]
    found = CliRunner().invoke(app, flags)
    assert found.exit_code == 0, found.output
    record = json.loads(found.stdout)
    assert record["task"] == "ranking"
    assert record["rows"] == LISTS
    for name, value in record["metrics"].items():
        assert value == pytest.approx(run.summary[f"eval_{name}"], rel=1e-5), name
