"""recipes/seq2seq.py: what it saves says the same to transformers alone, adapters, refusals, and the commands for its models."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from sacrebleu import corpus_chrf
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from typer.testing import CliRunner

from toolkit.cli.main import app

TINY = ["--hidden-size", "32", "--num-hidden-layers", "1", "--max-length", "48", "--max-target-length", "10"]
TINY += ["--max-steps", "6", "--save-strategy", "no", "--num-beams", "2", "--num-samples", "2"]


def write_rows(folder: Path) -> list[dict[str, str]]:
    rows = [{"source": f"the number {n} and the next", "target": f"{n} and {n + 1}."} for n in range(60)]
    for split, part in (("train", rows[:47]), ("test", rows[47:])):
        (folder / "rows").mkdir(exist_ok=True)
        (folder / f"rows/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return rows[47:]


def by_transformers(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> dict[str, float]:
    """Loss and chrF, one row at a time, with the model's own labels= and generate."""
    nll, tokens, said = 0.0, 0, []
    for row in rows:
        inputs = tokenizer(row["source"], return_tensors="pt", return_token_type_ids=False)
        labels = torch.tensor([[*tokenizer(row["target"])["input_ids"], tokenizer.eos_token_id]])[:, :10]
        with torch.no_grad():
            nll += float(model(**inputs, labels=labels).loss) * labels.shape[1]
            ids = model.generate(**inputs, num_beams=2, max_new_tokens=10)
        tokens += labels.shape[1]
        said.append(tokenizer.decode(ids[0], skip_special_tokens=True).strip())
    return {"eval_loss": nll / tokens, "eval_chrf": corpus_chrf(said, [[row["target"] for row in rows]]).score}


