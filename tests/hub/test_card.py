"""The model card: read by the Hub's own reader, its example run as it is, nothing in it that isn't meant to be shown."""

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from card_rules import problems_of_card
from huggingface_hub import ModelCard

import toolkit as tk
from toolkit.export.card import base_license, model_card, shown_path, with_name
from toolkit.models.adapter_files import base_of_adapter
from toolkit.system.console import printable

RUN_CARD = {
    "settings": {
        "model": "Qwen/Qwen3-0.6B", "dataset": "trl-lib/Capybara:small@1f2e", "learning_rate": 2e-4, "max_steps": 40,
        "num_train_epochs": 2.0, "packing": True, "use_peft": False, "seed": 7, "output_dir": "/home/ann/secret-project/run",
        "api_key": "sk_1", "resume_from": "/home/ann/x", "hub_model_id": "ann/m",
    },
    "model": {"name": "Qwen/Qwen3-0.6B", "commit": "c0ffee"}, "data": {"dataset": "trl-lib/Capybara:small@1f2e", "fingerprint": "f1"},
    "layout": {"global_batch_size": 16, "processes": 2, "engine": "ddp", "precision": "bf16", "steps": 40},
    "versions": {"torch": "2.13"}, "recipe": {"file": "sft.py", "sha256": "0", "commit": "abc-dirty"}, "hardware": {"cores": 8},
}  # fmt: skip
METRICS = {"eval_loss": 1.23456, "eval_accuracy": 0.5, "first_eval_loss": 9.0, "train_loss": 1.0, "eval_odd": float("nan"), "step": 40}


def test_the_hubs_reader_finds_base_license_data_task_and_metrics() -> None:
    """Fails when: a field has another name than the Hub's, or a metric is rounded or not one of the evaluation."""
    card = ModelCard(model_card(RUN_CARD, METRICS, "run", "Qwen3ForCausalLM", license="apache-2.0"))
    data = card.data
    assert (data.base_model, data.license, data.library_name) == ("Qwen/Qwen3-0.6B", "apache-2.0", "transformers")
    assert (data.pipeline_tag, data.datasets) == ("text-generation", ["trl-lib/Capybara"])
    assert data.to_dict()["base_model_relation"] == "finetune"
    found = {each.metric_type: each.metric_value for each in data.eval_results or []}
    assert found == {"loss": 1.23456, "accuracy": 0.5}
    assert {(each.task_type, each.dataset_type) for each in data.eval_results or []} == {("text-generation", "trl-lib/Capybara")}
    for words in ("`c0ffee`", "`apache-2.0`", "| learning_rate | 0.0002 |", "| max_steps | 40 |", "| global_batch_size | 16 |", "| torch | 2.13 |"):
        assert words in card.text


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ({"who": "teacher", "setting": "teacher", "commit": "beef"}, "Distilled from [org/large](https://huggingface.co/org/large) at `beef`."),
        ({"who": "teacher", "setting": "teacher", "commit": None, "/home/ann/secret/large": "d1"}, "Distilled from `large`."),
        ({"who": "teacher", "setting": "teacher", "server_model": "org/served", "root": "/r"}, "Distilled from [org/served]"),
        ({"commit": "beef"}, ""),
        (None, ""),
    ],
)  # fmt: skip
def test_the_card_names_the_teacher_and_the_divergence(reference: dict[str, Any] | None, said: str) -> None:
    """Fails when: a reference counts as a teacher, a path is shown, or beta where the divergence does not read it."""
    settings = {**RUN_CARD["settings"], "teacher": "org/large", "distillation_loss": "reverse_kl", "beta": 0.5, "skew_alpha": 0.1, "temperature": 2.0}
    text = model_card({**RUN_CARD, "settings": settings, "reference": reference}, METRICS, "run", "Qwen3ForCausalLM")
    assert ("Distilled from" in text) == bool(said)
    assert said in text
    assert "ann" not in text.replace("ann/m", "")
    assert ("| distillation_loss | reverse_kl |" in text, "| beta |" in text, "| skew_alpha |" in text) == (True, False, False)


def test_a_card_without_data_has_no_empty_table() -> None:
    """As of a teacher that is trained on the way. Fails when: the section of the training is written."""
    assert "## Training" not in model_card({}, {}, "run", "LlamaForCausalLM")


