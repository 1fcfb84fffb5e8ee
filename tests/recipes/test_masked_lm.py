"""recipes/masked_lm.py: what it learns, and that what it logs is what `toolkit evaluate` finds, packed or padded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForMaskedLM

pytestmark = pytest.mark.warm

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "one", "dog", "ran", "over", "this", "hill"]
TINY = ["--hidden-size", "32", "--num-hidden-layers", "1", "--vocab-size", "300", "--max-length", "48", "--save-strategy", "no", "--use-cpu"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Sentences in which a word follows from the one before."""
    lines = [{"text": " ".join(WORDS[(i + j) % len(WORDS)] for j in range(4 + i % 9))} for i in range(160)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "rows.jsonl"


def toolkit(*arguments: str) -> str:
    run = subprocess.run([sys.executable, "-m", "toolkit", *arguments], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_it_beats_the_frequency_of_tokens_and_is_evaluated_alike_afterwards(run_recipe: Any, rows: Path) -> None:
    """A packed run with whole words and a share that changes; `evaluate` reads padded rows, and `inspect` marks what is hidden.

    Fails when: an evaluation's masks depend on the packing, on the batch size or on anything but the seed and the document, or
    `evaluate` does not take the masking settings of the run.
    """
    flags = ["--mlm-probability", "0.3", "--mlm-probability-end", "0.2", "--whole-word-mask", "--learning-rate", "0.01", "--seed", "7"]
    run = run_recipe("masked_lm", "--dataset", str(rows), *TINY, *flags, "--num-train-epochs", "30", "--dropout", "0", "--eval-steps", "1000")
    assert run.code == 0, run.err
    unigram = json.loads((run.output_dir / "summary.json").read_text())["baselines"]["unigram"]
    assert run.summary["eval_loss"] < 0.8 * unigram
    AutoModelForMaskedLM.from_pretrained(run.output_dir / "model")
    found = json.loads(toolkit("evaluate", str(run.output_dir), "--per-device-eval-batch-size", "3", "--json", "--device", "cpu"))
    assert found["task"] == "masked_lm"
    for name in ("loss", "pseudo_perplexity", "masked_accuracy"):
        assert found["metrics"][name] == pytest.approx(run.summary[f"eval_{name}"], rel=1e-5)
    shown = toolkit("inspect", str(rows), "--task", "masked_lm", "--model", str(run.output_dir / "model"))
    assert "with tokens to predict marked" in shown
    assert "[[" in shown


def test_a_decoder_is_refused_and_an_encoder_that_cannot_be_packed_says_what_to_type(run_recipe: Any, rows: Path) -> None:
    """Fails when: a tokenizer without a mask token is trained on another token, or Roberta's rows are packed."""
    run = run_recipe("masked_lm", "--dataset", str(rows), "--model", "tiny-llama", "--max-steps", "1")
    assert run.code == 2
    assert "tiny-bert" in run.err or "AutoModelForMaskedLM" in run.err


def test_an_adapter_is_evaluated_and_merged_as_it_was_trained(run_recipe: Any, rows: Path, tmp_path: Path) -> None:
    """peft has no name for the task. Fails when: the class that its adapter_config.json names is not read."""
    flags = ["--dataset", str(rows), "--max-length", "48", "--save-strategy", "no", "--use-cpu", "--eval-strategy", "epoch", "--learning-rate", "0.01"]
    base = run_recipe("masked_lm", *flags, *TINY, "--max-steps", "3", output_dir="base")
    assert base.code == 0, base.err
    adapter = ["--model", str(tmp_path / "base/model"), "--use-peft", "--lora-r", "4", "--optim", "adamw", "--num-train-epochs", "3"]
    run = run_recipe("masked_lm", *flags, *adapter)
    assert run.code == 0, run.err
    assert run.summary["eval_loss"] < base.summary["eval_loss"] - 0.05
    assert not (run.output_dir / "model/model.safetensors").exists()
    toolkit("merge", str(run.output_dir / "model"), "--into", str(tmp_path / "merged"))
    for model in (run.output_dir, tmp_path / "merged"):
        evaluate = ["evaluate", str(model), "--config", str(run.output_dir / "config.yaml"), "--json", "--device", "cpu"]
        found = json.loads(toolkit(*evaluate))
        assert found["task"] == "masked_lm"
        assert found["metrics"]["loss"] == pytest.approx(run.summary["eval_loss"], rel=1e-4)
