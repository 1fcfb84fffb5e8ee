"""recipes/distill_classifier.py: what the student learns, which teachers are refused, resume, on ranks, what is saved."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors import safe_open
from transformers import PreTrainedTokenizerFast

import toolkit as tk
from toolkit.config import Refusal
from toolkit.diagnostics.small import with_small_teacher

pytestmark = pytest.mark.warm

NAMES = ["even", "odd", "round"]
TEXTS = [f"Count from {i}: {' '.join(str(n) for n in range(i, i + 3 + i % 5))}" for i in range(60)]
TINY = [
    "--dataset", "rows.jsonl", "--max-length", "48", "--save-strategy", "no", "--max-steps", "4", "--logging-steps", "1", "--dropout", "0",
    "--hidden-size", "16", "--num-hidden-layers", "2", "--num-attention-heads", "2", "--intermediate-size", "24",
]  # fmt: skip
SHAPE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48, "dropout": 0.0}
LABELS: dict[str, Any] = {
    "num_labels": 3, "id2label": dict(enumerate(NAMES)), "label2id": {name: i for i, name in enumerate(NAMES)},
    "problem_type": "single_label_classification",
}  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path) -> None:
    written = [{"text": text, "label": "round" if i % 10 == 0 else NAMES[i % 2]} for i, text in enumerate(TEXTS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))


@pytest.fixture(scope="module")
def taught() -> PreTrainedTokenizerFast:
    return tk.train_tokenizer(TEXTS, 300, encoder=True)


def classifier(tokenizer: PreTrainedTokenizerFast, seed: int = 1, labels: dict[str, Any] = LABELS, **changes: Any) -> Any:
    config = tk.ModelConfig(**{"model": "tiny-bert", **SHAPE, "seed": seed, **changes})
    return tk.load_model("AutoModelForSequenceClassification", config, tokenizer, **labels)


def make_teacher(folder: Path, tokenizer: PreTrainedTokenizerFast, **changes: Any) -> Any:
    model = classifier(tokenizer, **changes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def test_without_a_teacher_one_is_trained_and_the_student_comes_closer_to_it(run_recipe: Any, rows: None, tmp_path: Path) -> None:
    """Layers and attention too, and the saved model is a plain one. Fails when: a term is left out of the loss or has the wrong
    sign, the projections are saved with the model, or the optimizer is made before them."""
    flags = ["--dataset", "rows.jsonl", "--max-length", "48", "--max-steps", "30", "--vocab-size", "300", "--logging-steps", "1", "--attention-dropout", "0"]
    run = run_recipe("distill_classifier", *flags, "--match-attention", "--dropout", "0", "--save-steps", "30")
    assert run.code == 0, run.err
    assert "trained for 30 steps" in run.out
    assert "teacher: step 30/30  loss " in run.out  # fails without the line of the loop
    first, last = [[e[name] for e in run.metrics if name in e] for name in ("divergence", "hidden_mse", "attention_kl")], run.metrics
    assert all(values[-1] < 0.8 * values[0] for values in first), (first, last[-1])
    assert not [name for name in run.weights() if "projections" in name]
    with safe_open(run.output_dir / "checkpoints/step-30/model.safetensors", "pt") as kept:
        assert [name for name in kept.keys() if name.startswith("teacher_projections.")] == [f"teacher_projections.{i}.weight" for i in range(3)]  # noqa: SIM118
    again = run_recipe("distill_classifier", *flags, "--match-layers", "none", "--overwrite-output-dir", "--save-strategy", "no", "--temperature", "2", "--max-steps", "3")
    assert "out-teacher is taken" in again.out
    assert not [event for event in again.metrics if "hidden_mse" in event]


def test_a_teacher_that_does_not_fit_is_refused_in_one_message(tmp_path: Path, taught: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: a check is left out."""
    monkeypatch.chdir(tmp_path)
    others = {**LABELS, "id2label": {0: "even", 1: "odd", 2: "flat"}, "label2id": {"even": 0, "odd": 1, "flat": 2}}
    make_teacher(tmp_path / "flat", taught, labels=others)
    make_teacher(tmp_path / "number", taught, labels={"num_labels": 1, "problem_type": "regression"})
    make_teacher(tmp_path / "shallow", taught, num_hidden_layers=1)
    make_teacher(tmp_path / "heads", taught, num_attention_heads=4)
    make_teacher(tmp_path / "short", taught, max_position_embeddings=24)
    make_teacher(tmp_path / "teacher", taught)
    language = tk.load_model("AutoModelForCausalLM", tk.ModelConfig(hidden_size=32, num_hidden_layers=1), taught)
    language.save_pretrained("language")
    taught.save_pretrained("language")
    cases: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("flat", "even, odd, flat,.* even, odd, round", {}, {}), ("number", "regression", {}, {}), ("shallow", r"\b1 layers .*student 2\b", {}, {}),
        ("short", r"\b24 positions,.* 48 tokens", {}, {}), ("language", "CausalLM", {}, {}), ("empty", "no model", {}, {}),
        ("heads", r"student .*\b2 heads .*teacher 4\b", {"match_attention": True}, {"attention_dropout": 0.0}),
        ("teacher", r"\b0\.1 of its attention", {"match_attention": True}, {"attention_dropout": 0.1}),
    ]  # fmt: skip
    (tmp_path / "empty").mkdir()
    for name, words, settings, of_student in cases:
        student = classifier(taught, hidden_size=16, num_hidden_layers=2, **of_student)
        with pytest.raises(Refusal, match=f"^{'--match-attention' if settings else f'--teacher {name}'}: .*{words}"):
            tk.build_classifier_teacher(
                Accelerator(cpu=True), student, taught, tk.ClassifierDistillationConfig(**settings), teacher=name, max_length=48, seed=0
            )


