"""recipes/token_classification.py next to transformers' Trainer with run_ner's way of tokenizing and seqeval, and its model evaluated."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from seqeval import metrics as seqeval

import toolkit as tk
from toolkit.cli.evaluated_tasks import EvaluationConfig
from toolkit.cli.trained_metrics import evaluate_model

NAMES = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
WORDS = ["Anna", "Bob", "lives", "in", "York", "New", "internationalization", "don't", "Zürich", "."]
RATE, STEPS = 0.5, 4


def make_inputs(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A model directory without dropout, with its head, and rows to train on and to evaluate on."""
    tokenizer = tk.space_before_words(tk.train_tokenizer([" ".join(WORDS)] * 20, 300, encoder=True))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.1,
            hidden_dropout_prob=0, attention_probs_dropout_prob=0, pad_token_id=tokenizer.pad_token_id,
            id2label=dict(enumerate(NAMES)), label2id={name: i for i, name in enumerate(NAMES)},
        )  # fmt: skip
        transformers.BertForTokenClassification(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    numbers = random.Random(0)
    made = []
    for _ in range(25):
        words = [numbers.choice(WORDS) for _ in range(numbers.randrange(1, 9))]
        made.append({"tokens": words, "tags": [numbers.choice(NAMES) if numbers.random() < 0.3 else NAMES[WORDS.index(word) % 5] for word in words]})
    train, held_out = made[:12], made[12:]
    train[0] = {"tokens": WORDS[:5], "tags": NAMES}  # each tag is there
    (folder / "data").mkdir()
    for name, rows in (("train", train), ("validation", held_out)):
        (folder / f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return train, held_out


def with_trainer(folder: Path, train: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> tuple[list[float], dict[str, torch.Tensor], dict[str, float]]:
    """Losses, weights and final metrics as run_ner has them. All rows in one micro-batch: over several its loss is a mean of means."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder / "model", dtype=torch.float32)

    def tokenized(row: dict[str, Any]) -> dict[str, Any]:
        encoded, labels, before = tokenizer(row["tokens"], is_split_into_words=True), [], None
        for word in encoded.word_ids():
            labels.append(-100 if word is None or word == before else NAMES.index(row["tags"][word]))
            before = word
        return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"], "labels": labels}

    def measured(found: Any) -> dict[str, float]:
        chosen = np.argmax(found.predictions, axis=-1)
        actual = [[NAMES[label] for label in row if label != -100] for row in found.label_ids]
        guessed = [[NAMES[c] for c, label in zip(of_row, row, strict=True) if label != -100] for of_row, row in zip(chosen, found.label_ids, strict=True)]
        return {
            "accuracy": seqeval.accuracy_score(actual, guessed), "precision": seqeval.precision_score(actual, guessed),
            "recall": seqeval.recall_score(actual, guessed), "f1": seqeval.f1_score(actual, guessed),
            "f1_macro": seqeval.f1_score(actual, guessed, average="macro"),
        }  # fmt: skip

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "theirs"), optim="sgd", learning_rate=RATE, lr_scheduler_type="constant", max_steps=STEPS, weight_decay=0,
        per_device_train_batch_size=12, per_device_eval_batch_size=13, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=[tokenized(row) for row in train], eval_dataset=[tokenized(row) for row in held_out],
        data_collator=transformers.DataCollatorForTokenClassification(tokenizer), compute_metrics=measured,
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}, trainer.evaluate()


@pytest.mark.slow
def test_it_trains_and_evaluates_as_trainer_does_with_run_ner_s_tokens_and_its_model_is_evaluated_alike(run_recipe: Any, tmp_path: Path) -> None:
    """Four steps on all rows, here in micro-batches of 5, 5 and 2, with SGD: losses to 1e-5, each tensor's change to 1e-3 of its size,
    metrics to the last digit. `toolkit evaluate` finds the same, for another batch size.

    Fails when: a label is at another token than run_ner's, a part is divided by its own micro-batch's tokens, or an entity of the
    metric is another than seqeval's.
    """
    train, held_out = make_inputs(tmp_path)
    before = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "model").state_dict()
    losses, weights, theirs = with_trainer(tmp_path, train, held_out)
    run = run_recipe(
        "token_classification", "--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "data"), "--optim", "sgd", "--momentum", "0",
        "--learning-rate", str(RATE), "--lr-scheduler-type", "constant", "--warmup-steps", "0", "--weight-decay", "0", "--max-steps", str(STEPS),
        "--per-device-train-batch-size", "5", "--global-batch-size", "12", "--per-device-eval-batch-size", "3", "--logging-steps", "1",
        "--max-length", "64", "--use-cpu", "--no-auto-find-batch-size",
    )  # fmt: skip
    assert run.code == 0, run.err
    assert [event["loss"] for event in run.metrics if "loss" in event] == pytest.approx(losses, rel=1e-5)
    ours = run.weights()
    for name, value in weights.items():
        assert (ours[name] - value).norm() <= 1e-3 * (value - before[name]).norm() + 1e-7, name
    wanted = {name: theirs[f"eval_{name}"] for name in ("accuracy", "precision", "recall", "f1", "f1_macro")}
    assert 0 < wanted["f1"] < 1
    assert {name: run.summary[f"eval_{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-9)
    config = EvaluationConfig(model=str(run.output_dir / "model"), dataset=str(tmp_path / "data/validation.jsonl"), eval_fraction=0.0, per_device_eval_batch_size=5, max_length=64)
    found = evaluate_model(config, [], device="cpu")
    assert found.task == "token_classification"
    assert {name: found.metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-9)
