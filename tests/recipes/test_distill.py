"""recipes/distill.py: what the student learns, which teachers are refused, on ranks, through an adapter."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

import toolkit as tk
from tests.rollouts.server_double import serving
from toolkit.cli.main import app
from toolkit.config import Refusal
from toolkit.distillation.trained_teacher import named_as_teacher
from toolkit.distillation.vocabulary import shared_vocabulary

pytestmark = pytest.mark.warm

TINY = [
    "--hidden-size", "32", "--num-hidden-layers", "1", "--dataset", "rows.jsonl", "--max-length", "48", "--save-strategy", "no", "--num-samples", "0",
    "--max-steps", "6", "--logging-steps", "1", "--dropout", "0",
]  # fmt: skip
TEXTS = [f"Count from {i}: {' '.join(str(n) for n in range(i, i + 4 + i % 5))}" for i in range(60)]


@pytest.fixture
def rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


@pytest.fixture(scope="module")
def taught() -> PreTrainedTokenizerFast:
    return tk.train_tokenizer(TEXTS, 300)


def reordered(tokenizer: PreTrainedTokenizerFast, added: str | None = None) -> PreTrainedTokenizerFast:
    """The same tokens with the numbers of the special ones at the end, and one more."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    order = sorted(vocabulary, key=lambda token: (token.startswith("<|"), vocabulary[token])) + ([added] if added else [])
    state["model"]["vocab"] = {token: number for number, token in enumerate(order)}
    for each in state["added_tokens"]:
        each["id"] = state["model"]["vocab"][each["content"]]
    backend = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tokenizer.eos_token, pad_token=tokenizer.pad_token)
    made.chat_template = tokenizer.chat_template
    return made


