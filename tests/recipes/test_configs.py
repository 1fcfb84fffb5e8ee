"""Each YAML of recipes/configs runs as it is, on its model's real architecture at a small width and on made-up data."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "recipes/configs").glob("*.yaml"))
# The recipe that takes a config's settings with an adapter where it has none, and without one where it has one.
WITH_AND_WITHOUT = {"sft": "lora", "lora": "sft", "dpo": "dpo", "question_answering": "question_answering", "seq2seq": "seq2seq"}

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 8192}
ARCHITECTURES = {
    "BAAI/bge-base-en-v1.5": ("Bert", SMALL),
    "Qwen/Qwen3-0.6B": ("Qwen3", {**SMALL, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}),
    "Qwen/Qwen3-1.7B": ("Qwen3", {**SMALL, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}),
    "Qwen/Qwen3-4B": ("Qwen3", {**SMALL, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}),
    "meta-llama/Llama-3.2-1B-Instruct": (
        "Llama",
        {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }},
    ),
    "HuggingFaceTB/SmolLM3-3B": ("SmolLM3", {**SMALL, "num_key_value_heads": 1, "no_rope_layer_interval": 2}),
    "google/flan-t5-base": ("T5", {
        "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
        "initializer_factor": 0.1,
    }),
    "answerdotai/ModernBERT-base": ("ModernBert", {**SMALL, "global_attn_every_n_layers": 2, "local_attention": 32}),
}  # fmt: skip


def make_model(folder: Path, name: str, head: str | None = None, **more: Any) -> None:
    """A model directory of the real architecture with random weights, and a tokenizer trained on a few words.

    `head`: not that which the model is published with; `more`: further fields of its config.
    """
    import transformers

    import toolkit as tk

    kind, settings = ARCHITECTURES[name]
    tokenizer = tk.train_tokenizer(["a few words to learn from, said again and again"] * 50, vocab_size=300)
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if kind == "ModernBert":
        tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"})
        special.update(cls_token_id=tokenizer.cls_token_id, sep_token_id=tokenizer.sep_token_id)
    if kind == "T5":
        special.update(decoder_start_token_id=tokenizer.pad_token_id)
        del special["bos_token_id"]
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(tokenizer), **settings, **special, **more)
    head = head or {"ModernBert": "ForMaskedLM", "Bert": "ForMaskedLM", "T5": "ForConditionalGeneration"}.get(kind, "ForCausalLM")
    getattr(transformers, kind + head)(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def is_of_a_built_in_shape(path: Path) -> bool:
    return path.stem.endswith("_pretrain") or path.stem == "arithmetic_start"


def test_every_config_has_its_architecture_here() -> None:
    """Fails when: a config file names another model."""
    models = {yaml.safe_load(path.read_text())["model"] for path in CONFIGS if not is_of_a_built_in_shape(path)}
    assert models == set(ARCHITECTURES)


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
        "embedding": lambda i: {"anchor": f"say {i}", "positive": f"it is {i}", "negative": f"no, {i + 1}"},
        "reranker": lambda i: {"query": f"say {i}", "positive": f"it is {i}", "negative": f"no, {i + 1}"},
        "multiple_choice": lambda i: {"question": f"say {i}", "choices": [f"no, {i + 1}", f"it is {i}"], "answer": "B"},
        "question_answering": lambda i: {"question": "Which number?", "context": f"number {i} is said " + "again and " * 300,
                                         "answers": {"text": [str(i)], "answer_start": [7]}},
        "pretrain": lambda i: {"text": f"number {i} is said again and again, as are many others " * 9},
        "token_classification": lambda i: {"tokens": ["Anna", "counts", str(i)], "ner_tags": ["B-PER", "O", "I-NUM" if i % 7 else "O"]},
        "seq2seq": lambda i: {"dialogue": f"say {i} and {i + 1} and so on", "summary": f"say numbers from {i}"},
        "sft": lambda i: {"messages": [*said("user", f"say {i}"), *said("assistant", f"it is {i}")]},
    }  # fmt: skip
    makers["grpo"] = makers["ppo"] = lambda i: {"question": f"say {i}", "answer": f"it is\n#### {i}"}
    makers["masked_lm"], makers["distill_classifier"] = makers["pretrain"], makers["accelerated"]
    return [makers.get(recipe, makers["sft"])(i) for i in range(80)]


def run_config(run_recipe: Any, folder: Path, path: Path, *flags: str, recipe: str, env: dict[str, str] | None = None) -> Any:
    """Two steps with the settings of the file but for the model's place, the data's and the number of steps."""
    if is_of_a_built_in_shape(path):  # the shape itself, made smaller, and a tokenizer of a few words where it names one
        model = ["--hidden-size", "64", "--num-hidden-layers", "2", "--num-attention-heads", "4", "--intermediate-size", "96"]
        if "tokenizer:" in path.read_text():
            import toolkit as tk

            tk.train_tokenizer(["a few words to learn from, said again and again"] * 50, vocab_size=300).save_pretrained(folder / "tokens")
            model += ["--tokenizer", "tokens", "--global-batch-size", "2", "--per-device-train-batch-size", "2"]
        else:
            model += ["--vocab-size", "300"]
    else:
        model = ["--model", "model"]
        make_model(folder / "model", yaml.safe_load(path.read_text())["model"])
    rows = make_rows(recipe)
    (folder / "data").mkdir()
    for split, part in (("train", rows[:64]), ("test", rows[64:])):
        (folder / f"data/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    short = [*model, "--dataset", "data", "--train-split", "train", "--max-steps", "2", "--logging-steps", "1"]
    by_rewards = recipe in ("grpo", "ppo")
    if recipe in ("distill", "distill_classifier"):
        of_classes = {} if recipe == "distill" else {"head": "ForSequenceClassification", "id2label": {0: "even", 1: "odd"}}
        make_model(folder / "teacher", yaml.safe_load(path.read_text())["model"], **of_classes)
        short += ["--teacher", "teacher"]
    short += ["--max-completion-length", "4", "--global-batch-size", "16"] if by_rewards else []
    short += ["--answer-length", "32", "--max-eval-examples", "4"] if recipe == "diffusion" else []
    if "SampleConfig" in (ROOT / f"recipes/{recipe}.py").read_text():
        short += ["--num-samples", "1", "--sample-max-new-tokens", "8"]
    if not by_rewards and not is_of_a_built_in_shape(path):  # bfloat16 is slow on a CPU without it: a few short texts are enough
        settings = yaml.safe_load(path.read_text())
        short += ["--per-device-train-batch-size", str(min(settings["per_device_train_batch_size"], 4))]
        short += ["--gradient-accumulation-steps", "2"] if "gradient_accumulation_steps" in settings else ["--global-batch-size", "4"]
    run = run_recipe(recipe, "--config", str(path), *short, *flags, env=env)
    assert run.code == 0, run.out + run.err
    losses = [event["loss"] for event in run.metrics if "loss" in event]
    assert len(losses) == 2
    assert all(0 < loss < 20 or by_rewards for loss in losses)  # a policy's loss has any sign
    return run


@pytest.mark.fast(3)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_config_trains_its_architecture(run_recipe: Any, tmp_path: Path, path: Path) -> None:
    """Fails when: a key of the file is unknown to its recipe, or refused."""
    assert run_config(run_recipe, tmp_path, path, recipe=recipe_of(path)).weights()


def one_of_each_architecture(configs: list[Path]) -> list[Path]:
    first: dict[str, Path] = {}
    for path in configs:
        if not is_of_a_built_in_shape(path):
            first.setdefault(ARCHITECTURES[yaml.safe_load(path.read_text())["model"]][0], path)
    return list(first.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", one_of_each_architecture([path for path in CONFIGS if recipe_of(path) in WITH_AND_WITHOUT]), ids=lambda path: path.stem
)
def test_the_config_trains_with_an_adapter_and_without(run_recipe: Any, tmp_path: Path, path: Path) -> None:
    """The other way than the file's own: whole weights where that has an adapter, an adapter where it has none.

    Fails when: an adapter finds no module to adapt in one of the architectures, or whole weights need another setting.
    """
    adapted = yaml.safe_load(path.read_text()).get("use_peft", recipe_of(path) == "lora")
    recipe = WITH_AND_WITHOUT[recipe_of(path)]
    if adapted:
        text = "".join(line for line in path.read_text().splitlines(True) if not line.startswith(("lora_", "use_peft")))
        path = tmp_path / path.name
        path.write_text(text)
    run = run_config(run_recipe, tmp_path, path, *([] if adapted else ["--use-peft", "--lora-r", "4"]), recipe=recipe)
    assert (run.output_dir / "model/adapter_config.json").exists() != adapted


@pytest.mark.slow
@pytest.mark.parametrize("path", one_of_each_architecture(CONFIGS), ids=lambda path: path.stem)
def test_the_config_trains_under_zero_3(run_recipe: Any, tmp_path: Path, path: Path) -> None:
    """All weights in pieces, on one rank.

    Fails when: a step of the recipe reads a weight that ZeRO-3 holds in pieces.
    """
    engine = ["--deepspeed", str(ROOT / "tests/all_sharded.json"), "--use-cpu"]
    engine += ["--no-bf16"] if recipe_of(path) == "diffusion" else []  # which takes ten times as long on a CPU without it
    assert run_config(run_recipe, tmp_path, path, *engine, recipe=recipe_of(path)).weights()
