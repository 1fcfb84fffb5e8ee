"""Every recipe, killed with SIGKILL at any moment from its start on, with cold caches: the last life ends with the same bits."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

WORDS = ["red", "green", "blue", "round", "square", "small", "large", "old", "new", "bright", "dark", "warm", "cold", "north", "south"]
SHARED = [
    "--vocab-size", "300", "--hidden-size", "32", "--num-hidden-layers", "1", "--num-attention-heads", "2", "--intermediate-size", "64",
    "--max-length", "96", "--max-steps", "8", "--logging-steps", "1", "--eval-steps", "4", "--save-steps", "2", "--dropout", "0.1",
    "--per-device-train-batch-size", "2", "--gradient-accumulation-steps", "3", "--use-cpu",
]  # fmt: skip
LANGUAGE = ["--model", "tiny-llama", "--num-samples", "1", "--sample-max-new-tokens", "4"]
ROLLOUTS = [*LANGUAGE[:4], "--num-generations", "2", "--max-completion-length", "8", "--reward-funcs", "regex", "--reward-pattern", "[a-m]"]
RECIPES = {
    "embedding": [],
    "pretrain": LANGUAGE,
    "sft": LANGUAGE,
    "diffusion": [*LANGUAGE, "--answer-length", "16"],
    "distill": [*LANGUAGE, "--teacher-top-k", "8"],
    "distill_classifier": ["--match-attention", "--attention-dropout", "0"],
    "lora": [*LANGUAGE, "--lora-dropout", "0.1"],
    "dpo": [*LANGUAGE, "--pair-layout", "auto"],
    "kto": LANGUAGE,
    "reward": ["--model", "tiny-llama"],
    "grpo": [*ROLLOUTS, "--beta", "0.05"],
    "ppo": ROLLOUTS,
    "reranker": [],
    "multiple_choice": [],
    "masked_lm": ["--mlm-probability-end", "0.1"],
    "accelerated": [],
    "question_answering": ["--max-length", "40", "--doc-stride", "8", "--num-samples", "1"],
    "token_classification": [],
    "seq2seq": ["--model", "tiny-t5", "--num-samples", "1", "--max-target-length", "12"],
    "zero": [],
}
# Without the long form: of each kind of state one, a tokenizer, a reference, a teacher, rollouts, negatives.
SHORT = ("pretrain", "dpo", "distill", "grpo", "embedding")


def _sentence(numbers: random.Random, words: int) -> str:
    return " ".join(numbers.choices(WORDS, k=words))


def _rows(recipe: str) -> list[dict]:
    numbers = random.Random(0)
    rows = []
    for i in range(60):
        said, other = _sentence(numbers, numbers.randrange(3, 12)), _sentence(numbers, numbers.randrange(3, 12))
        asked = f"{i}: {_sentence(numbers, numbers.randrange(2, 8))}"
        if recipe in ("pretrain", "masked_lm"):
            rows.append({"text": f"{asked}. {said}"})
        elif recipe in ("accelerated", "zero", "distill_classifier"):
            rows.append({"text": f"{asked}. {said}", "label": WORDS[i % 3]})
        elif recipe == "question_answering":
            context, word = f"{asked}. {said}", said.split()[0]
            rows.append({"question": f"Which is {i}?", "context": context, "answers": {"text": [word], "answer_start": [context.index(word)]}})
        elif recipe == "token_classification":
            rows.append({"tokens": said.split(), "tags": [f"length {len(word)}" for word in said.split()]})
        elif recipe in ("sft", "distill", "diffusion", "lora"):
            rows.append({"prompt": asked, "completion": said})
        elif recipe == "reranker":
            rows.append({"query": asked, "positive": said, "negative": other})
        elif recipe == "multiple_choice":
            rows.append({"question": asked, "choices": [said, other, asked][: 2 + i % 2], "label": i % 2})
        elif recipe == "embedding":
            rows.append({"anchor": asked, "positive": said, "negatives": [other] * (i % 2)})
        elif recipe == "kto":
            rows.append({"prompt": asked, "completion": said, "label": i % 2 == 0})
        elif recipe in ("grpo", "ppo"):
            rows.append({"prompt": asked})
        elif recipe == "seq2seq":
            rows.append({"source": asked, "target": said})
        else:
            rows.append({"prompt": asked, "chosen": said, "rejected": other})
    return rows


def _outcome(folder: Path) -> tuple:
    files = {path.name: path.read_bytes() for path in [*folder.glob("model/*.safetensors"), *folder.glob("rollouts/*")]}
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [(event["step"], event.get("loss"), event.get("grad_norm"), event.get("eval_loss")) for event in events]
    return files, losses


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES if os.environ.get("FAULT_TRIALS") else SHORT)
def test_a_recipe_killed_again_and_again_with_cold_caches_ends_with_the_same_bits(
    fork_run, tally, chance, count, root: Path, tmp_path: Path, recipe: str
) -> None:
    """Up to three kills a loop, each after a random share of the time that an undisturbed run takes: while rows are read, a
    tokenizer is trained, rows are tokenized, a reference is computed, a checkpoint or the model is written.

    Fails when: a cache that a killed process left half-made is taken for a whole one, or a checkpoint lacks part of the state.
    """
    line = tally("F23", f"SIGKILL up to three times from the start on, cold caches: recipes/{recipe}.py")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _rows(recipe)))
    flags = ["--dataset", "rows.jsonl", "--eval-fraction", "0.2", *SHARED, *RECIPES[recipe]]
    script, lives = str(root / f"recipes/{recipe}.py"), []

    def live(name: str, number: int, *more: str, kill_after: float | None = None) -> int:
        out = tmp_path / f"{name}.{number}.txt"
        environment = {"HF_DATASETS_CACHE": str(tmp_path / f"{name}-cache")}
        process = fork_run(script, [*flags, *more, "--output-dir", name], out, tmp_path, environment)
        process.start()
        try:
            process.join(120 if kill_after is None else kill_after)
            assert kill_after is not None or not process.is_alive(), f"no end in 120 s: {out.read_text()[-2000:]}"
        finally:
            if process.is_alive():
                os.killpg(process.pid, signal.SIGKILL)
                process.join(30)
        return process.exitcode

    began = time.monotonic()
    assert live("whole", 0) == 0, (tmp_path / "whole.0.txt").read_text()
    seconds, whole = time.monotonic() - began, _outcome(tmp_path / "whole")
    for loop in range(count(1, 30)):
        name, number = f"loop-{loop}", 0
        with line.trial(name):
            while number < 3 and live(name, number, "--resume", kill_after=chance.uniform(0.05, 1.0) * seconds) == -signal.SIGKILL:
                number += 1
            code = live(name, 3, "--resume")
            assert code == 0, (tmp_path / f"{name}.3.txt").read_text()
            assert _outcome(tmp_path / name) == whole
        lives.append(number + 1)
    line.measured = f"{sum(lives)} lives"
    line.check()
