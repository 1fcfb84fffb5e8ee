"""toolkit merge: one ordinary model of an adapter and its base."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import toolkit as tk
from toolkit.cli.main import app
from toolkit.export import merge as merging
from toolkit.models.sentence_files import EmbeddingStyle
from toolkit.models.trained import load_trained

pytestmark = pytest.mark.warm

ROOT = Path(__file__).resolve().parents[2]
CAUSAL = "AutoModelForCausalLM"
SHAPE: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
IDS = torch.arange(24).reshape(2, 12) * 7 % 270


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.OptimConfig, tk.OutputConfig):
    use_peft: bool = True
    lora_r: int = 4


def make_adapter(folder: Path, dtype: str = "float32", **settings: Any) -> Path:
    """An adapter that changes the logits a good deal, in folder/run/model, on a base in folder/base."""
    tokenizer = tk.train_tokenizer(["one two three four"] * 9, 300)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    built = Config(use_peft=False, dtype=dtype, **SHAPE)
    tk.load_model(CAUSAL, built, tokenizer).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    config = Config(model=str(folder / "base"), dtype=dtype, output_dir=str(folder / "run"), **settings)
    model = tk.add_adapter(tk.load_model(CAUSAL, config), config, tokenizer)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    tk.save_model(None, model, tokenizer, config.output_dir)
    rows = [json.dumps({"messages": [{"role": "user", "content": f"one {i}"}, {"role": "assistant", "content": "two"}]}) for i in range(9)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "run/config.yaml").write_text(f"dataset: {folder / 'rows.jsonl'}\n")
    return folder / "run/model"


def merge(*words: Any) -> Any:
    """In this process; its exit code and what it said."""
    return CliRunner().invoke(app, ["merge", *map(str, words)])


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.float().eval()(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("dtype", "tolerance", "settings"),
    [
        ("float32", 1e-5, {}), ("float32", 1e-5, {"init_lora_weights": "pissa"}), ("float32", 1e-5, {"use_dora": True}),
        ("float32", 1e-5, {"lora_modules_to_save": ["embed_tokens"]}),
        ("float32", 1e-5, {"lora_trainable_tokens": ["<|endoftext|>", "o"]}), ("bfloat16", 5e-2, {}), ("float16", 1e-2, {}),
    ],
)  # fmt: skip
def test_the_merged_model_computes_what_the_adapted_one_does(
    tmp_path: Path, dtype: str, tolerance: float, settings: dict[str, Any]
) -> None:
    """Read by transformers alone, in the type of the base; tokenizer and chat template are the run's.

    Fails when: the base is written without the updates, or the type of the computation in the place of the base's.
    """
    adapter = make_adapter(tmp_path, dtype, **settings)
    done = merge(adapter, "--into", tmp_path / "merged")
    assert done.exit_code == 0, done.output
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert {tensor.dtype for tensor in load_file(tmp_path / "merged/model.safetensors").values()} == {merged.dtype}
    assert merged.dtype == getattr(torch, dtype)
    assert (merged.get_input_embeddings().weight is merged.get_output_embeddings().weight) is True
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    plain = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, adapter))
    largest = float(adapted.abs().max())
    assert float((plain - adapted).abs().max()) > 10 * tolerance * largest
    assert float((logits(merged) - adapted).abs().max()) <= tolerance * largest
    tokenizers = [transformers.AutoTokenizer.from_pretrained(folder) for folder in (adapter, tmp_path / "merged")]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert not (tmp_path / "merged/adapter_config.json").exists()
    assert not list(tmp_path.glob(".merged.*"))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_an_adapter_of_a_base_in_4_bits_is_merged_into_what_it_was_trained_on(tmp_path: Path, kind: str) -> None:
    """The merged model computes what the adapter on the 4-bit base does, and the published weights would not.

    Fails when: the base is read as it was published, or rounded in another way than in training.
    """
    adapter = make_adapter(tmp_path, load_in_4bit=True, bnb_4bit_quant_type=kind)
    done = merge(adapter, "--into", tmp_path / "merged")
    assert done.exit_code == 0, done.output
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(merged.config, "quantization_config")
    rounding = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype="float32")
    rounded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=rounding, device_map="cpu")
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(rounded, adapter).train()(input_ids=IDS).logits  # no dropout; in float32 throughout
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    published = logits(PeftModel.from_pretrained(base, adapter))
    largest = float(adapted.abs().max())
    assert float((logits(merged) - adapted).abs().max()) <= 1e-5 * largest
    assert float((published - adapted).abs().max()) > 1e-3 * largest


def test_an_adapter_without_a_tokenizer_takes_its_bases(tmp_path: Path) -> None:
    """As many from elsewhere are. Fails when: the adapter's directory alone is asked, or a missing one ends in a traceback."""
    adapter = make_adapter(tmp_path)
    for path in (*adapter.glob("tokenizer*"), adapter / "chat_template.jinja"):
        path.unlink(missing_ok=True)
    assert merge(adapter, "--into", tmp_path / "merged").exit_code == 0
    tokenizers = [transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("base", "merged")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    for path in (tmp_path / "base").glob("tokenizer*"):
        path.unlink()
    assert re.search(rf"^{adapter}: .*{tmp_path}/base .*tokenizer", refusal_of(adapter, "--into", tmp_path / "again"))


def test_the_rows_compared_are_those_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the chat template; of --dataset where it is given. Fails when: config.yaml is not looked for."""
    adapter, seen = make_adapter(tmp_path), list[str]()
    real = merging._text
    monkeypatch.setattr(merging, "_text", lambda row, tokenizer: seen.append(real(row, tokenizer)) or seen[-1])
    assert merge(adapter, "--into", tmp_path / "merged").exit_code == 0
    assert len(seen) == 4
    assert all(text.startswith("user: one") and text.endswith("assistant: two\n") for text in seen)
    (tmp_path / "other.jsonl").write_text("\n".join(json.dumps({"text": f"three {i}"}) for i in range(30)))
    assert merge(adapter, "--into", tmp_path / "again", "--dataset", tmp_path / "other.jsonl").exit_code == 0
    assert [text.split()[0] for text in seen[4:]] == ["three"] * 4


def test_another_models_logits_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code 1, the old model stays. Fails when: the comparison is left out, or made after the writing."""
    adapter = make_adapter(tmp_path)
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged/mine.txt").write_text("old")
    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda self: self.unload(), raising=False)
    done = merge(adapter, "--into", tmp_path / "merged", "--overwrite")
    assert done.exit_code == 1
    assert "at most 1e-05" in done.output
    assert [path.name for path in (tmp_path / "merged").iterdir()] == ["mine.txt"]


