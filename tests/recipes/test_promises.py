"""What every recipe promises on its surface."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

pytestmark = pytest.mark.warm

RECIPES = ["basic", "accelerated", "sft", "distill", "distill_classifier", "lora", "dpo", "kto", "reward", "reranker", "multiple_choice", "embedding", "token_classification", "pretrain", "question_answering", "masked_lm", "diffusion", "seq2seq"]
SMALL = ["--hidden-size", "32", "--num-hidden-layers", "2", "--max-train-examples", "120", "--max-eval-examples", "8"]
SMALL_OF = {
    "embedding": [*SMALL, "--max-length", "64", "--two-way", "--matryoshka-dims", "32,8"],
    "basic": [*SMALL, "--max-length", "64"],
    "accelerated": [*SMALL, "--max-length", "64"],
    "sft": [*SMALL, "--max-length", "128", "--num-samples", "1", "--sample-max-new-tokens", "4"],
    "distill": [
        *SMALL, "--dataset", "stdlib:sft", "--max-length", "128", "--num-samples", "1", "--sample-max-new-tokens", "4", "--cross-entropy-share", "0.3",
        "--distillation-loss", "jsd", "--temperature", "1.5",
    ],
    "distill_classifier": [*SMALL, "--max-length", "64", "--match-attention", "--attention-dropout", "0", "--temperature", "1.5"],
    "lora": [*SMALL, "--max-length", "128", "--num-samples", "1", "--sample-max-new-tokens", "4", "--lora-dropout", "0.1"],
    "dpo": [*SMALL, "--max-length", "128", "--num-samples", "1", "--sample-max-new-tokens", "4", "--pair-layout", "auto"],
    "kto": [*SMALL, "--max-length", "128", "--num-samples", "1", "--sample-max-new-tokens", "4", "--desirable-weight", "1.3"],
    "question_answering": [*SMALL, "--max-length", "64", "--doc-stride", "16", "--num-samples", "1"],
    "reward": [*SMALL, "--max-length", "128", "--center-rewards-coefficient", "0.01"],
    "reranker": [*SMALL, "--max-length", "64", "--ranking-loss", "listnet"],
    "multiple_choice": [*SMALL, "--max-length", "64"],
    "token_classification": [*SMALL, "--max-length", "64", "--label-all-tokens"],
    "seq2seq": [*SMALL, "--max-length", "64", "--max-target-length", "16", "--num-samples", "1", "--label-smoothing-factor", "0.1"],
    "pretrain": [
        "--hidden-size", "32", "--num-hidden-layers", "2", "--max-train-examples", "12", "--max-eval-examples", "1", "--max-length", "64",
        "--vocab-size", "300", "--num-samples", "1", "--sample-max-new-tokens", "4", "--eval-steps", "100",
    ],
    "diffusion": [
        *SMALL, "--dataset", "stdlib:sft", "--max-length", "128", "--num-samples", "1", "--sample-max-new-tokens", "4", "--answer-length", "24",
        "--per-device-train-batch-size", "4",
    ],
    "masked_lm": [
        "--hidden-size", "32", "--num-hidden-layers", "2", "--max-train-examples", "4", "--max-eval-examples", "1", "--max-length", "64",
        "--vocab-size", "300", "--eval-steps", "100", "--mlm-probability-end", "0.15", "--whole-word-mask",
    ],
}  # fmt: skip


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def check_what_it_writes(run, recipe: str, steps: int) -> None:
    model_config = "model/adapter_config.json" if recipe == "lora" else "model/config.json"
    for name in ("config.yaml", "metrics.jsonl", "summary.json", model_config, "model/README.md", "model/tokenizer.json"):
        assert (run.output_dir / name).exists(), name
    events = [event for event in run.metrics if "loss" in event]
    assert [event["step"] for event in events] == list(range(1, steps + 1))
    assert {"step", "epoch", "examples", "time", "loss", "grad_norm", "learning_rate"} <= events[0].keys()
    assert all(0 < event["data_wait"] < 1 for event in events)
    assert run.summary["eval_loss"] > 0
    changed = run.out.split("settings that differ from the defaults")[1]
    assert "gradient_accumulation_steps" in changed.split("\n\n")[0]
    assert ("\nSaved " in run.out) == (recipe != "basic")  # which has no Accelerator


def check_export(stopped: Path, whole: Path) -> None:
    """`toolkit export` of an interrupted run: the files that a whole run's model has, and the checkpoint's weights."""
    words = ["export", str(stopped), "--into", str(stopped.with_name("exported"))]
    done = subprocess.run([sys.executable, "-m", "toolkit", *words], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in stopped.with_name("exported").iterdir()} == {path.name for path in (whole / "model").iterdir()}
    used = [(folder / "README.md").read_text().split("## How to use it")[1].split("\n## ")[0] for folder in (stopped.with_name("exported"), whole / "model")]
    exported_as, written_as = (re.sub("^name ?=.*", "", each, flags=re.MULTILINE) for each in used)
    assert exported_as == written_as
    [checkpoint] = stopped.glob("checkpoints/step-*")
    saved = {name.replace(".default", ""): tensor for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    [weights] = stopped.with_name("exported").glob("*.safetensors")
    exported = load_file(weights)
    shared = saved.keys() & exported.keys()  # an adapter's file has frozen weights too where its base has random ones
    assert shared
    assert all(torch.equal(saved[name], exported[name]) for name in shared)


def test_two_runs_of_basic_give_bit_identical_weights_and_write_what_they_promise(run_recipe) -> None:
    """Of the other recipes, a run that was resumed is compared with one that was not, which needs the same.

    Fails when: anything random is not seeded by the settings (dropout is on), or a setting is read on a GPU, or after a warning, alone.
    """
    flags = [*SMALL_OF["basic"], "--use-cpu", "--divergence", "stop", "--max-steps", "6", "--logging-steps", "1", "--gradient-accumulation-steps", "2", "--dropout", "0.1"]
    first = run_recipe("basic", *flags)
    assert first.code == 0, first.err
    assert "never read" not in first.out + first.err
    assert same(first.weights(), run_recipe("basic", *flags, output_dir="again").weights())
    check_what_it_writes(first, "basic", 6)


@pytest.mark.fast(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_config_yaml_fed_back_repeats_the_run(run_recipe, tmp_path: Path, recipe: str) -> None:
    """Fails when: the file has a setting's default in place of its value."""
    first = run_recipe(recipe, *SMALL_OF[recipe], "--max-steps", "3", "--learning_rate", "0.004")
    again = run_recipe(recipe, "--config", str(first.output_dir / "config.yaml"), output_dir="again")
    assert again.code == 0, again.err
    assert same(first.weights(), again.weights())
    settings = [yaml.safe_load((tmp_path / d / "config.yaml").read_text()) for d in ("out", "again")]
    assert {**settings[0], "output_dir": 0} == {**settings[1], "output_dir": 0}


