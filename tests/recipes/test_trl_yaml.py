"""YAML files written for TRL run unchanged, and what can't be honored is said key by key.

The files in fixtures/ were written by hand from TRL's documentation, as a user of `trl sft` and `trl dpo` writes them.
"""

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

import toolkit as tk
from toolkit.command_line.reading import read_command_line
from toolkit.config import Refusal, read_values, settings_of
from toolkit.config.files import read_config_file
from toolkit.config.foreign_names import PASSED_OVER, SAME
from toolkit.config.foreign_values import TRANSLATED, is_foreign, translate
from toolkit.config.other_trainers import COUNTERPARTS

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
    "sft": {"model": "model", "dataset": "data", "min_lr_ratio": 0.1, "lr_scheduler_type": "cosine_with_min_lr", "warmup_steps": 0.03,
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


def test_what_cannot_be_honored_is_told_key_by_key_in_one_message(run_recipe: Any, tmp_path: Path) -> None:
    """Fails when: the first key ends the reading, or a value that means something else here is passed over."""
    text = (FIXTURES / "trl_sft.yaml").read_text().replace("use_liger_kernel: false", "load_in_8bit: true")
    text = text.replace("dataloader_drop_last: false", "dataloader_drop_last: true").replace("loss_type: nll", "loss_type: dft")
    (tmp_path / "theirs.yaml").write_text(text + "eos_token: <|im_end|>\ndataset_config: small\npackin: true\n")
    run = run_recipe("sft", "--config", "theirs.yaml", "--neftune_noise_alpha", "5", output_dir="")
    assert run.code == 2
    assert re.search(r"neftune[-_]noise[-_]alpha 5: .*\bleave\b", run.err)
    run = run_recipe("sft", "--config", "theirs.yaml", output_dir="")
    assert run.code == 2
    assert run.err.startswith("refused: theirs.yaml: settings of Trainer and TRL ")
    said = {line.split()[1]: line for line in run.err.splitlines() if line.startswith("  - ")}
    assert set(said) == {"load_in_8bit", "dataloader_drop_last", "loss_type", "eos_token", "dataset_config", "unknown:"}
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
    other_methods = {"class_weights", "problem_type"}
    assert {name for name in theirs if name not in ours and not is_foreign(name)} - secret - other_methods == set()
    kept = {name: value for name, value in theirs.items() if is_foreign(name) and name not in ours and value is not dataclasses.MISSING}
    refused = {name: value for name, value in kept.items() if isinstance(translate(name, value, {"use_peft": False}), str)}
    assert refused == {}
    # a null that is a default there: taken where it is None here too, else it says nothing
    nulls = {name: None for name, value in theirs.items() if name in ours and value is None}
    assert {"ddp_backend", "eval_steps", "attn_implementation"} <= set(nulls)
    assert all(value is None for value in read_values(SETTINGS[recipe], nulls).values())


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"remove_unused_columns": True, "dataloader_drop_last": "False", "dataset_num_proc": None},
         {"preprocessing_num_workers": None}),
        ({"dataset_num_proc": 4}, {"preprocessing_num_workers": 4}),
        ({"gradient_checkpointing_kwargs": '{"use_reentrant": false}'}, {}),
        ({"dataset_text_field": "content"}, {"rename_columns": ["content=text"]}),
        ({"evaluation_strategy": False}, {"eval_strategy": "no"}),
        ({"train_sampling_strategy": "group_by_length"}, {"group_by_length": True}),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2}}, {"lr_scheduler_type": "polynomial", "lr_power": 2.0}),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": "1e-6"}},
         {"lr_scheduler_type": "cosine_with_min_lr", "min_lr": 1e-6}),
        ({"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"warmup_type": "cosine", "decay_type": "1-sqrt", "min_lr_ratio": 0.1}},
         {"lr_scheduler_type": "warmup_stable_decay", "warmup_type": "cosine", "lr_decay_type": "1-sqrt", "min_lr_ratio": 0.1}),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"factor": 0.5, "patience": 2, "mode": "max"}},
         {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_gamma": 0.5, "lr_patience": 2, "greater_is_better": True}),
        ({"learning_rate": 1e-3, "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-4, "power": 2}},
         {"learning_rate": 1e-3, "lr_scheduler_type": "polynomial", "min_lr": 1e-4, "lr_power": 2.0}),
        ({"model_init_kwargs": {"torch_dtype": "torch.bfloat16", "revision": "v1"}}, {"dtype": "bfloat16", "model_revision": "v1"}),
        ({"do_eval": False}, {"eval_strategy": "no"}),
        ({"resume_from_checkpoint": True}, {"resume": True}),
        ({"resume_from_checkpoint": "False"}, {"resume": False}),
        ({"resume_from_checkpoint": "runs/a/checkpoints/step-4"}, {"resume_from": "runs/a/checkpoints/step-4"}),
        ({"fsdp": "full_shard auto_wrap"}, {"fsdp": True}),
        ({"fsdp": ""}, {"fsdp": False}),
        ({"packing": True, "eval_packing": True, "padding_free": True}, {"packing": True}),
        ({"loss_type": "chunked_nll"}, {}),
        ({"use_peft": False, "lora_r": 16}, {}),
        ({"optim": "adamw_hf"}, {"optim": "adamw_torch"}),
        ({"metric_for_best_model": "eval_mean_token_accuracy"}, {"metric_for_best_model": "eval_token_accuracy"}),
        ({"metric_for_best_model": "rewards/margins"}, {"metric_for_best_model": "eval_reward_margin"}),
        ({"metric_for_best_model": "eval_my/own"}, {"metric_for_best_model": "eval_my/own"}),
        ({"optim": "paged_adamw_8bit"}, {"optim": "adamw_bnb_8bit"}),
        ({"adafactor": True}, {"optim": "adafactor"}),
        ({"packing": True, "packing_strategy": "first_fit"}, {"packing": True, "packing_strategy": "bfd"}),
        ({"packing": True, "packing_strategy": "greedy"}, {"packing": True, "packing_strategy": "bfd"}),
        ({"packing": True, "packing_strategy": "bfd_split"}, {"packing": True, "packing_strategy": "bfd", "overlong": "split"}),
        ({"packing_strategy": "bfd_split", "overlong": "drop"}, {"packing_strategy": "bfd", "overlong": "drop"}),
        ({"validation_split_percentage": 5, "block_size": 64, "train_file": "a.txt"}, {"eval_fraction": 0.05, "max_length": 64, "dataset": "a.txt"}),
        ({"text_column_names": ["a", "b"], "label_column_name": "c"}, {"rename_columns": ["a=text", "b=text_pair", "c=label"]}),
        ({"text_column_name": "text", "label_column_name": "label"}, {}),
        ({"lr_scheduler_type": "warmup_stable_decay", "max_steps": 8, "lr_scheduler_kwargs": {"num_decay_steps": 2, "min_lr_ratio": 0.1}},
         {"lr_scheduler_type": "warmup_stable_decay", "max_steps": 8, "lr_decay_ratio": 0.25, "min_lr_ratio": 0.1}),
        ({"do_train": False, "test_file": "c.txt"}, {}),
        ({"config_name": "org/m", "model_name_or_path": "org/m"}, {"model": "org/m"}),
        ({"task_name": "mrpc"}, {"dataset": "nyu-mll/glue:mrpc", "rename_columns": ["sentence1=text", "sentence2=text_pair"]}),
        ({"task_name": "ner", "train_file": "a.jsonl"}, {"dataset": "a.jsonl"}),
        ({"hub_token": None, "push_to_hub_token": "<PUSH_TO_HUB_TOKEN>", "use_auth_token": True}, {}),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_key_of_theirs_means_what_it_means_there(written: dict[str, Any], meant: dict[str, Any]) -> None:
    """Fails when: its row in foreign_names.py, or in _OTHER_TRAINERS, is removed."""
    assert read_values(SETTINGS["sft"], written) == meant


def test_a_training_and_an_evaluation_file_of_one_folder_are_that_folder(tmp_path: Path) -> None:
    """Where the folder holds nothing else. Fails when: other files of the folder are taken as well, or no folder is."""
    written = {"train_file": str(tmp_path / "train.json"), "validation_file": str(tmp_path / "validation.json")}
    for path in written.values():
        Path(path).write_text('{"text": "a"}')
    assert read_values(SETTINGS["sft"], written) == {"dataset": str(tmp_path)}
    (tmp_path / "train_more.json").write_text('{"text": "b"}')
    with pytest.raises(Refusal, match="then write dataset: both"):
        read_values(SETTINGS["sft"], written)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 0.5}}, "take min_lr_ratio"),
        ({"packing": True, "eval_packing": False}, "evaluation packs as training does"),
        ({"data_seed": 7, "seed": 8}, "seed draws the order"),
        ({"dataloader_drop_last": 1}, "every example is trained on"),
        ({"hub_token": "hf_verysecret"}, "Tokens and keys"),
        ({"train_file": "a.jsonl", "validation_file": "b.jsonl"}, "ln -s \"$(realpath b.jsonl)\" both/validation.jsonl; then write dataset: both"),
        ({"config_name": "org/n", "model_name_or_path": "org/m"}, "the shape is the model's own"),
        ({"task_name": "stsb"}, "write dataset: nyu-mll/glue:TASK"),
        ({"validation_split_percentage": "some"}, "take eval_fraction"),
        ({"precompute_ref_log_probs": True}, "no such thing"),
        ({"dataset_text_field": "a", "rename_columns": "b=text"}, "are one setting"),
        ({"use_peft": True}, "take recipes/lora.py"),
        ({"fsdp": "full_shard offload"}, "--fsdp full_shard offload"),
        ({"eos_token": "<|im_end|>"}, "tokenizer_config.json"),
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
    typed = ["--dataloader_pin_memory", "false", "--dataloader-prefetch-factor", "4", "--max-steps", "3"]
    config = read_command_line(SETTINGS["sft"], typed, {})
    assert (config.max_steps, config.given) == (3, ("max_steps",))
    assert read_values(SETTINGS["dpo"], {"precompute_ref_batch_size": 7, "ddp_bucket_cap_mb": 8, "eval_accumulation_steps": None, "dataloader_pin_memory": True}) == {}
    said = capsys.readouterr().err.splitlines()
    assert sorted(line.partition(": ")[2].split(":")[0] for line in said) == ["dataloader_pin_memory false", "dataloader_prefetch_factor 4", "ddp_bucket_cap_mb 8", "precompute_ref_batch_size 7"]
    assert all(line.startswith("passed over: ") and line.endswith(".") for line in said)