def test_a_runs_directory_stands_for_its_adapter(tmp_path: Path) -> None:
    """As in the other commands. Fails when: the directory itself is taken for the adapter."""
    adapter = make_adapter(tmp_path)
    for name, given in (("a", adapter), ("b", adapter.parent)):
        assert merge(given, "--into", tmp_path / name).exit_code == 0
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert merge(adapter.parent, "--into", adapter, "--overwrite").exit_code == 2


def test_what_is_there_is_kept_unless_it_may_go(tmp_path: Path) -> None:
    """An empty directory is as good as none. Fails when: --overwrite is not asked for, or merges the two directories."""
    adapter = make_adapter(tmp_path)
    (tmp_path / "merged").mkdir()
    assert merge(adapter, "--into", tmp_path / "merged").exit_code == 0
    (tmp_path / "merged/mine.txt").write_text("old")
    refused = merge(adapter, "--into", tmp_path / "merged")
    assert refused.exit_code == 2
    assert "--overwrite" in refused.output
    assert (tmp_path / "merged/mine.txt").exists()
    assert merge(adapter, "--into", tmp_path / "merged", "--overwrite").exit_code == 0
    assert not (tmp_path / "merged/mine.txt").exists()
    assert merge(adapter, "--into", adapter, "--overwrite").exit_code == 2
    assert merge(adapter, "--into", tmp_path / "run", "--overwrite").exit_code == 2
    assert (adapter / "adapter_model.safetensors").exists()


def refusal_of(*words: Any) -> str:
    done = merge(*words)
    assert isinstance(done.exception, tk.Refusal), done.output
    return str(done.exception)


