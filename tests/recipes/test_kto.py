"""recipes/kto.py: what it learns, on rows of its own kind, on ranks, and what it saves, read by transformers alone."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import toolkit as tk
from toolkit import checkpoint as ckpt

pytestmark = pytest.mark.warm

TINY = ["--hidden-size", "32", "--num-hidden-layers", "1", "--vocab-size", "300", "--max-length", "48", "--save-strategy", "no", "--num-samples", "0"]
PROMPTS = 6


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows of prompt, completion and label. Answers that count upwards are wanted."""
    (tmp_path / "rows").mkdir()
    for name, numbers in (("train", range(60)), ("validation", range(60, 60 + PROMPTS))):
        lines = [
            {"prompt": f"Count from {i}:\n", "completion": " ".join(map(str, counted)), "label": label}
            for i in numbers
            for label, counted in ((True, [i, i + 1, i + 2]), (False, [i + 2, i + 1]))
        ]
        (tmp_path / f"rows/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "rows"


def test_it_learns_from_rows_with_a_label_which_answers_are_wanted(run_recipe: Any, rows: Path) -> None:
    """Fails when: the mark is read the wrong way round on the way to the loss."""
    flags = ["--learning-rate", "0.003", "--per-device-train-batch-size", "8", "--num-train-epochs", "3", "--dropout", "0"]
    run = run_recipe("kto", "--dataset", "rows", *TINY, *flags)
    assert run.code == 0, run.err
    assert run.summary["eval_reward_auc"] > 0.95
    assert run.summary["eval_reward_margin"] > 0.3
    assert "eval_reward_auc: chance 0.5000" in run.out
    assert any(event.get("kl", 0) > 0 for event in run.metrics)


@pytest.mark.parametrize("recipe", ["dpo", "kto"])
def test_a_run_does_not_go_on_with_another_reference(run_recipe: Any, rows: Path, tmp_path: Path, recipe: str) -> None:
    """The policy comes from the checkpoint, the reference from --model. Fails when: its files may change in between."""
    base = tmp_path / "base"
    tokenizer = tk.train_tokenizer([(rows / "train.jsonl").read_text()], 300)
    model = tk.load_model("AutoModelForCausalLM", tk.ModelConfig(hidden_size=32, num_hidden_layers=1), tokenizer)
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    pair = {"prompt": "Count:", "chosen": " 1 2", "rejected": " 2 1"}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({**pair, "prompt": f"Count {i}:"}) + "\n" for i in range(30)))
    flags = ["--dataset", str(tmp_path / "pairs.jsonl"), "--model", str(base), "--max-steps", "4", "--save-steps", "2", "--num-samples", "0"]
    flags += ["--max-length", "48", "--eval-fraction", "0"]
    assert run_recipe(recipe, *flags).code == 0
    shutil.rmtree(tmp_path / "out/checkpoints/step-4")
    assert run_recipe(recipe, *flags, "--resume").code == 0
    shutil.rmtree(tmp_path / "out/checkpoints/step-4")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.01)
    model.save_pretrained(base)
    refused = run_recipe(recipe, *flags, "--resume")
    assert refused.code == 2, refused.err
    assert re.search(r"--model, .*reference.*--allow-change model", refused.err)
    assert run_recipe(recipe, *flags, "--resume", "--allow-change", "model").code == 0


@pytest.mark.parametrize("recipe", ["dpo", "kto"])
def test_an_evaluation_that_is_made_up_for_has_the_reference_that_moved(run_recipe: Any, rows: Path, tmp_path: Path, recipe: str) -> None:
    """After a resume, before its first step: the metrics of the evaluation that a deadline would have cut off. Fails when: the
    reference is put back in the first step only (the line of `keep_reference` is missing)."""
    pair = {"prompt": "Count:", "chosen": " 1 2", "rejected": " 2 1"}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({**pair, "prompt": f"Count {i}:"}) + "\n" for i in range(30)))
    flags = ["--dataset", str(tmp_path / "pairs.jsonl"), *TINY, "--save-strategy", "steps", "--save-steps", "2", "--eval-strategy", "steps"]
    flags += ["--max-steps", "4", "--eval-steps", "2", "--learning-rate", "0.01", "--beta", "0.5"]
    flags += ["--sync-ref-model", "--ref-model-sync-steps", "1", "--warmup-steps", "0"]
    assert run_recipe(recipe, *flags, "--stop-at-step", "2").code == 75
    path = tmp_path / "out/checkpoints/step-2"
    state = ckpt.load_checkpoint(path)
    state.run["evaluation_is_owed"] = True
    shutil.rmtree(path)
    ckpt.save_checkpoint(path.parent, 2, state)
    resumed = run_recipe(recipe, *flags, "--resume")
    assert resumed.code == 0, resumed.err
    losses = [event["eval_loss"] for event in resumed.metrics if event["step"] == 2 and "eval_loss" in event]
    assert len(losses) == 2
    assert losses[1] == losses[0]


