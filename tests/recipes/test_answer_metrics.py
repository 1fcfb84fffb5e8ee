"""sft.py and lora.py with --metrics: the answers to held-out prompts, compared at each evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

TINY = [
    "--model", "tiny-llama", "--hidden-size", "32", "--num-hidden-layers", "1", "--vocab-size", "300", "--max-length", "64", "--dataset",
    "rows.jsonl", "--eval-fraction", "0.2", "--num-samples", "0", "--save-strategy", "no",
]  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    lines = [json.dumps({"prompt": f"{number} of {number % 9}:", "completion": " yes"}) + "\n" for number in range(120)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"Number {number}."}) + "\n" for number in range(20)))
    return tmp_path


@pytest.mark.parametrize("recipe", ["sft", "lora"])
def test_the_share_of_right_answers_is_that_of_a_plain_loop(run_recipe: Any, rows: Path, recipe: str) -> None:
    """Learned by heart in a few steps, so that some answers are right. Fails when: `answer_metrics` is not in the logged values,
    or the answers are those of before the training."""
    more = ["--learning-rate", "0.03", "--max-steps", "40", "--eval-strategy", "steps", "--eval-steps", "20", "--use-cpu"]
    more += ["--metrics", "exact_match,rouge", "--metric-for-best-model", "eval_rougeL", "--answer-max-new-tokens", "6"]
    run = run_recipe(recipe, *TINY, *more, *(["--no-use-peft"] if recipe == "lora" else []))
    assert run.code == 0, run.err
    found = [event["eval_exact_match"] for event in run.metrics if "eval_exact_match" in event]
    assert len(found) == 3
    assert found[0] == 0
    model = AutoModelForCausalLM.from_pretrained(run.output_dir / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run.output_dir / "model")
    right = []
    for number in range(0, 120, 3):
        ids = tokenizer(f"{number} of {number % 9}:", return_tensors="pt")
        answer = model.generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=tokenizer.pad_token_id)[0, ids["input_ids"].shape[1] :]
        right.append(tokenizer.decode(answer, skip_special_tokens=True).strip() == "yes")
    assert found[-1] == pytest.approx(sum(right) / len(right), abs=0.2)
    assert found[-1] > 0.5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--answer-max-new-tokens", "6"], "without metrics of answers"),
        (["--metrics", "exact_match", "--eval-strategy", "no"], "--eval-strategy no"),
        (["--metrics", "nothing_like_that"], "nothing_like_that"),
        (["--metrics", "exact_match", "--dataset", "texts.jsonl"], "no prompt"),
    ],
    ids=["no metrics", "no evaluation", "unknown", "no prompts"],
)
def test_what_compares_nothing_is_refused(run_recipe: Any, rows: Path, flags: list[str], message: str) -> None:
    """Before the first step, with code 2. Fails when: the rule of the setting is dropped."""
    run = run_recipe("sft", *TINY, *flags, "--max-steps", "2")
    assert run.code == 2, run.out + run.err
    assert message in run.err