def test_a_saved_model_writes_what_it_was_evaluated_by(run_recipe: Any, tmp_path: Path) -> None:
    """And so do `toolkit evaluate` and `toolkit generate` on the run's directory.

    Fails when: the saved generation_config lacks the token that the decoder begins with; references are the decoded tokens.
    """
    rows = write_rows(tmp_path)
    run = run_recipe("seq2seq", "--dataset", "rows", *TINY, "--per-device-eval-batch-size", "5")
    assert run.code == 0, run.err
    model, tokenizer = (kind.from_pretrained(run.output_dir / "model") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    expected = by_transformers(model.eval(), tokenizer, rows)
    assert {name: run.summary[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-9)
    samples = [json.loads(line) for line in (run.output_dir / "samples.jsonl").read_text().splitlines()]
    assert samples[-1]["reference"] in {row["target"] for row in rows}
    words = ["evaluate", str(run.output_dir), "--json", "--metrics", "loss,chrf,rouge", "--per-device-eval-batch-size", "3"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["task"] == "seq2seq"
    for name in ("loss", "chrf", "rougeL"):
        assert found["metrics"][name] == pytest.approx(run.summary[f"eval_{name}"], rel=1e-5, abs=1e-9)
    done = CliRunner().invoke(app, ["generate", str(run.output_dir), "--prompt", rows[0]["source"], "--json", "--max-new-tokens", "10"])
    assert done.exit_code == 0, done.output
    inputs = tokenizer(rows[0]["source"], return_tensors="pt", return_token_type_ids=False)
    wanted = tokenizer.decode(model.generate(**inputs, max_new_tokens=10)[0], skip_special_tokens=True)
    assert json.loads(done.stdout.splitlines()[-1])["text"] == wanted


def test_generate_puts_the_run_s_prefix_before_each_source(run_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the one that is typed. Its space at the end is part of it.

    Fails when: the prefix is left out, or `keeps_spaces` is not declared for it.
    """
    write_rows(tmp_path)
    flags = [*TINY, "--max-steps", "1", "--predict-with-generate", "false", "--source-prefix", "say: "]
    run = run_recipe("seq2seq", "--dataset", "rows", *flags)
    assert run.code == 0, run.err
    read = list[str]()

    def keep(model: Any, tokenizer: Any, prompts: list[str], sampling: Any, show: Any, on_end: Any) -> None:
        read.extend(prompts)
        on_end(0, "")

    monkeypatch.setattr("toolkit.generation.answers.answer_prompts", keep)
    for folder, more in ((run.output_dir, []), (run.output_dir / "model", []), (run.output_dir, ["--source-prefix", "tell: "])):
        done = CliRunner().invoke(app, ["generate", str(folder), "--prompt", "seven", "--json", *more])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout.splitlines()[-1])["prompt"] == "seven"
    assert read == ["say: seven", "say: seven", "tell: seven"]


def test_an_adapter_of_an_encoder_decoder_is_read_by_peft_to_the_same_metrics(run_recipe: Any, tmp_path: Path) -> None:
    """All linear layers of encoder and decoder but the head, the attention from one to the other among them.

    Fails when: the adapter's task is not that of an encoder-decoder; the head is adapted.
    """
    rows = write_rows(tmp_path)
    base = run_recipe("seq2seq", "--dataset", "rows", *TINY, "--predict-with-generate", "false", output_dir="base")
    assert base.code == 0, base.err
    flags = [flag for flag in TINY if flag not in ("--hidden-size", "32", "--num-hidden-layers", "1")]
    run = run_recipe("seq2seq", "--dataset", "rows", *flags, "--model", "base/model", "--use-peft", "--lora-r", "4", "--learning-rate", "0.01")
    assert run.code == 0, run.err
    settings = json.loads((run.output_dir / "model/adapter_config.json").read_text())
    assert settings["task_type"] == "SEQ_2_SEQ_LM"
    model = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base/model"), run.output_dir / "model")
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    assert len(adapted) == 4 + 3 + 4 + 4 + 3
    assert any("EncDecAttention" in name for name in adapted)
    assert not any("lm_head" in name for name in adapted)
    expected = by_transformers(model.eval(), AutoTokenizer.from_pretrained(run.output_dir / "model"), rows)
    assert {name: run.summary[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_models_of_the_other_kind_and_bad_rows_are_refused(run_recipe: Any, tmp_path: Path) -> None:
    """Fails when: transformers is left to take BART's decoder alone, or to fail on a model that is no encoder-decoder; or peft to train a
    shared embedding."""
    from transformers import BartConfig, BartForConditionalGeneration

    import toolkit as tk

    write_rows(tmp_path)
    run = run_recipe("seq2seq", "--dataset", "rows", "--model", "tiny-llama", "--max-steps", "1", "--use-cpu")
    assert (run.code, "recipes/sft.py" in run.err) == (2, True), run.err
    tokenizer = tk.train_tokenizer(["a few words"], 300)
    tokenizer.save_pretrained(tmp_path / "bart")
    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    BartForConditionalGeneration(BartConfig(vocab_size=len(tokenizer), **small)).save_pretrained(tmp_path / "bart")
    run = run_recipe("sft", "--model", "bart", "--max-steps", "1", "--max-length", "1024", "--use-cpu", "--max-train-examples", "20")
    assert (run.code, "recipes/seq2seq.py" in run.err) == (2, True), run.err
    run = run_recipe("seq2seq", "--dataset", "rows", *TINY, "--use-peft")
    assert (run.code, "--lora-modules-to-save" in run.err) == (2, True), run.err
    (tmp_path / "bad.jsonl").write_text('{"source": "a", "target": "b"}\n{"source": "a", "target": "  "}\n')
    run = run_recipe("seq2seq", "--dataset", "bad.jsonl", "--eval-fraction", "0")
    assert (run.code, "bad.jsonl:2: target" in run.err) == (2, True), run.err
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "bad.jsonl"), "--eval-fraction", "0"])
    assert done.exit_code == 1
    assert "bad.jsonl:2" in done.output
    assert "Task: seq2seq" in done.output


@pytest.mark.slow
def test_two_ranks_with_ragged_batches_find_what_one_finds(tiny: Any) -> None:
    """Losses, norms, and the metrics of the generated texts.

    Fails when: a rank divides by its own tokens; texts come in the order of the ranks.
    """
    flags = ["--hidden-size", "32", "--num-hidden-layers", "1", "--max-train-examples", "31", "--max-eval-examples", "7", "--max-length", "64"]
    flags += ["--max-steps", "3", "--logging-steps", "1", "--global-batch-size", "11", "--per-device-train-batch-size", "3", "--dropout", "0"]
    flags += ["--max-target-length", "12", "--num-beams", "2", "--eval-strategy", "steps", "--eval-steps", "3", "--use-cpu"]
    script = str(Path(__file__).resolve().parents[2] / "recipes/seq2seq.py")
    one = tiny(*flags, script=script, output_dir="one")
    assert one.code == 0, one.out[-3000:]
    ranks = tiny.ranks(2, *flags, script=script, output_dir="two")
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    for name in ("loss", "grad_norm", "eval_loss", "eval_chrf", "eval_rougeL", "eval_bleu"):
        found, expected = ([event[name] for event in run.metrics if name in event] for run in (ranks[0], one))
        assert expected
        assert not any(math.isnan(value) for value in expected)
        assert found == pytest.approx(expected, rel=1e-5)