@pytest.mark.parametrize("adapter", [None, "elsewhere", "inside"])
@pytest.mark.parametrize("license", [None, "mit", "llama3.2", "Qwen RESEARCH (v1)", "qwen-research"])
def test_the_hub_takes_every_card(license: str | None, adapter: str | None) -> None:
    """A license that isn't among its own is `other` with a name. Fails when: a base's license_name is written as the license."""
    for architecture in ("Qwen3ForCausalLM", "BertForSequenceClassification", "Odd"):
        card = model_card(RUN_CARD, METRICS, "run: of #1", architecture, adapter=adapter, license=license)
        assert problems_of_card(card) == []
    known, data = license in (None, "mit", "llama3.2"), ModelCard(card).data
    assert data.license == (license if known else "other")
    assert (data.license_name, data.license_link) == ((None, None) if known else (re.sub("[^a-z0-9]+", "-", str(license).lower()).strip("-"), "https://huggingface.co/Qwen/Qwen3-0.6B"))


def test_settings_that_say_nothing_of_the_training_stay_out() -> None:
    """Fails when: all settings of the run card are shown, one that is none among them, or a path with the folders above it."""
    settings = {**RUN_CARD["settings"], "fp8": "none"}
    run_card = RUN_CARD | {"settings": settings, "data": {"dataset": "/home/ann/secret-project/rows.jsonl"}}
    card = model_card(run_card, METRICS, "run", "LlamaForCausalLM")
    for word in ("fp8", "sk_1", "secret-project", "/home", "resume_from", "num_train_epochs"):
        assert word not in card
    assert "`rows.jsonl`" in card


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ann/rows.jsonl", "rows.jsonl"), ("~/data/rows", "rows"), ("./a/b:0.7,/c/d:0.3", "b:0.7,d:0.3"), ("org/name", "org/name"),
        ("stdlib:sft", "stdlib:sft"), ("org/a:0.5,org/b:0.5", "org/a:0.5,org/b:0.5"), ("../x", "x"),
    ],
)  # fmt: skip
def test_of_a_path_its_last_part_is_shown(text: str, shown: str) -> None:
    """Fails when: the name of a repository is cut, or a folder of this machine is shown."""
    assert shown_path(text) == shown


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.OptimConfig, tk.OutputConfig):
    lora_r: int = 2


SHAPE: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize("absolute", [False, True], ids=["begun here", "anywhere"])
@pytest.mark.parametrize("kind", ["whole", "adapter inside", "adapter elsewhere"])
def test_the_example_loads_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, absolute: bool) -> None:
    """As it is in the card, where the run was started; of an absolute path in the folder that it is in. Fails when: the class, the
    folder of the base or the name isn't that of the model, or the name is that of the run alone."""
    import torch

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    tokenizer = tk.train_tokenizer(["a cat and a dog"] * 9, 280)
    output_dir = str(tmp_path / "deep/run") if absolute else "run"
    config = Config(use_peft=kind != "whole", output_dir=output_dir, **SHAPE)
    if kind == "adapter elsewhere":
        base = Config(output_dir="base", **SHAPE)
        tk.save_model(None, tk.load_model("AutoModelForCausalLM", base, tokenizer), tokenizer, base.output_dir)
        config = Config(use_peft=True, output_dir=output_dir, model=str(tmp_path / "base/model"))
    model: Any = tk.load_model("AutoModelForCausalLM", config, tokenizer)
    model = tk.add_adapter(model, config) if config.use_peft else model
    directory = tk.save_model(None, model, tokenizer, config.output_dir)
    card = (directory / "README.md").read_text()
    if absolute:
        assert f'"{tmp_path}' not in card
        monkeypatch.chdir(tmp_path / "deep")
    example = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(example, names)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.allclose(names["model"].eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits, atol=1e-5)
    assert names["tokenizer"]("a cat")["input_ids"] == tokenizer("a cat")["input_ids"]