YEARS = {  # a file of each kind and year, and what of it is meant otherwise than it is spelled
    "trainer_2020": {"per_device_train_batch_size": 2, "eval_strategy": "steps", "use_cpu": True, "run_name": "first"},
    "trainer_run_clm": {"dataset": "data/train.jsonl", "eval_fraction": 0.25, "max_length": 32, "optim": "adamw_torch",
                        "max_train_examples": 16, "max_eval_examples": 4, "warmup_steps": 0.1, "eval_strategy": "epoch"},
    "trl_2024": {"packing_strategy": "bfd", "optim": "adamw_torch", "max_length": 64, "eval_split": "test"},
}  # fmt: skip


@pytest.mark.parametrize("name", YEARS)
def test_a_whole_file_of_any_year_is_taken(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What has no effect is passed over with a line. Fails when: a key of foreign_names.py is removed."""
    written = read_config_file(FIXTURES / f"{name}.yaml")
    values = read_values(SETTINGS["sft"], written)
    assert values.items() >= YEARS[name].items()
    SETTINGS["sft"](**values)  # no two of them contradict each other
    said = capsys.readouterr().err
    assert all(line.startswith(("passed over: ", "optim ", "packing_strategy ")) for line in said.splitlines())


def test_every_argument_of_trainer_is_known() -> None:
    """Of the installed version, whatever recipe. Fails when: transformers gains one, or a row of one is removed."""
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    ours = {spelling for each in settings_of(SETTINGS["sft"]).values() for spelling in (each.name, *each.aliases)}
    assert {name for name in names - ours if not is_foreign(name)} == {"hub_token"}  # a secret, which is never a setting


MOVING = {"sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"}  # a reference that does is dpo's here


@pytest.mark.parametrize(
    ("name", "recipe", "unknown"),
    [("GRPOConfig", "grpo", MOVING), ("RLOOConfig", "grpo", MOVING), ("DistillationConfig", "distill", set())],
)
def test_every_argument_of_their_other_trainers_is_known(name: str, recipe: str, unknown: set[str]) -> None:
    """Of the installed TRL. Fails when: TRL gains one, or a row of one is removed."""
    import trl

    fields = {field.name: field for field in dataclasses.fields(getattr(trl, name))}
    ours = {spelling for each in settings_of(config_of(recipe)).values() for spelling in (each.name, *each.aliases)}
    assert {each for each in fields.keys() - ours if not is_foreign(each)} == {"hub_token", *unknown}
    if recipe == "distill":  # and its defaults are taken
        given = {key: field.default for key, field in fields.items() if field.default is not dataclasses.MISSING and key not in ours}
        assert read_values(config_of(recipe), given | {"max_completion_length": 512})["max_new_tokens"] == 512


def test_a_file_of_their_former_ppo_is_taken_or_said_key_by_key() -> None:
    """The names of its PPOConfig, which TRL 1 has no more. Fails when: an alias or a row is removed."""
    written = {"sft_model_path": "sft", "reward_model_path": "rm", "num_ppo_epochs": 4, "kl_coef": 0.05, "cliprange": 0.2, "vf_coef": 0.1,
               "cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95, "whiten_rewards": False, "kl_estimator": "k1", "response_length": 53,
               "missing_eos_penalty": 1.0, "stop_token": "eos", "num_mini_batches": 1, "temperature": 0.7}  # fmt: skip
    values = read_values(config_of("ppo"), written)
    assert values == {
        "model": "sft", "reward_funcs": ["rm"], "num_iterations": 4, "beta": 0.05, "epsilon": 0.2, "vf_coef": 0.1, "cliprange_value": 0.2,
        "gamma": 1.0, "lam": 0.95, "whiten_rewards": False, "kl_estimator": "k1", "max_completion_length": 53, "missing_eos_penalty": 1.0,
        "temperature": 0.7,
    }  # fmt: skip
    for key, value, advice in (("num_mini_batches", 4, "steps_per_generation"), ("total_episodes", 100, "max_steps"),
                               ("stop_token_id", 7, "stop_strings")):  # fmt: skip
        with pytest.raises(Refusal, match=advice):
            read_values(config_of("ppo"), {**written, key: value})


@pytest.mark.parametrize("name", ["axolotl_qlora", "axolotl_kd", "llama_factory_lora"])
@pytest.mark.parametrize("recipe", SETTINGS)
def test_keys_of_other_trainers_get_their_counterparts_and_no_guess(recipe: str, name: str) -> None:
    """All of them in one message. Fails when: a key is taken out of COUNTERPARTS (`adapter. Did you mean adam_beta1?`)."""
    written = read_config_file(FIXTURES / f"{name}.yaml")
    with pytest.raises(Refusal) as refusal:
        read_values(SETTINGS[recipe], written, "theirs.yaml")
    message = str(refusal.value)
    assert message.startswith(("theirs.yaml: settings of other trainers ", "theirs.yaml: unknown settings\n"))
    assert "Did you mean" not in message
    assert "--help lists them all" not in message
    reported = {line.removeprefix("  - ").removeprefix("unknown: ").split()[0].rstrip(".") for line in message.splitlines()[1:]}
    ours = {spelling for each in settings_of(SETTINGS[recipe]).values() for spelling in (each.name, *each.aliases)}
    assert {key for key in written if key not in ours and not is_foreign(key)} <= reported


def test_counterparts_are_settings_that_there_are_and_no_key_has_two_meanings() -> None:
    """Fails when: a counterpart is misspelled, or a key of theirs is one of Trainer's as well."""
    recipes = {name: config_of(name) for name in ("sft", "dpo", "lora", "kto", "reward", "pretrain", "distill", "diffusion")}
    settings = {name for config in recipes.values() for name in settings_of(config)}
    assert {name for names, _ in COUNTERPARTS.values() for name in names} <= settings
    assert not {key for key in COUNTERPARTS if is_foreign(key)}
    assert all(names or note for names, note in COUNTERPARTS.values())
    assert all(note.endswith(".") for _, note in COUNTERPARTS.values() if note)
    ours = {spelling for config in recipes.values() for each in settings_of(config).values() for spelling in (each.name, *each.aliases)}
    assert not set(COUNTERPARTS) & ours


def test_the_keys_of_gkd_are_read_or_refused_with_what_to_do() -> None:
    """As for `GKDTrainer`. Fails when: a beta leaves the divergence at forward_kl, or lmbda is passed over."""
    settings = config_of("distill")
    theirs = {
        "teacher_model_name_or_path": "org/teacher", "teacher_model_init_kwargs": {"dtype": "bfloat16", "revision": "main"}, "lmbda": 0.25, "max_new_tokens": 64,
        "beta": 0.3, "temperature": 0.9, "seq_kd": False, "model_name_or_path": "org/student",
    }  # fmt: skip
    path = Path("gkd.yaml")
    config = read_command_line(settings, [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}" for name, value in theirs.items()], {})
    assert (config.teacher, config.teacher_dtype, config.teacher_revision) == ("org/teacher", "bfloat16", "main")
    assert (config.distillation_loss, config.beta, config.temperature) == ("jsd", 0.3, 0.9)
    assert (config.on_policy_share, config.max_new_tokens) == (0.25, 64)
    for wrong in ({"seq_kd": True}, {"teacher_model_init_kwargs": {"device_map": "auto"}}):
        with pytest.raises(Refusal, match=f"{path.name}: settings of other trainers|{next(iter(wrong))}"):
            read_values(settings, {**theirs, **wrong}, path.name)


def test_flags_of_theirs_are_read_like_keys() -> None:
    """Fails when: canonical_arguments leaves out what a flag of theirs means, or takes the next flag for its value."""
    typed = ["--remove_unused_columns", "--dataset_text_field", "content", "--model-init-kwargs={\"dtype\": \"bfloat16\"}",
             "--do_train", "--evaluation_strategy", "no", "--lora_r", "8", "--use_peft", "False"]  # fmt: skip
    config = read_command_line(SETTINGS["sft"], typed, {})
    assert (config.rename_columns, config.dtype, config.eval_strategy) == (["content=text"], "bfloat16", "no")
    assert set(config.given) == {"rename_columns", "dtype", "eval_strategy"}
    with pytest.raises(Refusal, match="--dataloader-drop-last true"):
        read_command_line(SETTINGS["sft"], ["--dataloader_drop_last"], {})


def test_no_key_of_theirs_shadows_a_setting_of_ours() -> None:
    """Fails when: a row is left in the table after the setting of that name came."""
    ours = {spelling for config in SETTINGS.values() for each in settings_of(config).values() for spelling in (each.name, *each.aliases)}
    of_some_recipes = {"loss_type", "label_smoothing_factor"} | {name for name, meaning in TRANSLATED.items() if meaning is TRANSLATED["use_peft"]}
    assert (set(SAME) | set(TRANSLATED) | set(PASSED_OVER)) & ours == of_some_recipes
    assert not set(SAME) & set(TRANSLATED)
    assert not (set(SAME) | set(TRANSLATED)) & set(PASSED_OVER)
    assert all(advice.endswith(".") for _, advice in SAME.values())