EPOCHS = {"accelerated": "0.67", "embedding": "0.84", "sft": "1.5", "distill": "0.75", "distill_classifier": "0.67", "diffusion": "0.75", "lora": "1.5", "dpo": "0.84", "kto": "0.42", "reward": "0.84", "reranker": "0.84", "multiple_choice": "0.84", "token_classification": "1.34", "pretrain": "0.02", "question_answering": "0.42", "masked_lm": "0.13", "seq2seq": "0.42"}


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "basic"])  # which has no checkpoints
def test_a_run_ended_by_sigterm_continues_to_the_same_bits(run_recipe, tmp_path: Path, recipe: str) -> None:
    """Exit code 75 after a durable checkpoint, and the command that continues on the screen. With three micro-batches a step,
    dropout, a short last batch, and a worker that the whole run does without. And each recipe writes what it promises.

    Its model so far can be exported. Fails when: the seed of a micro-batch depends on what ran before, the optimizer's state is
    not restored, anything random is not seeded by the settings, or an export has the weights that training began from or a
    card that uses it otherwise.
    """
    flags = [*SMALL_OF[recipe], "--num-train-epochs", EPOCHS[recipe], "--logging-steps", "1", "--gradient-accumulation-steps", "3"]
    flags += ["--per-device-train-batch-size", "2", "--dropout", "0.1", "--save-strategy", "no"]
    whole = run_recipe(recipe, *flags, output_dir="whole")
    assert whole.code == 0, whole.err
    consumed = [event["examples"] for event in whole.metrics if "loss" in event]
    assert consumed[-1] - consumed[-2] < 6 == consumed[0], "the last batch is not a short one: choose other EPOCHS"
    check_what_it_writes(whole, recipe, len(consumed))

    def stop_after_some_steps(pid: int) -> None:
        metrics, deadline = tmp_path / "out/metrics.jsonl", time.monotonic() + 120
        while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count('"loss"') >= 5):
            time.sleep(0.01)
        os.kill(pid, signal.SIGTERM)

    flags += ["--dataloader-num-workers", "1"]
    stopped = run_recipe(recipe, *flags, while_running=stop_after_some_steps)
    assert stopped.code == 75, stopped.err
    assert "--resume" in stopped.err
    assert stopped.summary["status"] == "interrupted"
    assert stopped.summary["steps"] < len(consumed)
    check_export(stopped.output_dir, whole.output_dir)
    resumed = run_recipe(recipe, *flags, "--resume")
    assert resumed.code == 0, resumed.err
    assert same(whole.weights(), resumed.weights())
    steps = [event["step"] for event in resumed.metrics if "loss" in event]
    assert steps == list(range(1, len(consumed) + 1))
    assert [e["loss"] for e in whole.metrics if "loss" in e] == [e["loss"] for e in resumed.metrics if "loss" in e]