def test_a_saved_model_has_the_rewards_that_were_evaluated(run_recipe: Any, rows: Path, tmp_path: Path) -> None:
    """Of an adapter-free run against its first weights. Fails when: other weights are saved, or evaluation takes mismatched answers."""
    base = tmp_path / "base"
    tokenizer = tk.train_tokenizer([(rows / "train.jsonl").read_text()], 300)
    config = tk.ModelConfig(hidden_size=32, num_hidden_layers=1)
    tk.load_model("AutoModelForCausalLM", config, tokenizer).save_pretrained(base)
    tokenizer.save_pretrained(base)
    flags = ["--learning-rate", "0.003", "--max-steps", "6", "--model", str(base), "--beta", "0.2", "--reference", "model"]
    run = run_recipe("kto", "--dataset", "rows", *flags, "--max-length", "48", "--save-strategy", "no", "--num-samples", "0")
    assert run.code == 0, run.err
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (run.output_dir / "model", base)]
    tokenizer = AutoTokenizer.from_pretrained(run.output_dir / "model")
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for line in (rows / "validation.jsonl").read_text().splitlines():
        row = json.loads(line)
        whole = tokenizer(row["prompt"] + row["completion"], return_offsets_mapping=True)
        start = sum(end <= len(row["prompt"]) for _, end in whole["offset_mapping"])
        ids = torch.tensor([[*whole["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logps = [model(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[start - 1 :].sum() for model in models]
        rewards[row["label"]].append(0.2 * float(logps[0] - logps[1]))
    assert len(rewards[True]) == len(rewards[False]) == PROMPTS
    for kind, label in (("desirable", True), ("undesirable", False)):
        assert run.summary[f"eval_rewards_{kind}"] == pytest.approx(sum(rewards[label]) / PROMPTS, rel=1e-3, abs=1e-5)


def test_two_ranks_train_and_evaluate_what_one_does(run_recipe: Any, rows: Path, tmp_path: Path) -> None:
    """1 x 6 and 2 x 2 (three micro-batches, so that one rank fills up): losses, norms, z and evaluation to 1e-5. Wanted answers are
    what the model's first steps raise, so z is above 0.

    Fails when: z is not summed over the ranks, or a padding micro-batch counts in it.
    """
    flags = ["--dataset", "rows", *TINY, "--learning-rate", "0.003", "--max-steps", "8", "--global-batch-size", "6", "--dropout", "0"]
    flags += ["--logging-steps", "1", "--use-cpu", "--undesirable-weight", "0.1", "--warmup-steps", "0"]
    one = run_recipe("kto", *flags, "--per-device-train-batch-size", "6", output_dir="one")
    assert one.code == 0, one.err
    two = tmp_path / "two"
    code = launched(tmp_path, ["--processes", "2"], [*flags, "--per-device-train-batch-size", "2", "--output-dir", str(two)])
    assert code == 0
    events = [json.loads(line) for line in (two / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "grad_norm", "kl", "eval_loss", "eval_kl", "eval_reward_auc"):
        expected, found = ([event[name] for event in each if name in event] for each in (one.metrics, events))
        assert expected
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), name
    assert sum(event.get("kl", 0.0) > 1e-3 for event in one.metrics) >= 2


def launched(folder: Path, placement: list[str], flags: list[str]) -> int:
    """`toolkit train kto` in a process group of its own."""
    recipe = str(Path(__file__).resolve().parents[2] / "recipes/kto.py")
    with open(folder / "two.out", "wb") as out:
        command = [sys.executable, "-m", "toolkit", "train", recipe, *placement, *flags]
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            return process.wait(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