def test_what_is_no_adapter_or_has_no_base_is_refused(tmp_path: Path) -> None:
    """Fails when: one of the checks is left out."""
    adapter = make_adapter(tmp_path)
    assert "is no adapter" in refusal_of(tmp_path / "base", "--into", tmp_path / "merged")
    assert merge(tmp_path / "nowhere", "--into", tmp_path / "merged").exit_code == 2
    (tmp_path / "base/config.json").rename(tmp_path / "base/kept")
    settings = json.loads((tmp_path / "base/kept").read_text())
    quantized = {**settings, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "base/config.json").write_text(json.dumps(quantized))
    assert "is quantized" in refusal_of(adapter, "--into", tmp_path / "merged")
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    assert "which is gone" in refusal_of(adapter, "--into", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_refusal_is_one_message_and_code_2(tmp_path: Path) -> None:
    """In a process of its own. Fails when: the command prints a traceback."""
    command = [sys.executable, "-m", "toolkit", "merge", str(tmp_path), "--into", str(tmp_path / "merged")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"refused: {tmp_path}: is no adapter" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_classifier_is_merged_with_its_own_head(tmp_path: Path) -> None:
    """Three labels with names, of a base without a head. Fails when: the head is made with two, or the names are left behind."""
    make_adapter(tmp_path)
    config = Config(model=str(tmp_path / "base"), output_dir=str(tmp_path / "classes"))
    labels = {"num_labels": 3, "id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    model = tk.add_adapter(tk.load_model("AutoModelForSequenceClassification", config, **labels), config)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    tk.save_model(None, model, tk.load_tokenizer(config), config.output_dir)
    done = merge(tmp_path / "classes/model", "--into", tmp_path / "merged", "--dataset", tmp_path / "rows.jsonl")
    assert done.exit_code == 0, done.output
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged), logits(model), rtol=0, atol=1e-5)
    assert merged.config.id2label == labels["id2label"]
    (tmp_path / "classes/model/model_config.json").unlink()  # as an adapter that was made elsewhere
    done = merge(tmp_path / "classes/model", "--into", tmp_path / "again", "--dataset", tmp_path / "rows.jsonl")
    assert done.exit_code == 0, done.output


def make_another_adapter(folder: Path, auto_class: str, shape: str, **settings: Any) -> tuple[Path, Any]:
    """An adapter that changes what a model of a built-in shape computes, in folder/run/model, on a base in folder/base."""
    tokenizer = tk.train_tokenizer(["one two three four"] * 9, 300, encoder=True)
    built = Config(model=shape, use_peft=False, max_length=64, **SHAPE)
    tk.load_model(auto_class, built, tokenizer).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    config = Config(model=str(folder / "base"), output_dir=str(folder / "run"), max_length=64)
    base = tk.load_model(auto_class, config)
    for name, value in settings.items():
        setattr(base.generation_config, name, value)
    model = tk.add_adapter(base, config, tokenizer)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    files = tk.sentence_files(model, EmbeddingStyle("mean", "q: "), 24) if auto_class == "AutoModel" else None
    tk.save_model(None, model, tokenizer, config.output_dir, files=files)
    rows = [json.dumps({"source": f"one two {i}", "target": "three four"}) for i in range(9)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder / "run/model", model.eval()


def test_an_encoder_decoder_is_merged_and_begins_its_targets_as_the_adapted_one(tmp_path: Path) -> None:
    """As an NLLB begins them with the language that was trained. Fails when: the decoder is given nothing to read, or the adapter's
    generation_config is left behind: then so it is in `toolkit evaluate` and `generate`."""
    adapter, model = make_another_adapter(tmp_path, "AutoModelForSeq2SeqLM", "tiny-t5", forced_bos_token_id=7)
    done = merge(adapter, "--into", tmp_path / "merged", "--dataset", tmp_path / "rows.jsonl")
    assert done.exit_code == 0, done.output
    merged = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        found, wanted = (each(input_ids=IDS, decoder_input_ids=IDS).logits for each in (merged, model))
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    assert merged.generation_config.forced_bos_token_id == 7
    loaded, _ = load_trained("AutoModelForSeq2SeqLM", tk.ModelConfig(model=str(adapter)), torch.device("cpu"))
    assert loaded.generation_config.forced_bos_token_id == 7


def test_an_encoder_of_embeddings_is_merged_with_what_sentence_transformers_reads(tmp_path: Path) -> None:
    """Fails when: a model without logits is none, or pooling and prompts stay in the adapter's directory."""
    adapter, model = make_another_adapter(tmp_path, "AutoModel", "tiny-bert")
    done = merge(adapter, "--into", tmp_path / "merged", "--dataset", tmp_path / "rows.jsonl")
    assert done.exit_code == 0, done.output
    merged = transformers.AutoModel.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        found, wanted = (each(input_ids=IDS).last_hidden_state for each in (merged, model))
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    assert tk.embedding_style(tk.ModelConfig(model=str(tmp_path / "merged"))) == EmbeddingStyle("mean", "q: ")


def test_a_damaged_adapter_is_refused(tmp_path: Path) -> None:
    """Numbers that are not finite, and shapes of another model. Fails when: NaN passes for a small difference."""
    adapter = make_adapter(tmp_path)
    path = adapter / "adapter_model.safetensors"
    good = load_file(path)
    name = sorted(good)[0]
    save_file({**good, name: good[name] * float("nan")}, path)
    assert f"{name} holds NaN" in refusal_of(adapter, "--into", tmp_path / "merged")
    save_file({**good, name: torch.full_like(good[name], 3e38)}, path)  # finite, but no product with it is
    done = merge(adapter, "--into", tmp_path / "merged")
    assert done.exit_code == 1
    assert "nan of the largest" in done.output
    save_file({**good, name: torch.ones(5, 5)}, path)
    assert re.search(rf"^{adapter}: .*{tmp_path}/base: ", refusal_of(adapter, "--into", tmp_path / "merged"))
    assert not (tmp_path / "merged").exists()
