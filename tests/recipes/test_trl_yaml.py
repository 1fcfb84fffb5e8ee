"""YAML files written for TRL run unchanged, and what can't be honoured is said key by key.

The files in fixtures/ were written by hand from TRL's documentation, as a user of `trl sft` and `trl dpo` writes them.
"""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import toolkit as tk
from toolkit.cli.recipe import read_command_line
from toolkit.config import Refusal, read_values, settings_of
from toolkit.config.foreign_names import PASSED_OVER, SAME, TRANSLATED, is_foreign, translate

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = Path(__file__).with_name("fixtures")


def make_inputs(folder: Path, recipe: str) -> None:
    """A model directory and a folder of data, by the names in the YAML files."""
    import transformers

    tokenizer = tk.train_tokenizer(["a few words to learn from, said again and again"] * 50, vocab_size=300)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    def said(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    (folder / "data").mkdir()
    for split, numbers in (("train", range(24)), ("test", range(24, 32))):
        pairs = [{"prompt": said("user", f"say {i}"), "chosen": said("assistant", f"it is {i}"),
                  "rejected": said("assistant", f"no, {i + 1}")} for i in numbers]  # fmt: skip
        chats = [{"messages": pair["prompt"] + pair["chosen"]} for pair in pairs]
        rows = pairs if recipe == "dpo" else chats
        (folder / f"data/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


EXPECTED: dict[str, dict[str, Any]] = {
    "sft": {"model": "model", "dataset": "data", "min_lr_ratio": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 0.03,
            "gradient_accumulation_steps": 2, "max_length": 64},
    "dpo": {"model": "model", "attn_implementation": "sdpa", "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2],
            "reference": "cache", "dropout": 0.0, "use_peft": True, "lora_r": 8, "save_total_limit": 1},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("recipe", EXPECTED)
def test_a_yaml_written_for_trl_runs_unchanged(run_recipe: Any, tmp_path: Path, recipe: str) -> None:
    """Fails when: a key of theirs is refused, or a value is read as another one (`cosine_with_min_lr` without its floor)."""
    make_inputs(tmp_path, recipe)
    run = run_recipe(recipe, "--config", str(FIXTURES / f"trl_{recipe}.yaml"), output_dir="", timeout=300)
    assert run.code == 0, run.out + run.err
    config = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    assert {name: config[name] for name in EXPECTED[recipe]} == EXPECTED[recipe]
    events = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if "loss" in event] == [1, 2]
    assert any("eval_loss" in event for event in events)


def test_what_cannot_be_honoured_is_told_key_by_key_in_one_message(run_recipe: Any, tmp_path: Path) -> None:
    """Fails when: the first key ends the reading, or a value that means something else here is passed over."""
    text = (FIXTURES / "trl_sft.yaml").read_text().replace("use_liger_kernel: false", "use_liger_kernel: true")
    text = text.replace("dataloader_drop_last: false", "dataloader_drop_last: true").replace("loss_type: nll", "loss_type: dft")
    (tmp_path / "theirs.yaml").write_text(text + "eos_token: <|im_end|>\ndataset_config: small\npackin: true\n")
    run = run_recipe("sft", "--config", "theirs.yaml", "--neftune_noise_alpha", "5", output_dir="")
    assert run.code == 2
    assert "neftune-noise-alpha 5: leave it out" in run.err.replace("neftune_noise_alpha", "neftune-noise-alpha")
    run = run_recipe("sft", "--config", "theirs.yaml", output_dir="")
    assert run.code == 2
    assert run.err.startswith("refused: theirs.yaml: settings of Trainer and TRL that can't be taken as they are\n")
    said = {line.split()[1]: line for line in run.err.splitlines() if line.startswith("  - ")}
    assert set(said) == {"use_liger_kernel", "dataloader_drop_last", "loss_type", "eos_token", "dataset_config", "unknown:"}
    assert "dataset_name: data:small" in said["dataset_config"]
    assert "packin. Did you mean packing?" in said["unknown:"]
    assert not (tmp_path / "out").exists()


def config_of(recipe: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"recipe_{recipe}", ROOT / f"recipes/{recipe}.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module.Config


SETTINGS = {recipe: config_of(recipe) for recipe in ("sft", "dpo")}


@pytest.mark.parametrize("recipe", SETTINGS)
def test_every_argument_of_trl_is_known_and_its_default_is_taken(recipe: str) -> None:
    """The installed TRL is the reference: nothing in its dataclasses is a name that we never heard of.

    Fails when: TRL gains an argument, or the row of one is taken out of foreign_names.py.
    """
    trl = pytest.importorskip("trl")
    theirs = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for group in (trl.ScriptArguments, trl.DatasetMixtureConfig, trl.ModelConfig, {"sft": trl.SFTConfig, "dpo": trl.DPOConfig}[recipe])
        for field in dataclasses.fields(group)
    }
    ours = {spelling for each in settings_of(SETTINGS[recipe]).values() for spelling in (each.name, *each.aliases)}
    secret = {"hub_token"}
    image_tables = {"trackio_bucket_id", "trackio_static_space_id"}
    other_methods = {"class_weights", "problem_type"}
    assert {name for name in theirs if name not in ours and not is_foreign(name)} - secret - image_tables - other_methods == set()
    kept = {name: value for name, value in theirs.items() if is_foreign(name) and name not in ours and value is not dataclasses.MISSING}
    refused = {name: value for name, value in kept.items() if isinstance(translate(name, value, {"use_peft": False}), str)}
    assert refused == {"do_train": False}  # the default that nobody means


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"remove_unused_columns": True, "dataloader_drop_last": "False", "dataset_num_proc": None}, {}),
        ({"gradient_checkpointing_kwargs": '{"use_reentrant": false}'}, {}),
        ({"dataset_text_field": "content"}, {"rename_columns": ["content=text"]}),
        ({"evaluation_strategy": False}, {"eval_strategy": "no"}),
        ({"train_sampling_strategy": "group_by_length"}, {"group_by_length": True}),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2}}, {"lr_scheduler_type": "polynomial", "lr_power": 2.0}),
        ({"model_init_kwargs": {"torch_dtype": "torch.bfloat16", "revision": "v1"}}, {"dtype": "bfloat16", "model_revision": "v1"}),
        ({"do_eval": False}, {"eval_strategy": "no"}),
        ({"fsdp": "full_shard auto_wrap"}, {"fsdp": True}),
        ({"fsdp": ""}, {"fsdp": False}),
        ({"packing": True, "eval_packing": True, "padding_free": True}, {"packing": True}),
        ({"loss_type": "chunked_nll"}, {}),
        ({"use_peft": False, "lora_r": 16}, {}),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_key_of_theirs_means_what_it_means_there(written: dict[str, Any], meant: dict[str, Any]) -> None:
    """Fails when: its row in foreign_names.py, or in _OTHER_TRAINERS, is removed."""
    assert read_values(SETTINGS["sft"], written) == meant


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 0.5}}, "take min_lr_ratio"),
        ({"packing": True, "eval_packing": False}, "evaluation packs as training does"),
        ({"data_seed": 7, "seed": 8}, "seed draws the order"),
        ({"remove_unused_columns": 1}, "the model is given only"),
        ({"precompute_ref_log_probs": True}, "this recipe has no such thing"),
        ({"dataset_text_field": "a", "rename_columns": "b=text"}, "are one setting: give it once"),
        ({"use_peft": True}, "take recipes/lora.py"),
        ({"fsdp": "full_shard offload"}, "--fsdp full_shard offload"),
        ({"eos_token": "<|im_end|>"}, "tokenizer: a directory whose tokenizer_config.json says it"),
        ({"truncation_mode": "keep_end"}, "overlong: split, drop or refuse"),
        ({"datasets": [{"path": "org/a", "fraction": 0.7}, {"path": "b", "name": "small", "fraction": 0.3}]},
         "--dataset org/a:0.7,b:small:0.3)"),
        ({"datasets": [{"path": "org/a"}, {"path": "b"}]}, "--dataset org/a:SHARE_1,b:SHARE_2)"),
        ({"datasets": [{"path": "org/a"}]}, "--dataset org/a)"),
        ({"test_split_size": 0.1}, "take eval_fraction"),
        ({"env": {"HF_HOME": "/data", "WANDB_API_KEY": "verysecret"}}, "in the shell: export HF_HOME=... WANDB_API_KEY=..."),
        ({"accelerate_config": "zero3"}, "toolkit train RECIPE --accelerate-config FILE"),
        ({"num_processes": 2}, "toolkit train RECIPE --processes NUMBER"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_they_mean_otherwise_is_refused(written: dict[str, Any], message: str) -> None:
    """Fails when: `translate` takes any value for the one that means what happens anyway."""
    with pytest.raises(Refusal) as refusal:
        read_values(SETTINGS["sft"], written)
    assert message in str(refusal.value)
    assert "verysecret" not in str(refusal.value)


def test_keys_on_which_no_result_depends_are_passed_over_with_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever their value, on a command line and in a file. Fails when: they are refused, said twice, or not said."""
    typed = ["--dataset_num_proc", "8", "--dataloader-prefetch-factor", "4", "--max-steps", "3"]
    config, given = read_command_line(SETTINGS["sft"], typed, {})
    assert (config.max_steps, given) == (3, {"max_steps"})
    assert read_values(SETTINGS["dpo"], {"precompute_ref_batch_size": 7, "dataset_num_proc": 8, "eval_accumulation_steps": None, "dataloader_pin_memory": True}) == {}
    said = capsys.readouterr().err.splitlines()
    assert sorted(line.partition(": ")[2].split(":")[0] for line in said) == ["dataloader_prefetch_factor 4", "dataset_num_proc 8", "precompute_ref_batch_size 7"]
    assert all(line.startswith("passed over: ") and line.endswith(".") for line in said)


def test_flags_of_theirs_are_read_like_keys() -> None:
    """Fails when: canonical_arguments leaves out what a flag of theirs means, or takes the next flag for its value."""
    typed = ["--remove_unused_columns", "--dataset_text_field", "content", "--model-init-kwargs={\"dtype\": \"bfloat16\"}",
             "--do_train", "--evaluation_strategy", "no", "--lora_r", "8", "--use_peft", "False"]  # fmt: skip
    config, given = read_command_line(SETTINGS["sft"], typed, {})
    assert (config.rename_columns, config.dtype, config.eval_strategy) == (["content=text"], "bfloat16", "no")
    assert given == {"rename_columns", "dtype", "eval_strategy"}
    with pytest.raises(Refusal, match="--dataloader-drop-last true: leave it out: every example"):
        read_command_line(SETTINGS["sft"], ["--dataloader_drop_last"], {})


def test_no_key_of_theirs_shadows_a_setting_of_ours() -> None:
    """Fails when: a row is left in the table after the setting of that name came."""
    ours = {spelling for config in SETTINGS.values() for each in settings_of(config).values() for spelling in (each.name, *each.aliases)}
    of_some_recipes = {"loss_type"} | {name for name, meaning in TRANSLATED.items() if meaning is TRANSLATED["use_peft"]}
    assert (set(SAME) | set(TRANSLATED) | set(PASSED_OVER)) & ours == of_some_recipes
    assert not set(SAME) & set(TRANSLATED)
    assert not (set(SAME) | set(TRANSLATED)) & set(PASSED_OVER)
    assert all(advice.endswith(".") for _, advice in SAME.values())