def make_teacher(folder: Path, tokenizer: PreTrainedTokenizerFast, positions: int = 64, seed: int = 1) -> torch.nn.Module:
    """Random weights, larger than usual, so that its distributions are far from even."""
    config = tk.ModelConfig(hidden_size=64, num_hidden_layers=1, max_position_embeddings=positions, seed=seed)
    model = tk.load_model("AutoModelForCausalLM", config, tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.mark.fast(1)
def test_without_a_teacher_one_is_trained_and_the_student_comes_closer_to_it(run_recipe: Any, rows: None, tmp_path: Path) -> None:
    """Fails when: the teacher's gradient step is the student's, or the divergence's sign is wrong."""
    flags = ["--dataset", "rows.jsonl", "--max-length", "48", "--num-samples", "0", "--max-steps", "30", "--vocab-size", "300", "--eval-steps", "30"]
    flags += ["--hidden-size", "64", "--num-hidden-layers", "2", "--intermediate-size", "128"]
    run = run_recipe("distill", *flags, "--save-strategy", "no", "--temperature", "2", "--eval-on-start")
    assert run.code == 0, run.err
    assert "trained for 45 steps" in run.out
    assert "teacher: step 40/45  loss " in run.out  # fails without the line of the loop
    kl = [event["eval_kl"] for event in run.metrics if "eval_kl" in event]
    assert kl[-1] < 0.5 * kl[0]
    assert run.summary["eval_loss"] < 4
    flags += ["--save-strategy", "no", "--temperature", "2", "--overwrite-output-dir", "--teacher-top-k", "300"]
    again = run_recipe("distill", *flags, env={"HF_DATASETS_CACHE": str(tmp_path / "cache")})
    assert "out-teacher is taken" in again.out
    assert re.search(r"^teacher: .*\ball tokens at [\d,]+ positions", again.out, re.MULTILINE)
    assert again.summary["eval_kl"] == pytest.approx(run.summary["eval_kl"], rel=1e-3)


def test_a_teacher_that_does_not_fit_is_refused_in_one_message(
    run_recipe: Any, rows: None, tmp_path: Path, taught: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: a check is left out, or the message names --model."""
    monkeypatch.chdir(tmp_path)
    student = make_teacher(tmp_path / "short", taught, positions=32)
    make_teacher(tmp_path / "other", reordered(taught, added="zebra"))
    taught.save_pretrained(tmp_path / "tokens")
    AutoModel.from_pretrained("short").save_pretrained(tmp_path / "headless")
    cases = {
        "tokens": "", "tiny-llama": "random weights", "short": r"32 positions.*\b48 tokens", "headless": "predicts next tokens",
        "other": r"only the teacher has 'zebra' \(300\)",
    }  # fmt: skip
    for name, words in cases.items():
        with pytest.raises(Refusal, match=f"^--teacher {name}: .*{words}"):
            tk.build_teacher(Accelerator(cpu=True), student, taught, tk.DistillationConfig(), None, None, teacher=name, max_length=48, packed=False)
    run = run_recipe("distill", *TINY, "--teacher", "nowhere/at-all", env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert run.code == 2, run.err
    assert "--teacher nowhere/at-all: " in run.err
    assert run.err.count("refused") == 1
    early = run_recipe("distill", *TINY, "--teacher", "tokens", "--tokenizer", "tokens")
    assert (early.code, "--teacher tokens" in early.err, "examples" in early.out) == (2, True, False), early.err


def test_a_teacher_with_other_numbers_for_its_tokens_teaches_the_same(
    run_recipe: Any, rows: None, tmp_path: Path, taught: PreTrainedTokenizerFast
) -> None:
    """Its rows moved to other numbers, and 7 rows of padding: the losses are equal, and its template is said to differ.

    Fails when: the teacher reads the student's numbers.
    """
    model, other = make_teacher(tmp_path / "teacher", taught), reordered(taught)
    assert other.get_vocab() != taught.get_vocab()
    first = run_recipe("distill", *TINY, "--teacher", "teacher", "--tokenizer", "teacher")
    assert first.code == 0, first.err
    of_other = torch.tensor([other.get_vocab()[token] for token in sorted(taught.get_vocab(), key=taught.get_vocab().get)])
    with torch.no_grad():
        before = [model.get_input_embeddings().weight.clone(), model.get_output_embeddings().weight.clone()]
        model.resize_token_embeddings(307)
        for module, weight in zip((model.get_input_embeddings(), model.get_output_embeddings()), before, strict=True):
            module.weight[of_other] = weight
    model.save_pretrained(tmp_path / "moved")
    other.chat_template = "{{ messages }}"
    other.save_pretrained(tmp_path / "moved")
    second = run_recipe("distill", *TINY, "--teacher", "moved", "--tokenizer", "teacher", output_dir="second")
    assert second.code == 0, second.err
    assert "has another chat template" in second.out
    assert re.search(r"^--teacher moved: .*tokens shared, .*numbers", second.out, re.MULTILINE)
    losses = [[event["loss"] for event in run.metrics if "loss" in event] for run in (first, second)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_numbers_that_have_gaps_or_too_few_rows_are_refused(taught: PreTrainedTokenizerFast) -> None:
    """Fails when: a token is looked up beyond the logits of a model."""
    assert shared_vocabulary(taught, taught, 320, 312, "t").size == 312
    with pytest.raises(Refusal, match="the teacher has 299 logits"):
        shared_vocabulary(taught, taught, 299, 312, "t")
    moved = shared_vocabulary(reordered(taught), taught, 320, 312, "t")
    assert moved.size == 300
    assert moved.of_teacher is not None
    for token, number in list(taught.get_vocab().items())[:40]:
        assert reordered(taught).get_vocab()[token] == moved.of_teacher[number]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--teacher-top-k", "8"], ["--on-policy-share", "0.6", "--max-new-tokens", "9"]])
def test_two_ranks_train_and_evaluate_what_one_does(
    rows: None, tmp_path: Path, taught: PreTrainedTokenizerFast, tiny: Any, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed rows, 5 a step in one micro-batch, and in micro-batches of 2 on two ranks, of which one fills up. What both ranks have
    stored of the teacher one process reads, and what both have written the one writes too.

    Fails when: the evaluation's sums are of one rank, a padding micro-batch counts, or each rank knows its own blocks alone.
    """
    make_teacher(tmp_path / "teacher", taught)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    script = str(Path(__file__).resolve().parents[2] / "recipes/distill.py")
    flags = [*TINY, "--dataset", str(tmp_path / "rows.jsonl"), "--teacher", str(tmp_path / "teacher"), "--global-batch-size", "5", "--use-cpu", "--optim", "adamw_torch", "--learning-rate", "1e-3",
             "--eval-steps", "3", "--distillation-loss", "jsd", "--cross-entropy-share", "0.2"]  # fmt: skip
    if "--on-policy-share" in more:
        asked = [{"prompt": text[:-6], "completion": text[-6:]} for text in TEXTS]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
        flags[flags.index("--cross-entropy-share") :] = []
    flags += more
    ranks = tiny.ranks(2, *flags, "--per-device-train-batch-size", "2", "--per-device-eval-batch-size", "1", script=script, output_dir="two")
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    one = tiny(*flags, "--per-device-train-batch-size", "5", script=script, output_dir="one")
    assert one.code == 0, one.out[-3000:]
    assert ("log-probabilities read from" in one.out) == ("--teacher-top-k" in more)
    for name in ("loss", "divergence", "cross_entropy", "grad_norm", "eval_loss", "eval_kl"):
        found, expected = ([event[name] for event in run.metrics if name in event] for run in (ranks[0], one))
        assert len(expected) >= 2 or (name == "cross_entropy" and "--on-policy-share" in more)
        assert found == pytest.approx(expected, rel=1e-5), name


def test_a_resumed_adapter_has_the_same_bits_and_another_teacher_is_refused(
    run_recipe: Any, rows: None, tmp_path: Path, taught: PreTrainedTokenizerFast
) -> None:
    """Half of the answers are the student's own. Fails when: the teacher's files may change in between, the student's dropout
    depends on what the teacher computes, or what it writes on what was written before."""
    asked = [{"prompt": text[:-6], "completion": text[-6:]} for text in TEXTS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    make_teacher(tmp_path / "teacher", taught)
    make_teacher(tmp_path / "student", taught, seed=2)
    flags = ["--model", "student", "--teacher", "teacher", "--dataset", "rows.jsonl", "--max-length", "48", "--num-samples", "0", "--max-steps", "4"]
    flags += ["--save-steps", "2", "--use-peft", "--lora-target-modules", "q_proj,v_proj", "--lora-dropout", "0.2", "--no-packing"]
    flags += ["--on-policy-share", "0.5", "--max-new-tokens", "8"]
    whole = run_recipe("distill", *flags)
    assert whole.code == 0, whole.err
    weights = whole.weights()
    shutil.rmtree(tmp_path / "out/checkpoints/step-4")
    resumed = run_recipe("distill", *flags, "--resume")
    assert resumed.code == 0, resumed.err
    found = resumed.weights()
    assert all(torch.equal(weights[name], found[name]) for name in weights)
    shutil.rmtree(tmp_path / "out/checkpoints/step-4")
    make_teacher(tmp_path / "teacher", taught, seed=3)
    refused = run_recipe("distill", *flags, "--resume")
    assert refused.code == 2, refused.err
    assert "--allow-change teacher" in refused.err
    assert run_recipe("distill", *flags, "--resume", "--allow-change", "teacher").code == 0


@pytest.mark.parametrize("kind", [["ema", "--ema-decay", "0.8"], ["base"]])
def test_a_resumed_student_that_teaches_itself_has_the_same_bits(
    run_recipe: Any, rows: None, tmp_path: Path, taught: PreTrainedTokenizerFast, kind: list[str]
) -> None:
    """Fails when: the average isn't in the checkpoint, or moves after the step was logged."""
    make_teacher(tmp_path / "student", taught, seed=2)
    flags = ["--model", "student", "--dataset", "rows.jsonl", "--max-length", "48", "--num-samples", "0", "--max-steps", "4", "--save-steps", "2"]
    flags += ["--use-peft", "--lora-target-modules", "q_proj,v_proj", "--lora-dropout", "0.2", "--cross-entropy-share", "0.5", "--optim", "adamw_torch"]
    flags += ["--self-distillation", *kind, "--logging-steps", "1"]
    whole = run_recipe("distill", *flags)
    assert whole.code == 0, whole.err
    weights, divergence = whole.weights(), [event["divergence"] for event in whole.metrics if "divergence" in event]
    assert divergence[-1] > 0
    shutil.rmtree(tmp_path / "out/checkpoints/step-4")
    resumed = run_recipe("distill", *flags, "--resume")
    assert resumed.code == 0, resumed.err
    assert all(torch.equal(weights[name], found) for name, found in resumed.weights().items())
    assert [event["divergence"] for event in resumed.metrics if "divergence" in event] == divergence


def test_rows_that_the_teacher_wrote_train_a_student_whose_card_says_so(
    run_recipe: Any, tmp_path: Path, taught: PreTrainedTokenizerFast
) -> None:
    """toolkit generate --dataset, then the recipe on its file. Fails when: the card doesn't read the column generated_by."""
    make_teacher(tmp_path / "teacher", taught)
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"prompt": text[:12], "completion": "x"}) + "\n" for text in TEXTS[:20]))
    words = ["generate", str(tmp_path / "teacher"), "--dataset", str(tmp_path / "asked.jsonl"), "--output", str(tmp_path / "rows.jsonl")]
    for wrong in ([*words[:4]], [*words, "--prompt", "x"], ["generate", "x", "--prompt", "x", "--overwrite"]):
        assert CliRunner().invoke(app, wrong).exit_code == 2
    done = CliRunner().invoke(app, [*words, "--max-new-tokens", "6", "--temperature", "1", "--device", "cpu"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "20 rows" in done.output
    flags = ["--model", "teacher", "--teacher", "teacher", "--dataset", "rows.jsonl", "--max-length", "48", "--num-samples", "0", "--max-steps", "1"]
    run = run_recipe("distill", *flags, "--save-strategy", "no", "--eval-strategy", "no", "--eval-fraction", "0")
    assert run.code == 0, run.err
    (writer,) = json.loads((tmp_path / "out/run.json").read_text())["data"]["written_by"]
    assert writer.startswith("teacher@")
    assert f"written by `{writer}`" in (tmp_path / "out/model/README.md").read_text()


def test_a_teacher_on_a_server_is_asked_once(run_recipe: Any, rows: None, taught: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Its tokens are the store's, to the last digits of the same teacher loaded here; a second run asks one probe alone. What a
    server can't do is refused with the settings.

    Fails when: a server's store lies under another path each time, or `_on_a_server` is not called."""
    model = make_teacher(tmp_path / "teacher", taught)
    with serving(model.eval(), taught) as double:
        flags = [*TINY, "--tokenizer", "teacher", "--teacher-top-k", "5"]
        first = run_recipe("distill", *flags, "--teacher", f"{double.url}/v1")
        assert first.code == 0, first.err
        asked = len(double.asked)
        again = run_recipe("distill", *flags, "--teacher", f"{double.url}/v1", output_dir="again")
        assert again.code == 0, again.err
        assert sum(path == "/v1/completions" for path, _ in double.asked[asked:]) == 1
        for wrong in (["--temperature", "2"], ["--teacher-dtype", "float32"], ["--teacher-top-k", "100000"]):
            refused = run_recipe("distill", *flags, "--teacher", double.url, *wrong, output_dir="wrong")
            assert refused.code == 2, refused.out + refused.err
            assert "Traceback" not in refused.err
        double.max_logprobs = 4
        assert "--max-logprobs 5" in run_recipe("distill", *flags, "--teacher", double.url, output_dir="wrong").err
    here = run_recipe("distill", *flags, "--teacher", "teacher", output_dir="here")
    assert here.code == 0, here.err
    assert again.weights().keys() == first.weights().keys() == here.weights().keys()
    for name, weight in here.weights().items():
        assert torch.equal(first.weights()[name], again.weights()[name])
        torch.testing.assert_close(first.weights()[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("said", "of_teacher"),
    [
        ("--model x: Convert it, and take --model converted", "--teacher x: Convert it, and take --teacher converted"),
        ("--tokenizer x: no tokenizer. Save it there, or name another with --tokenizer", "--teacher x: no tokenizer. Save it there"),
        ("x: the Hub has no such revision", "--teacher x: the Hub has no such revision"),
        ("--model-revision main: has no effect on a directory", "--teacher-revision main: has no effect on a directory"),
        ("x: it needs code. Read that code, then: --trust-remote-code --model-revision COMMIT", "--teacher x: it needs code"),
    ],
)  # fmt: skip
def test_what_is_said_of_any_model_is_said_of_the_teacher_by_its_setting(said: str, of_teacher: str) -> None:
    """Fails when: --model stays in it, --teacher is put before another setting, or it advises what a teacher has no setting for."""
    with pytest.raises(Refusal) as refusal, named_as_teacher():
        raise Refusal(said)
    assert str(refusal.value) == of_teacher