def test_basic_and_accelerated_are_the_same_training(run_recipe, tmp_path: Path) -> None:
    """The Accelerator changes how, not what: the losses are equal to the last bit. Every fourth label is wrong, so that no model is
    right throughout. Fails when: one of the two draws other dropout masks, or evaluates other rows."""
    rows = [f"the {i} {('good', 'bad')[i % 2]} thing,{('up', 'down')[(i + (i % 8 > 5)) % 2]}" for i in range(80)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    flags = ["--hidden-size", "32", "--num-hidden-layers", "2", "--max-length", "64", "--dataset", "rows.csv", "--eval-fraction", "0.3"]
    flags += ["--max-steps", "8", "--logging-steps", "1", "--gradient-accumulation-steps", "3", "--per-device-train-batch-size", "3"]
    basic, accelerated = run_recipe("basic", *flags), run_recipe("accelerated", *flags, output_dir="accelerated")
    assert basic.code == 0, basic.err
    assert same(basic.weights(), accelerated.weights())
    assert [e["loss"] for e in basic.metrics if "loss" in e] == pytest.approx([e["loss"] for e in accelerated.metrics if "loss" in e], rel=1e-6)
    metrics = ("eval_loss", "eval_accuracy", "eval_f1")
    assert 0 < basic.summary["eval_accuracy"] < 1
    assert [basic.summary[f] for f in metrics] == pytest.approx([accelerated.summary[f] for f in metrics], rel=1e-9)


def test_a_model_that_was_saved_is_the_model_that_was_evaluated(run_recipe) -> None:
    """The model directory, read by transformers alone, gives the loss in summary.json. Fails when: other weights are saved."""
    run = run_recipe("accelerated", *SMALL_OF["accelerated"], "--max-steps", "4", "--max-eval-examples", "5")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    import toolkit as tk

    model = AutoModelForSequenceClassification.from_pretrained(run.output_dir / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run.output_dir / "model")
    rows = tk.load_splits("stdlib:classify")["validation"].select(range(5))
    losses = []
    for row in rows:
        tokens = tokenizer(row["text"], truncation=True, max_length=64, return_tensors="pt")
        with torch.no_grad():
            logits = model(**{k: v for k, v in tokens.items() if k != "token_type_ids"}).logits
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor([row["label"]])).item())
    assert run.summary["eval_loss"] == pytest.approx(sum(losses) / 5, rel=1e-4)


def test_the_best_weights_are_saved_when_asked(run_recipe) -> None:
    """A rate so high at the end that the last evaluation is worse than an earlier one. Fails when: `load_best` loads nothing."""
    flags = [*SMALL_OF["accelerated"], "--max-steps", "12", "--eval-steps", "2", "--learning-rate", "0.3", "--lr-scheduler-type", "constant"]
    run = run_recipe("accelerated", *flags, "--load-best-model-at-end", "--save-total-limit", "1", "--early-stopping-patience", "20")
    assert run.code == 0, run.err
    losses = {event["step"]: event["eval_loss"] for event in run.metrics if "eval_loss" in event}
    best = min(losses, key=lambda step: losses[step])
    assert run.summary["best"]["step"] == best
    if best != 12:
        assert "its weights are loaded" in run.out
        assert json.loads((run.output_dir / "checkpoints/best.json").read_text())["checkpoint"] == f"step-{best}"


@pytest.mark.parametrize("flag", ["--save-steps", "--eval-steps", "--logging-steps"])
def test_a_number_of_steps_is_enough_to_say_when(run_recipe, flag: str) -> None:
    """Fails when: its row of `IMPLIED` is taken out."""
    run = run_recipe("sft", *SMALL_OF["sft"], "--max-steps", "4", flag, "2")
    events = {"--logging-steps": "loss", "--eval-steps": "eval_loss"}
    if flag == "--save-steps":
        assert {p.name for p in (run.output_dir / "checkpoints").glob("step-*")} == {"step-2", "step-4"}
    else:
        assert [e["step"] for e in run.metrics if events[flag] in e and e["step"]] == [2, 4]


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_trackers_run_offline_and_hold_no_secret(run_recipe, tmp_path: Path, tracker: str) -> None:
    """A token in the environment is in no file of the run. Fails when: the environment reaches a tracker's settings."""
    secret = "hf_" + "S3cr3t" * 6
    env = {
        "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1", "HF_TOKEN": secret, "WANDB_SILENT": "true",
    }  # fmt: skip
    run = run_recipe("accelerated", *SMALL_OF["accelerated"], "--max-steps", "2", "--report-to", tracker, env=env)
    assert run.code == 0, run.err
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert any(tracker in str(p) or "tfevents" in p.name for p in files)
    assert not [p for p in files if secret.encode() in p.read_bytes()]