def test_a_model_without_attention_probabilities_is_refused(tmp_path: Path, taught: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose attention stays what it was. Fails when: what comes back in place of the probabilities is not looked at."""
    make_teacher(tmp_path / "teacher", taught)
    student = classifier(taught, attention_dropout=0.0)
    monkeypatch.setattr(type(student), "set_attn_implementation", lambda *_: None)
    config = tk.ClassifierDistillationConfig(match_attention=True)
    with pytest.raises(Refusal, match=r"--match-attention: the student .*no attention"):
        tk.build_classifier_teacher(Accelerator(cpu=True), student, taught, config, teacher=str(tmp_path / "teacher"), max_length=48, seed=0)


def test_classes_in_another_order_are_matched_by_name(tmp_path: Path, taught: PreTrainedTokenizerFast) -> None:
    """Fails when: the teacher's logits are taken in its own order, or it drops."""
    turned = {"num_labels": 3, "id2label": {0: "round", 1: "even", 2: "odd"}, "label2id": {"round": 0, "even": 1, "odd": 2}}
    model = make_teacher(tmp_path / "teacher", taught, labels={**LABELS, **turned}, dropout=0.5).eval()
    student = classifier(taught, num_hidden_layers=2)
    config = tk.ClassifierDistillationConfig(match_layers="none")
    teacher = tk.build_classifier_teacher(Accelerator(cpu=True), student, taught, config, teacher=str(tmp_path / "teacher"), max_length=48, seed=0)
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    assert teacher.pairs == []
    torch.testing.assert_close(teacher.ask(batch).logits, model(**batch).logits[:, [1, 2, 0]])


def test_another_teacher_is_refused_at_a_resume_and_the_rest_is_the_same_bits(
    run_recipe: Any, rows: None, tmp_path: Path, taught: PreTrainedTokenizerFast
) -> None:
    """Fails when: the projections are not in the checkpoint, or the teacher's files may change."""
    make_teacher(tmp_path / "teacher", taught)
    flags = [*TINY, "--teacher", "teacher", "--save-strategy", "steps", "--save-steps", "2", "--dropout", "0.1", "--optim", "adamw_torch"]
    whole = run_recipe("distill_classifier", *flags)
    assert whole.code == 0, whole.err
    weights, apart = whole.weights(), [event["hidden_mse"] for event in whole.metrics if "hidden_mse" in event]
    shutil.rmtree(tmp_path / "out/checkpoints/step-4")
    resumed = run_recipe("distill_classifier", *flags, "--resume")
    assert resumed.code == 0, resumed.err
    assert all(torch.equal(weights[name], found) for name, found in resumed.weights().items())
    assert [event["hidden_mse"] for event in resumed.metrics if "hidden_mse" in event] == apart
    shutil.rmtree(tmp_path / "out/checkpoints/step-4")
    make_teacher(tmp_path / "teacher", taught, seed=3)
    refused = run_recipe("distill_classifier", *flags, "--resume")
    assert refused.code == 2, refused.err
    assert "--allow-change teacher" in refused.err


@dataclass(frozen=True)
class Settings(tk.ModelConfig, tk.ClassifierDistillationConfig):
    """What doctor makes small."""


def test_doctor_makes_a_small_teacher_of_the_same_classes(tmp_path: Path, taught: PreTrainedTokenizerFast) -> None:
    """Of a run's directory. Fails when: the directory itself is looked for a model, or a recipe without self_distillation has no teacher."""
    make_teacher(tmp_path / "run/model", taught)
    small: Any = with_small_teacher(Settings(teacher=str(tmp_path / "run")), tmp_path / "small")
    config = json.loads((Path(small.teacher) / "config.json").read_text())
    assert (config["num_hidden_layers"], list(config["id2label"].values())) == (2, NAMES)


@pytest.mark.slow
def test_two_ranks_train_and_evaluate_what_one_does(rows: None, tmp_path: Path, taught: PreTrainedTokenizerFast, tiny: Any) -> None:
    """Five examples a step, in one micro-batch, and in micro-batches of 2 on two ranks. Fails when: the projections' gradient is of
    one rank, or a padding micro-batch counts."""
    make_teacher(tmp_path / "teacher", taught)
    script = str(Path(__file__).resolve().parents[2] / "recipes/distill_classifier.py")
    flags = [*TINY, "--dataset", str(tmp_path / "rows.jsonl"), "--teacher", str(tmp_path / "teacher"), "--global-batch-size", "5", "--use-cpu", "--optim",
             "adamw_torch", "--learning-rate", "1e-3", "--match-attention", "--attention-dropout", "0"]  # fmt: skip
    ranks = tiny.ranks(2, *flags, "--per-device-train-batch-size", "2", "--per-device-eval-batch-size", "1", script=script, output_dir="two")
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    one = tiny(*flags, "--per-device-train-batch-size", "5", script=script, output_dir="one")
    assert one.code == 0, one.out[-3000:]
    for name in ("loss", "divergence", "hidden_mse", "attention_kl", "grad_norm", "eval_loss"):
        found, expected = ([event[name] for event in run.metrics if name in event] for run in (ranks[0], one))
        assert expected
        left = 1e-8 if name == "attention_kl" else 0.0  # 1e-4, what is left of sums of about 1
        assert found == pytest.approx(expected, rel=1e-5, abs=left), name
