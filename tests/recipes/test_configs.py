"""Each YAML of recipes/configs runs as it stands, on its model's real architecture at a small width and on made-up data."""

import json
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "recipes/configs").glob("*.yaml"))

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 8192}
ARCHITECTURES = {
    "Qwen/Qwen3-0.6B": ("Qwen3", {**SMALL, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}),
    "Qwen/Qwen3-4B": ("Qwen3", {**SMALL, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}),
    "meta-llama/Llama-3.2-1B-Instruct": (
        "Llama",
        {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }},
    ),
    "HuggingFaceTB/SmolLM3-3B": ("SmolLM3", {**SMALL, "num_key_value_heads": 1, "no_rope_layer_interval": 2}),
    "answerdotai/ModernBERT-base": ("ModernBert", {**SMALL, "global_attn_every_n_layers": 2, "local_attention": 32}),
}  # fmt: skip


def make_model(folder: Path, name: str) -> None:
    """A model directory of the real architecture with random weights, and a tokenizer trained on a few words."""
    import transformers

    import toolkit as tk

    kind, settings = ARCHITECTURES[name]
    tokenizer = tk.train_tokenizer(["a few words to learn from, said again and again"] * 50, vocab_size=300)
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if kind == "ModernBert":
        tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
        special.update(cls_token_id=tokenizer.cls_token_id, sep_token_id=tokenizer.sep_token_id)
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(tokenizer), **settings, **special)
    head = "ForMaskedLM" if kind == "ModernBert" else "ForCausalLM"
    getattr(transformers, kind + head)(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_every_config_has_its_architecture_here() -> None:
    assert {yaml.safe_load(path.read_text())["model"] for path in CONFIGS} == set(ARCHITECTURES)


def recipe_of(path: Path) -> str:
    """The recipe that the file's own comment starts."""
    return path.read_text().split("recipes/", 1)[1].split(".py", 1)[0]


def make_rows(recipe: str) -> list[dict]:
    def said(role: str, text: str) -> list[dict]:
        return [{"role": role, "content": text}]

    makers = {
        "accelerated": lambda i: {"text": f"number {i} is {'even' if i % 2 == 0 else 'odd'}", "label": "even" if i % 2 == 0 else "odd"},
        "dpo": lambda i: {"chosen": [*said("user", f"say {i}"), *said("assistant", f"it is {i}")],
                          "rejected": [*said("user", f"say {i}"), *said("assistant", f"no, {i + 1}")]},
        "sft": lambda i: {"messages": [*said("user", f"say {i}"), *said("assistant", f"it is {i}")]},
    }  # fmt: skip
    return [makers.get(recipe, makers["sft"])(i) for i in range(80)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_config_trains_its_architecture(run_recipe, tmp_path: Path, path: Path) -> None:
    """Settings as in the file but for the model's place, the data's and the number of steps."""
    name = yaml.safe_load(path.read_text())["model"]
    make_model(tmp_path / "model", name)
    recipe = recipe_of(path)
    rows = make_rows(recipe)
    folder = tmp_path / "data"
    folder.mkdir()
    for split, part in (("train", rows[:64]), ("test", rows[64:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    run = run_recipe(recipe, "--config", str(path), "--model", "model", "--dataset", "data", "--max-steps", "2", "--logging-steps", "1")
    assert run.code == 0, run.out + run.err
    losses = [event["loss"] for event in run.metrics if "loss" in event]
    assert len(losses) == 2
    assert all(0 < loss < 20 for loss in losses)
    assert run.weights()