def test_the_license_of_the_base_is_found_beside_it_and_on_the_hub(hub: Any, api: Any, tmp_path: Path) -> None:
    """The Hub is asked only when it may be. Fails when: either isn't read, or the Hub is asked in a run that sends nothing."""
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: llama3\n---\n")
    assert base_license(str(tmp_path)) == "llama3"
    hub.make("org/base", files={"README.md": b"---\nlicense: mit\n---\n"})
    assert base_license("org/base") is None
    assert hub.requests == []
    assert base_license("org/base", ask=True) == "mit"
    hub.fail("*", ".*", 500, times=99)
    assert base_license("org/base", ask=True) is None
    assert base_license("tiny-llama", ask=True) is None


def test_a_card_that_someone_edited_keeps_the_edits() -> None:
    """Fails when: the card is written again for the Hub."""
    card = model_card(json.loads(json.dumps(RUN_CARD)), METRICS, "run", "LlamaForCausalLM") + "\nMy words.\n"
    sent = with_name(card, "ann/run")
    assert sent == card.replace('name = "run"', 'name = "ann/run"') != card


def test_the_card_of_an_adapter_that_was_trained_further_names_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its license, and the adapter it was trained from. Fails when: that adapter's directory is taken for the base."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tk.train_tokenizer(["a cat and a dog"] * 9, 280)
    base = Config(output_dir="base", **SHAPE)
    whole = tk.save_model(None, tk.load_model("AutoModelForCausalLM", base, tokenizer), tokenizer, base.output_dir)
    (whole / "README.md").write_text("---\nlicense: mit\n---\n")
    for model, output_dir in ((str(whole), "first"), ("first/model", "second")):
        config = Config(use_peft=True, output_dir=output_dir, model=model)
        adapted = tk.add_adapter(tk.load_model("AutoModelForCausalLM", config, tokenizer), config)
        Path(output_dir).mkdir()
        (Path(output_dir) / "run.json").write_text(json.dumps({"model": {"name": model, "base": base_of_adapter(model)}}))
        card = (tk.save_model(None, adapted, tokenizer, output_dir) / "README.md").read_text()
        assert ModelCard(card).data.license == "mit"
    assert re.search(r"An adapter of `model`, .*`mit`, .*`first/model`\.", card)
    (whole.parent / "run.json").write_text("{}")
    merged = model_card(RUN_CARD | {"model": {"name": str(whole.resolve())}}, METRICS, "run", "LlamaForCausalLM")
    assert "A model trained from `base/model`." in merged
    on_hub = RUN_CARD | {"model": {"name": "first/model", "commit": "c0ffee", "base": {"name": "Qwen/Qwen3-0.6B", "revision": "main"}}}
    card = model_card(on_hub, METRICS, "run", "Qwen3ForCausalLM", adapter="elsewhere", license="apache-2.0")
    assert problems_of_card(card) == []
    assert (ModelCard(card).data.base_model, ModelCard(card).data.license) == ("Qwen/Qwen3-0.6B", "apache-2.0")
    assert "[Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B) at `c0ffee`" in card
    assert "trained further from `first/model`" in card


@pytest.mark.parametrize("name", ['say "hi"', "a`b``c", "back\\slash", "new\nline", "[link](x) <b>|", "e\x1b[31m", "🙂"])
def test_a_name_is_a_name_whatever_it_holds(name: str) -> None:
    """In the code, in inline code and in a heading. Fails when: one of them is put between quotes or backticks as it is."""
    run_card = RUN_CARD | {"data": {"dataset": f"data {name}"}}
    for text in (model_card(run_card, METRICS, name, "LlamaForCausalLM"), with_name(model_card(RUN_CARD, METRICS, "x", "LlamaForCausalLM"), name)):
        (code,) = re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
        (line,) = re.findall(r"^name = (.*)$", code, re.MULTILINE)
        assert ast.literal_eval(line) == name
    body = model_card(run_card, METRICS, name, "LlamaForCausalLM").split("---\n", 2)[2]
    flat = " ".join(printable(f"data {name}").split())
    fence = re.search(r"^Data: (`+)", body, re.MULTILINE)
    assert fence
    assert re.search(rf"Data: {fence[1]} ?{re.escape(flat)} ?{fence[1]}(?!`)", body)
    assert fence[1] not in flat
    assert "\x1b" not in body
    assert "# [link]" not in body
