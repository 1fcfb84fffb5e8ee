"""recipes/diffusion.py: what it learns, what its model writes, and that what it logs is what `toolkit evaluate` finds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.warm

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "one", "dog", "ran", "over", "this", "hill"]
TINY = ["--hidden-size", "32", "--num-hidden-layers", "2", "--vocab-size", "300", "--max-length", "48", "--save-strategy", "no", "--use-cpu"]
QUICK = ["--per-device-train-batch-size", "8", "--eval-steps", "1000", "--num-samples", "1", "--sample-max-new-tokens", "4"]


def texts_of(count: int = 120) -> list[str]:
    """Sentences in which a word follows from the one before."""
    return [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(4 + i % 9)) for i in range(count)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts_of()))
    return tmp_path / "rows.jsonl"


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """A word, and the next two or four."""
    lines = [{"prompt": f"{WORDS[i % 13]}:", "completion": " ".join(WORDS[(i + j) % 13] for j in range(1, 3 + 2 * (i % 2)))} for i in range(26)] * 6
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "answers.jsonl"


def toolkit(*arguments: str) -> str:
    run = subprocess.run([sys.executable, "-m", "toolkit", *arguments], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_from_scratch_it_beats_the_frequency_of_tokens_and_fills_gaps(run_recipe: Any, rows: Path) -> None:
    """A packed run; `evaluate` reads padded rows.

    Fails when: an evaluation hides what depends on the packing or the batch size, or the saved model forgets that it sees both sides.
    """
    run = run_recipe("diffusion", "--dataset", str(rows), *TINY, *QUICK, "--learning-rate", "0.02", "--max-steps", "200")
    assert run.code == 0, run.err
    unigram = json.loads((run.output_dir / "summary.json").read_text())["baselines"]["unigram"]
    assert run.summary["eval_loss"] < 0.7 * unigram
    found = json.loads(toolkit("evaluate", str(run.output_dir), "--per-device-eval-batch-size", "3", "--json", "--device", "cpu"))
    assert found["task"] == "diffusion"
    for name in ("loss", "loss_stderr", "perplexity", "masked_accuracy"):
        assert found["metrics"][name] == pytest.approx(run.summary[f"eval_{name}"], rel=1e-4)
    filled = toolkit("generate", str(run.output_dir), "--prompt", "the cat<|mask|>*2 a mat while", "--device", "cpu")
    assert filled.startswith("the cat")
    assert filled.strip().endswith("a mat while")
    card = (run.output_dir / "model/README.md").read_text()
    assert "toolkit generate" in card
    assert "AutoModelForCausalLM" not in card


def test_answers_are_learned_with_their_end(run_recipe: Any, answers: Path) -> None:
    """Prompts with answers of two lengths. Fails when: what fills an answer up is not learned, so that it never ends."""
    flags = ["--learning-rate", "0.01", "--max-steps", "150", "--answer-length", "12", "--eval-fraction", "0.2", "--no-packing"]
    run = run_recipe("diffusion", "--dataset", str(answers), *TINY, *QUICK, *flags)
    assert run.code == 0, run.err
    prompts = [argument for word in WORDS[:6] for argument in ("--prompt", f"{word}:")]
    said = toolkit("generate", str(run.output_dir), *prompts, "--raw", "--json", "--device", "cpu").splitlines()
    texts = [json.loads(line)["text"] for line in said]
    assert sum(len(text.split()) <= 5 for text in texts) >= 4, texts
    shown = toolkit("inspect", str(answers), "--task", "diffusion", "--model", str(run.output_dir / "model"))
    assert "[[" in shown
    refused = subprocess.run([sys.executable, "-m", "toolkit", "generate", str(run.output_dir), "--prompt", "a", "--top-p", "0.9"], capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2
    assert "--top-p" in refused.stderr


def test_from_a_causal_model_with_an_adapter_annealed_and_merged(run_recipe: Any, rows: Path, tmp_path: Path) -> None:
    """Fails when: the adapter's directory does not say that its base sees both sides, or the causal start is lost."""
    causal = run_recipe("pretrain", "--dataset", str(rows), *TINY, "--sample-by", "line", *QUICK, "--learning-rate", "0.01", "--max-steps", "120", output_dir="causal")
    assert causal.code == 0, causal.err
    flags = ["--model", str(tmp_path / "causal/model"), "--use-peft", "--attention-annealing", "0.5", "--optim", "adamw", "--learning-rate", "0.005", "--max-steps", "30"]
    run = run_recipe("diffusion", "--dataset", str(rows), *QUICK, *flags, "--max-length", "48", "--save-strategy", "no", "--use-cpu", "--eval-on-start")
    assert run.code == 0, run.err
    assert run.summary["eval_loss"] < run.summary["first_eval_loss"]
    toolkit("merge", str(run.output_dir / "model"), "--into", str(tmp_path / "merged"))
    for model in (run.output_dir, tmp_path / "merged"):
        found = json.loads(toolkit("evaluate", str(model), "--config", str(run.output_dir / "config.yaml"), "--json", "--device", "cpu"))
        assert found["task"] == "diffusion"
        assert found["metrics"]["loss"] == pytest.approx(run.summary["eval_loss"], rel=1e-3)
    sft = run_recipe("sft", "--dataset", str(rows), "--model", str(tmp_path / "merged"), "--max-steps", "1", "--use-cpu", output_dir="sft")
    assert sft.code == 2
    assert "bidirectional" in sft.err
