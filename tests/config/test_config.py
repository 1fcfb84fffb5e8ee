"""Settings: what each group declares, what values mean, which go together, and config.yaml.

Each test names the one-line change under which it was seen to fail.
"""

import dataclasses
import inspect
import json
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk
from toolkit.command_line.reading import read_command_line
from toolkit.config import (
    DevicesConfig,
    Refusal,
    Settings,
    adapter,
    changed_settings,
    check_together,
    distillation,
    groups,
    policy,
    preferences,
    read_config_file,
    read_values,
    settings_of,
    tasks,
    write_config_file,
)
from toolkit.config.contradictions import CONTRADICTIONS
from toolkit.config.rules import NO_EFFECT, broken_rules
from toolkit.config.setting import OnResume

GROUPS: list[type[Settings]] = [
    group
    for group in {**vars(groups), **vars(adapter), **vars(tasks), **vars(preferences), **vars(policy), **vars(distillation)}.values()
    if inspect.isclass(group) and issubclass(group, Settings) and group is not Settings
]


@dataclass(frozen=True)
class Everything(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.OptimConfig, tk.CausalLMConfig, tk.ClassificationConfig, tk.PairsConfig,
    tk.RankedAnswersConfig, tk.ReferenceConfig, tk.PreferenceConfig,
    tk.RewardConfig, tk.RewardFunctionsConfig,
    tk.RankingConfig,
    tk.EmbeddingConfig,
    tk.MaskedLMConfig,
    tk.SampleConfig, tk.AnswerConfig,
    tk.Seq2SeqConfig, tk.GeneratedTextConfig,
    tk.RunConfig,
):  # fmt: skip
    dataset: str = "stdlib:pretrain"
    metrics: list[str] = tk.setting(["accuracy"])  # noqa: RUF009 - a dataclass field, not a shared default
    strength: float = tk.setting(0.1, "Strength of the penalty.", above=0.0)
    own_number: int = tk.setting(0, "A recipe's own number, without a range.")


@dataclass(frozen=True)
class Policy(tk.PolicyConfig):
    """Has another loss_type than Everything, and what other groups of its recipe say of completions."""

    num_generations: int = tk.setting(4, "Completions of a prompt.")
    max_completion_length: int = tk.setting(64, "Longest completion.")
    streaming: bool = tk.setting(False, "Read the source as a stream.")
    rollout_server: str | None = tk.setting(None, "Address of a server.")
    steps_per_generation: int = tk.setting(1, "Updates that the rollouts of a step are split into.")
    num_iterations: int = tk.setting(1, "How often the rollouts of a step are trained on.")


@dataclass(frozen=True)
class PPO(tk.PPOConfig, tk.RolloutConfig):
    """Has a beta of its own, and no loss_type."""

    dropout: float | None = tk.setting(0.0, "Share of activations dropped.")
    environment: str | None = tk.setting(None, "What answers the turns of a completion.")


@dataclass(frozen=True)
class Distilling(tk.AdapterConfig, tk.DistillationConfig, tk.DataConfig, DevicesConfig):
    """Has another beta than Everything."""


@dataclass(frozen=True)
class DistillingClassifiers(tk.ModelConfig, tk.ClassifierDistillationConfig, DevicesConfig):
    """Its teacher is a classifier."""


@dataclass(frozen=True)
class Talks(tk.RolloutConfig):
    """Completions of several turns, without PPO."""

    environment: str | None = tk.setting(None, "What answers the turns of a completion.")


def test_what_the_user_gave_survives_a_changed_copy_and_is_no_setting() -> None:
    """Fails when: `given` is set on the object alone, is compared, or is listed among the settings."""
    config = tk.OptimConfig(learning_rate=0.1, given=("learning_rate",))
    assert dataclasses.replace(config, momentum=0.5).given == ("learning_rate",)
    assert config == tk.OptimConfig(learning_rate=0.1)
    assert "given" not in settings_of(tk.OptimConfig)


# -- what is declared ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_setting_declares_what_a_resume_does_when_it_has_changed(group: type[Settings]) -> None:
    """Also one that changes nothing declares it. Fails when a field's `on_resume` is left out, or `setting` drops it."""
    declared = {field.name: field.metadata.get("on_resume") for field in dataclasses.fields(group) if field.name != "given"}
    assert set(declared.values()) <= set(typing.get_args(OnResume)), declared
    assert {name: each.on_resume for name, each in settings_of(group).items()} == declared


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_setting_has_help_and_every_default_keeps_its_own_rules(group: type[Settings]) -> None:
    """Fails when a field's help text is emptied, or a default put outside its choices."""
    group()
    for each in settings_of(group).values():
        assert len(each.help) > 10, each.name
        assert each.help.endswith("."), each.name


def test_no_setting_is_declared_by_two_groups_and_no_alias_is_taken() -> None:
    """Losses of pairs and of single answers, which no recipe has both of, call what they have in common by TRL's names; the metrics
    of classes, of tags and of generated texts are all --metrics, and what is shown of causal models and of encoder-decoders is
    --num-samples; encoder-decoders and students write --max-new-tokens; policy gradients and PPO have TRL's beta and an estimate of
    the KL, of other defaults.

    Fails when RunConfig declares a `seed` of its own, or an alias equals another setting's name."""
    declared = [name for group in GROUPS for name in inspect.get_annotations(group)]
    aliases = {alias for group in GROUPS for each in settings_of(group).values() for alias in each.aliases}
    assert sorted(name for name in set(declared) if declared.count(name) > 1) == [
        "beta", "kl_estimator", "loss_type", "max_new_tokens", "metrics", "num_samples", "temperature"
    ]  # fmt: skip
    assert {"beta", "loss_type"} == set(settings_of(tk.PreferenceConfig)) & set(settings_of(tk.UnpairedConfig))
    assert not aliases & set(declared)


def test_redeclared_setting_keeps_the_help_rules_and_panel_of_its_group() -> None:
    """Fails when settings_of takes the metadata of the most derived class alone."""
    settings = settings_of(Everything)
    assert settings["dataset"].default == "stdlib:pretrain"
    assert settings["dataset"].panel == "Data"
    assert settings["dataset"].help == settings_of(tk.DataConfig)["dataset"].help
    assert settings["metrics"].help == settings_of(tk.ClassificationConfig)["metrics"].help
    assert settings["strength"].panel == "Recipe"
    assert settings["seed"].panel == "Reproducibility"


# -- one value -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"learning_rate": 0.0}, "--learning-rate 0: must be above 0."),
        ({"learning_rate": float("nan")}, "--learning-rate nan: must be a number."),
        ({"learning_rate": "fast"}, "--learning-rate fast: must be a number."),
        ({"learning_rate": None}, "--learning-rate none: must be a number."),
        ({"eval_fraction": 1.0}, "--eval-fraction 1: must be at least 0 and below 1."),
        ({"seed": 1.5}, "--seed 1.5: must be a whole number."),
        ({"seed": True}, "--seed true: must be a whole number."),
        ({"packing": 1}, "--packing 1: must be true or false."),
        ({"output_dir": ""}, "--output-dir '': must not be empty."),
        ({"class_weights": 0.5}, "--class-weights 0.5: must be a list of numbers."),
        ({"class_weights": [1.0, -1.0]}, "--class-weights 1,-1: must be at least 0."),
        ({"report_to": ["wandb", "wandv"]}, "--report-to wandb,wandv: must be one of wandb, tensorboard, trackio, mlflow, all, none. "
                                            "Did you mean wandb?"),
        ({"optim": "AdamV"}, "Did you mean adamw_torch?"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_value_is_refused_with_its_flag_and_the_broken_rule(wrong: dict[str, Any], message: str) -> None:
    """Fails when check_values returns at once, when _is_of_kind drops its isfinite, or nearest() returns None."""
    with pytest.raises(Refusal) as refusal:
        Everything(**wrong)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        # what transformers and TRL users write; PyYAML reads the first as text, the second as false
        ({"learning_rate": "2e-4"}, {"learning_rate": 2e-4}),
        ({"eval_strategy": False}, {"eval_strategy": "no"}),
        ({"bf16": None}, {"bf16": None}),
        ({"fp16": None}, {}),
        ({"tf32": None}, {"tf32": None}),
        ({"torch_dtype": "torch.bfloat16"}, {"dtype": "bfloat16"}),
        ({"report_to": "none"}, {"report_to": ["none"]}),
        ({"report_to": "all"}, {"report_to": ["all"]}),
        ({"report_to": None}, {"report_to": ["none"]}),
        ({"optim": "adamw_torch_fused"}, {"optim": "adamw_torch_fused"}),
        ({"optim": "adamw_8bit"}, {"optim": "adamw_bnb_8bit"}),
        ({"max_steps": -1}, {"max_steps": None}),
        ({"warmup_ratio": 0.03}, {"warmup_steps": 0.03}),
        ({"model_name_or_path": "gpt2"}, {"model": "gpt2"}),
        ({"num_train_epochs": 3}, {"num_train_epochs": 3.0}),
        ({"dataset": {"a.jsonl": 0.7, "b": 0.3}}, {"dataset": "a.jsonl:0.7,b:0.3"}),
        ({"rename_columns": {"question": "prompt"}}, {"rename_columns": ["question=prompt"]}),
        # text, as a command line has it
        ({"max-steps": "1e3"}, {"max_steps": 1000}),
        ({"own_number": "1234567890123456789"}, {"own_number": 1234567890123456789}),
        ({"save_total_limit": "None"}, {"save_total_limit": None}),
        ({"packing": "True"}, {"packing": True}),
        ({"tf32": "off"}, {"tf32": False}),
        ({"class_weights": "1, 2.5"}, {"class_weights": [1.0, 2.5]}),
        ({"class_weights": "[1, 2.5]"}, {"class_weights": [1.0, 2.5]}),
        ({"metrics": "['f1', 'mcc']"}, {"metrics": ["f1", "mcc"]}),
        ({"lr_patterns": '["layers.(1,2)=0.5"]'}, {"lr_patterns": ["layers.(1,2)=0.5"]}),
        ({"lr_patterns": "[qk]_proj=0.1"}, {"lr_patterns": ["[qk]_proj=0.1"]}),
    ],
    ids=str,
)
def test_value_is_read_as_its_writer_meant_it(written: dict[str, Any], value: dict[str, Any]) -> None:
    """Fails when a line of _OTHER_TRAINERS goes, when read_value drops its WORDS_FOR_NONE, when _items drops split_list."""
    read = read_values(Everything, written)
    assert read == value
    assert {name: type(each) for name, each in read.items()} == {name: type(each) for name, each in value.items()}


@pytest.mark.parametrize(
    ("written", "value"), [(True, "group"), ("false", "none"), (False, "none"), ("batch", "batch")], ids=str
)
def test_the_scale_of_rewards_is_read_as_trl_reads_it(written: Any, value: str) -> None:
    """TRL takes true and false for two of its three words. Fails when: the line of scale_rewards goes from _OTHER_TRAINERS."""
    assert read_values(Policy, {"scale_rewards": written}) == {"scale_rewards": value}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"lerning_rate": 1}, "c.yaml: unknown setting lerning_rate. Did you mean learning_rate?"),
        ({"decay": 1}, "c.yaml: unknown setting decay. Did you mean weight_decay or layer_lr_decay?"),  # not the nearest spelling
        ({"packin": 1, "sed": 2}, "c.yaml: unknown settings\n  - packin. Did you mean packing?\n  - sed. Did you mean seed?"),
        ({"epochs": 3}, "Its counterpart here: num_train_epochs"),
        ({"find_learning_rate": True}, "toolkit find-learning-rate"),  # and not: did you mean learning_rate?
        ({"hub_token": "hf_verysecret"}, "c.yaml: unknown setting hub_token. Tokens"),
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, "--warmup-ratio and --warmup-steps (c.yaml) "),
        ({"warmup_ratio": 1}, "--warmup-ratio 1: must be below 1"),
        ({"eval_steps": 0.2}, "--eval-steps 0.2: must be a whole number of steps"),
        ({"save_steps": "0.1"}, "--save-steps 100."),
        ({"logging_steps": 1.5}, "--logging-steps 1.5 (c.yaml): must be a whole number."),
        ({"learning_rate": None}, "--learning-rate none (c.yaml): must be a number."),
        ({"learning_rate": "2e-4x"}, "--learning-rate 2e-4x (c.yaml): must be a number."),
        ({"run_name": 7}, "--run-name 7 (c.yaml): must be text"),
        ({"max_steps": "2.5"}, "--max-steps 2.5 (c.yaml): must be a whole number."),
    ],
    ids=str,
)
def test_key_or_value_that_cannot_be_meant_is_refused_naming_its_file(written: dict[str, Any], message: str) -> None:
    """Fails when read_values drops the unknown keys silently, lets the last spelling win, does not hand on `source`, or reads a
    share of the run without what it means (`_every`)."""
    with pytest.raises(Refusal) as refusal:
        read_values(Everything, written, "c.yaml")
    assert message in str(refusal.value)
    assert "verysecret" not in str(refusal.value)


def test_all_wrong_settings_of_a_file_are_refused_at_once() -> None:
    """Types, ranges, choices, unknown keys and a setting under two names. Fails when: read_values, or check_values, raises the first."""
    written = {
        "learning_rate": "fast", "seed": 1, "max_steps": "2.5", "packin": True, "sed": 2, "optim": "adamv", "eval_fraction": 3,
        "warmup_ratio": 0.1, "warmup_steps": "x",
    }  # fmt: skip
    with pytest.raises(Refusal) as refusal:
        read_values(Everything, written, "c.yaml")
    lines = str(refusal.value).splitlines()
    assert lines[0] == "these settings are wrong"
    named = ["packin", "sed.", "--learning-rate", "--max-steps", "--optim", "--eval-fraction", "--warmup-ratio and --warmup-steps"]
    assert [name for name in named if not any(name in line for line in lines)] == []
    with pytest.raises(Refusal) as refusal:
        Everything(learning_rate=0.0, seed=1.5)
    assert str(refusal.value).splitlines() == [
        "these settings are wrong", "  - --learning-rate 0: must be above 0.", "  - --seed 1.5: must be a whole number.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lerning_rate": 1}, "Everything(...): unknown setting lerning_rate. Did you mean learning_rate?"),
        ({"hub_token": "hf_verysecret"}, "unknown setting hub_token. Tokens"),
        ({"epochs": 3}, "unknown setting epochs. Its counterpart here: num_train_epochs."),
        ({"max_seq_length": 64}, "max_length=64."),
        ({"evaluation_strategy": "no"}, "eval_strategy='no'."),
        ({"eval_accumulation_steps": 3}, "eval_accumulation_steps 3: leave it out"),
    ],
    ids=str,
)
def test_a_wrong_keyword_in_python_gets_the_advice_of_the_command_line(wrong: dict[str, Any], message: str) -> None:
    """Fails when: Settings leaves the keyword to Python, whose TypeError suggests nothing."""
    for make in (lambda: Everything(**wrong), lambda: dataclasses.replace(Everything(), **wrong)):
        with pytest.raises(Refusal) as refusal:
            make()
        assert message in str(refusal.value)
        assert "verysecret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("group", "name", "its_group"),
    [
        (tk.RunConfig, "per_device_train_batch_size", "DataConfig"), (tk.OptimConfig, "model", "ModelConfig"),
        (tk.DataConfig, "learning_rate", "OptimConfig"), (tk.ModelConfig, "beta", "PreferenceConfig"),
    ],
)  # fmt: skip
def test_a_keyword_in_python_that_another_group_declares_is_refused_with_that_group(
    group: type[Settings], name: str, its_group: str
) -> None:
    """Fails when: a notebook is told of --help, or of a recipe."""
    with pytest.raises(Refusal, match=rf"{group.__name__}\(...\): unknown setting {name}.*{its_group}"):
        group(**{name: 1})


# -- values together -------------------------------------------------------------------------------------------------

ADAPTER = str(Path(__file__).with_name("an_adapter"))  # a directory that holds one, as far as settings can tell
OF_THE_ADAPTER: dict[str, Any] = {
    "lora_r": 4, "lora_alpha": 8.0, "lora_dropout": 0.1, "lora_target_modules": ["q_proj"], "lora_modules_to_save": ["score"],
    "lora_trainable_tokens": ["template"],
    "lora_rank_pattern": ["q_proj=2"], "lora_alpha_pattern": ["q_proj=2"], "lora_layers_to_transform": [1], "use_rslora": True,
    "use_dora": True, "init_lora_weights": "gaussian",
}  # fmt: skip

# (setting of a no-effect rule, or "" for a contradiction; words of the message; values that break it; values that mend it)
RULE_CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("", "choose one", {"do_sample": True, "num_beams": 4}, {"num_beams": 1}),
    ("temperature", "--do-sample", {"temperature": 0.7}, {"do_sample": True}),
    ("top_p", "--do-sample", {"top_p": 0.7}, {"do_sample": True}),
    ("length_penalty", "--num-beams 4", {"length_penalty": 0.7, "num_beams": 1}, {"num_beams": 2}),
    ("metrics", "--no-predict-with-generate", {"metrics": ["bleu"], "predict_with_generate": False}, {"predict_with_generate": True}),
    ("", "--bf16 and --fp16", {"bf16": True, "fp16": True}, {"fp16": False}),
    ("", "--fp8 rowwise is for runs in bfloat16", {"fp8": "rowwise", "bf16": False}, {"bf16": None}),
    ("", "--fp8 tensorwise and --load-in-4bit", {"fp8": "tensorwise", "load_in_4bit": True, "use_peft": True, "model": "a/b"}, {"load_in_4bit": False}),
    ("", "--optim lion_8bit", {"stochastic_rounding": True, "dtype": "bfloat16", "optim": "lion_8bit"}, {"optim": "sgd"}),
    ("", "--dtype float16", {"fp16": True, "dtype": "float16"}, {"dtype": "float32"}),
    ("", "--loss-spike rollback goes back", {"loss_spike": "rollback", "save_strategy": "no"}, {"save_strategy": "steps"}),
    ("", "--resume-from runs/a names another", {"resume": True, "resume_from": "runs/a"}, {"resume": False}),
    ("", "that --resume continues", {"resume": True, "overwrite_output_dir": True}, {"resume": False}),
    ("", "--resume-from runs/x/checkpoints/step-4",
     {"resume_from": "runs/x/checkpoints/step-4", "overwrite_output_dir": True, "output_dir": "./runs/x"},
     {"output_dir": "runs/xy"}),
    ("", "--report-to wandb,none", {"report_to": ["wandb", "none"]}, {"report_to": ["wandb"]}),
    ("", "--mask-replace-prob 0.95", {"mask_replace_prob": 0.95}, {"random_replace_prob": 0.05}),
    ("", "--max-steps", {"streaming": True}, {"max_steps": 10}),
    ("", "old=new", {"rename_columns": ["a=b", "question"]}, {"rename_columns": ["a=b"]}),
    ("", "--model-revision", {"model": "org/m", "trust_remote_code": True}, {"model_revision": "1f2e"}),
    ("", "--max-length 512 needs", {"max_length": 512, "max_position_embeddings": 256}, {"max_position_embeddings": 512}),
    ("", "--min-length 600 is above --max-length 512", {"min_length": 600, "max_length": 512}, {"min_length": 512}),
    ("", "--warmup-steps 2.5", {"warmup_steps": 2.5}, {"warmup_steps": 2.0}),
    ("", "regex=factor", {"lr_patterns": ["embed=0.1", "(=0.1"]}, {"lr_patterns": ["embed=0.1"]}),
    ("", "--loss-type", {"loss_type": []}, {"loss_type": ["sigmoid"]}),
    ("", "--loss-weights 1,2 next to --loss-type sigmoid", {"loss_weights": [1.0, 2.0]}, {"loss_type": ["sigmoid", "sft"]}),
    ("", "--label-smoothing 0.001", {"loss_type": ["exo_pair"]}, {"label_smoothing": 1e-3}),
    ("", "rewards one by one", {"f_divergence_type": "forward_kl", "loss_type": ["sigmoid", "apo_zero"]}, {"loss_type": ["robust"]}),
    ("", "--ld-alpha 0.5 weighs", {"ld_alpha": 0.5, "loss_type": ["sigmoid", "sft"]}, {"loss_type": ["sigmoid", "ipo"]}),
    ("", "--load-best-model-at-end", {"load_best_model_at_end": True, "eval_strategy": "no"}, {"eval_strategy": "steps"}),
    ("", "counts evaluations", {"early_stopping_patience": 2, "eval_strategy": "no"}, {"eval_strategy": "epoch"}),
    ("", "measured with --metrics accuracy",
     {"metric_for_best_model": "eval_f1"}, {"metrics": ["accuracy", "f1"]}),
    ("", "--problem-type single_label by default",
     {"metric_for_best_model": "eval_recall", "metrics": []}, {"metrics": ["recall"]}),
    ("", "add --use-peft", {"load_in_4bit": True, "model": "org/m"}, {"use_peft": True}),
    ("", "tiny-llama is made here", {"load_in_4bit": True, "use_peft": True}, {"model": "org/m"}),
    ("", "would be sharded", {"load_in_4bit": True, "use_peft": True, "model": "org/m", "zero_stage": 3}, {"zero_stage": 2}),
    ("", "which --load-in-4bit has rounded",
     {"load_in_4bit": True, "use_peft": True, "model": "org/m", "init_lora_weights": "olora"}, {"init_lora_weights": "gaussian"}),
    ("", "A and B are not rounded", {"use_peft": True, "init_lora_weights": "orthogonal", "dtype": "bfloat16"}, {"dtype": "float32"}),
    ("", "--init-lora-weights eva", {"use_peft": True, "init_lora_weights": "eva"}, {"init_lora_weights": "pissa"}),
    ("", "its published files don't hold", {"use_peft": True, "init_lora_weights": "loftq"}, {"init_lora_weights": "olora"}),
    ("", "mica freezes", {"use_peft": True, "init_lora_weights": "mica"}, {"init_lora_weights": "orthogonal"}),
    ("", "pissa_niter_16", {"use_peft": True, "init_lora_weights": "pissa_niter_0"}, {"init_lora_weights": "pissa_niter_4"}),
    ("", "regex=rank", {"use_peft": True, "lora_rank_pattern": ["q_proj=1.5"]}, {"lora_rank_pattern": ["q_proj=2"]}),
    ("", "regex=alpha", {"use_peft": True, "lora_alpha_pattern": ["q_proj=0"]}, {"lora_alpha_pattern": ["q_proj=0.5"]}),
    *[(name, "without --use-peft", {name: value}, {"use_peft": True})
      for name, value in {**OF_THE_ADAPTER, "loraplus_lr_ratio": 16.0}.items()],
    *[(name, "its shape already", {name: value, "use_peft": True, "model": ADAPTER}, {"model": "org/m"})
      for name, value in OF_THE_ADAPTER.items()],
    ("", "has none: take --reference model", {"sync_ref_model": True, "reference": "cache"}, {"reference": "model"}),
    ("", "mixes whole models", {"sync_ref_model": True, "use_peft": True}, {"use_peft": False}),
    ("", "take --zero-stage 2, or DDP", {"sync_ref_model": True, "zero_stage": 3}, {"zero_stage": 2}),
    *[(name, "which has no reference model", {name: value, "loss_type": ["simpo", "sft"]}, {"loss_type": ["simpo", "ipo"]})
      for name, value in [("reference", "model"), ("sync_ref_model", True)]],
    ("max_pairs_per_prompt", "take best_others or all", {"max_pairs_per_prompt": 4}, {"pairs_per_prompt": "all"}),
    *[(name, "without --sync-ref-model", {name: value}, {"sync_ref_model": True})
      for name, value in [("ref_model_mixup_alpha", 0.5), ("ref_model_sync_steps", 4)]],
    *[(name, "without --load-in-4bit", {name: value, "use_peft": True, "model": "org/m"}, {"load_in_4bit": True})
      for name, value in [("bnb_4bit_quant_type", "fp4"), ("bnb_4bit_use_double_quant", True)]],
    ("warmup_steps", "constant_with_warmup", {"warmup_steps": 0.1, "lr_scheduler_type": "constant"},
     {"lr_scheduler_type": "constant_with_warmup"}),
    ("min_lr_ratio", "never falls", {"min_lr_ratio": 0.1, "lr_scheduler_type": "constant_with_warmup"},
     {"lr_scheduler_type": "cosine"}),
    ("min_lr", "never falls", {"min_lr": 1e-6, "lr_scheduler_type": "constant_with_warmup"}, {"lr_scheduler_type": "linear"}),
    ("warmup_type", "without a warm-up", {"warmup_type": "cosine"}, {"warmup_steps": 0.1}),
    *[(name, "take reduce_lr_on_plateau", {name: value}, {"lr_scheduler_type": "reduce_lr_on_plateau"})
      for name, value in [("lr_patience", 3), ("lr_threshold", 0.01)]],
    ("lr_decay_type", "take warmup_stable_decay", {"lr_decay_type": "linear"}, {"lr_scheduler_type": "warmup_stable_decay"}),
    ("", "two floors", {"min_lr": 1e-6, "min_lr_ratio": 0.1}, {"min_lr_ratio": 0.0}),
    ("", "--min-lr 0.1 is above --learning-rate 0.01", {"min_lr": 0.1, "learning_rate": 0.01}, {"min_lr": 0.001}),
    ("", "cosine_with_min_lr needs a floor", {"lr_scheduler_type": "cosine_with_min_lr"}, {"min_lr": 0.0}),
    ("", "there are none: take", {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "no"}, {"eval_strategy": "steps"}),
    ("lr_power", "take polynomial", {"lr_power": 2.0}, {"lr_scheduler_type": "polynomial"}),
    ("lr_cycles", "take cosine_with_restarts", {"lr_cycles": 2}, {"lr_scheduler_type": "step"}),
    ("lr_gamma", "take step, ", {"lr_gamma": 0.5}, {"lr_scheduler_type": "exponential"}),
    ("lr_decay_ratio", "take warmup_stable_decay", {"lr_decay_ratio": 0.5}, {"lr_scheduler_type": "warmup_stable_decay"}),
    ("adam_beta1", "--optim sgd", {"adam_beta1": 0.5, "optim": "sgd"}, {"optim": "lion_8bit"}),
    ("adam_beta2", "--optim adafactor", {"adam_beta2": 0.95, "optim": "adafactor"}, {"optim": "muon"}),
    ("adam_epsilon", "--optim lion_32bit", {"adam_epsilon": 1e-6, "optim": "lion_32bit"}, {"optim": "radam"}),
    ("momentum", "--optim adamw_torch", {"momentum": 0.9}, {"optim": "sgd"}),
    ("stochastic_rounding", "--dtype float32", {"stochastic_rounding": True}, {"dtype": "bfloat16"}),
    ("max_nonfinite_steps", "--nonfinite stop", {"max_nonfinite_steps": 5, "nonfinite": "stop"}, {"nonfinite": "skip"}),
    ("class_weights", "regression", {"class_weights": [1.0], "problem_type": "regression"}, {"problem_type": "single_label"}),
    ("label_smoothing_factor", "regression", {"label_smoothing_factor": 0.1, "problem_type": "regression"},
     {"problem_type": "multi_label"}),
    ("beta", "compares with nothing", {"beta": 0.2, "loss_type": ["sft"]}, {"loss_type": ["sft", "orpo"]}),
    ("label_smoothing", "with --loss-type hinge,orpo", {"label_smoothing": 0.1, "loss_type": ["hinge", "orpo"]},
     {"loss_type": ["hinge", "aot"]}),
    ("f_divergence_type", "no reference model", {"f_divergence_type": "forward_kl", "loss_type": ["cpo"]},
     {"f_divergence_type": "reverse_kl"}),
    ("f_alpha_divergence_coef", "take alpha_divergence", {"f_alpha_divergence_coef": 0.2},
     {"f_divergence_type": "alpha_divergence"}),
    ("two_way", "take info_nce", {"two_way": True, "embedding_loss": "cosent"}, {"embedding_loss": "info_nce"}),
    ("false_negative_margin", "take info_nce", {"false_negative_margin": 0.1, "embedding_loss": "cosine"},
     {"embedding_loss": "info_nce"}),
    ("temperature", "info_nce or cosent", {"temperature": 0.1, "embedding_loss": "cosine", "do_sample": True},
     {"embedding_loss": "cosent"}),
    ("score_scale", "reads no scores", {"score_scale": 5.0, "embedding_loss": "info_nce"}, {"embedding_loss": "cosine"}),
    ("positive_weight", "take bce", {"positive_weight": 3.0}, {"ranking_loss": "bce"}),
    ("discopop_tau", "take discopop", {"discopop_tau": 0.1}, {"loss_type": ["discopop"]}),
    ("simpo_gamma", "take simpo", {"simpo_gamma": 1.0, "loss_type": ["cpo"]}, {"loss_type": ["simpo"]}),
    ("cpo_alpha", "take cpo", {"cpo_alpha": 0.5, "loss_type": ["simpo"]}, {"loss_type": ["sigmoid", "cpo"]}),
    *[(name, "whose shape is fixed", {name: value, "model": "org/m"}, {"model": "tiny-llama"})
      for name, value in [("vocab_size", 512), ("hidden_size", 64), ("num_hidden_layers", 2), ("num_attention_heads", 4),
                          ("num_key_value_heads", 2), ("intermediate_size", 64), ("max_position_embeddings", 2048),
                          ("hidden_act", "gelu")]],
    ("torch_compile_backend", "without --torch-compile", {"torch_compile_backend": "eager"}, {"torch_compile": True}),
    ("vocab_size", "its own vocabulary", {"vocab_size": 512, "tokenizer": "gpt2"}, {"tokenizer": None}),
    ("model_revision", "not come from the Hub", {"model_revision": "main"}, {"model": "org/m"}),
    ("trust_remote_code", "built in", {"trust_remote_code": True}, {"trust_remote_code": False}),
    ("packing_strategy", "without --packing", {"packing_strategy": "wrapped"}, {"packing": True}),
    ("group_by_length", "with --packing", {"group_by_length": True, "packing": True}, {"packing": False}),
    ("group_by_length", "with --streaming", {"group_by_length": True, "streaming": True, "max_steps": 9},
     {"streaming": False}),
    ("dataloader_num_workers", "with --streaming", {"dataloader_num_workers": 2, "streaming": True, "max_steps": 9},
     {"streaming": False}),
    ("eval_fraction", "next to --eval-split test", {"eval_fraction": 0.2, "eval_split": "test"}, {"eval_split": None}),
    ("gradient_accumulation_steps", "next to --global-batch-size 64",
     {"gradient_accumulation_steps": 2, "global_batch_size": 64}, {"global_batch_size": None}),
    *[(name, "with --eval-strategy no", {name: value, "eval_strategy": "no"}, {"eval_strategy": "epoch"})
      for name, value in [("eval_on_start", True), ("eval_delay", 1.0), ("eval_split", "test"), ("max_eval_examples", 9),
                          ("per_device_eval_batch_size", 4), ("num_samples", 1), ("sample_max_new_tokens", 9),
                          ("sample_temperature", 0.5)]],
    ("sample_max_new_tokens", "--num-samples 0", {"sample_max_new_tokens": 9, "num_samples": 0}, {"num_samples": 1}),
    ("answer_max_new_tokens", "add --metrics bleu", {"answer_max_new_tokens": 8, "metrics": []}, {"metrics": ["bleu"]}),
    ("metrics", "--eval-strategy no", {"metrics": ["bleu"], "eval_strategy": "no"}, {"eval_strategy": "epoch"}),
    ("sample_temperature", "--num-samples 0", {"sample_temperature": 0.5, "num_samples": 0}, {"num_samples": 1}),
    ("save_best_limit", "saves the best ones", {"save_best_limit": 3}, {"load_best_model_at_end": True}),
    ("greater_is_better", "nothing is decided", {"greater_is_better": True}, {"load_best_model_at_end": True}),
    ("eval_steps", "--eval-strategy epoch", {"eval_steps": 5}, {"eval_strategy": "steps"}),
    ("save_steps", "--save-strategy no", {"save_steps": 5, "save_strategy": "no"}, {"save_strategy": "steps"}),
    ("logging_steps", "--logging-strategy epoch", {"logging_steps": 5, "logging_strategy": "epoch"},
     {"logging_strategy": "steps"}),
    ("save_total_limit", "--save-strategy no", {"save_total_limit": 1, "save_strategy": "no"},
     {"load_best_model_at_end": True}),
    ("", "--hub-model-id a/b/c", {"hub_model_id": "a/b/c", "push_to_hub": True}, {"hub_model_id": "a/b"}),
    ("", "--hub-strategy every_save", {"hub_strategy": "best", "push_to_hub": True}, {"load_best_model_at_end": True}),
    *[(name, "without --push-to-hub", {name: value}, {"push_to_hub": True})
      for name, value in [("hub_model_id", "me/mine"), ("hub_strategy", "end"), ("hub_private_repo", True), ("hub_revision", "v1")]],
    ("hub_strategy", "nothing is saved", {"hub_strategy": "checkpoint", "push_to_hub": True, "save_strategy": "no"},
     {"hub_strategy": "end"}),
    *[(name, f"without the reward {reward}", {name: value, "reward_funcs": ["mine.py:f"]}, {"reward_funcs": [reward, "mine.py:f"]})
      for name, value, reward in [("answer_column", "gold", "exact_match"), ("reward_pattern", "a", "regex"), ("reward_schema", "a.json", "json_schema"),
                                  ("reward_length", 9, "length"), ("reward_memory", 99, "python")]],
    ("tf32", "--use-cpu", {"tf32": True, "use_cpu": True}, {"use_cpu": False}),
    ("max_turns", "without --environment", {"max_turns": 3}, {"environment": "a.py:A"}),
]  # fmt: skip

SAMPLER_WEIGHTS = [
    ("importance_sampling_mode", "token_mask"), ("importance_sampling_clip_max", 2.0), ("importance_sampling_clip_min", 0.5),
]  # fmt: skip
POLICY_RULE_CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("", "add --epsilon-high 5", {"loss_type": "cispo"}, {"epsilon_high": 4.0}),
    ("", "--delta 1.25 must be above", {"delta": 1.25, "epsilon_high": 0.28}, {"epsilon_high": 0.2}),
    ("", "clip-min 3 must be below", {"importance_sampling_clip_min": 3.0, "rollout_server": "http://a:1"}, {"importance_sampling_clip_max": 4.0}),
    ("", "would be divided by 0", {"scale_rewards": "group", "loss_type": "reinforce"}, {"advantage_estimator": "rloo"}),
    ("", "--num-generations 1 is no group", {"num_generations": 1}, {"advantage_estimator": "reinforce"}),
    ("", "with the mean 0", {"beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False}, {"kl_in": "reward"}),
    ("", "at most --max-completion-length 64", {"overlong_cache": 65}, {"overlong_cache": 64}),
    ("", "take --loss-type rloo", {"loss_type": "reinforce", "num_iterations": 2}, {"loss_type": "rloo"}),
    ("", "which --streaming cannot", {"dynamic_sampling": 2, "streaming": True}, {"streaming": False}),
    ("dynamic_sampling", "no group needs a spread", {"dynamic_sampling": 2, "loss_type": "reinforce"}, {"loss_type": "grpo"}),
    ("epsilon", "no such bound", {"epsilon": 0.1, "loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "gspo"}),
    ("epsilon_high", "no ratio", {"epsilon_high": 0.3, "loss_type": "reinforce"}, {"loss_type": "rloo"}),
    ("delta", "no such bound", {"delta": 2.0, "loss_type": "reinforce"}, {"loss_type": "dr_grpo"}),
    ("importance_sampling_level", "its own ratio", {"importance_sampling_level": "sequence", "loss_type": "gspo"}, {"loss_type": "grpo"}),
    *[(name, "add --beta", {name: value}, {"beta": 0.1}) for name, value in [("kl_in", "reward"), ("kl_estimator", "k2")]],
    *[(name, "without --importance-sampling-correction", {name: value, "importance_sampling_correction": False, "rollout_server": "http://a:1"},
       {"importance_sampling_correction": True})
      for name, value in SAMPLER_WEIGHTS],
    *[(name, "without --rollout-server", {name: value}, {"rollout_server": "http://a:1"}) for name, value in SAMPLER_WEIGHTS],
]  # fmt: skip
PPO_RULE_CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("", "Take recipes/grpo.py", {"environment": "a.py:A"}, {"environment": None}),
    ("kl_estimator", "add --beta", {"kl_estimator": "k3", "beta": 0.0}, {"beta": 0.1}),
    *[(name, "add --num-iterations 2", {name: value}, {"num_iterations": 2})
      for name, value in [("epsilon", 0.1), ("epsilon_high", 0.3), ("delta", 2.0), ("cliprange_value", 0.1)]],
]  # fmt: skip
ROLLOUT_RULE_CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("", "add --top-k 20", {"rollout_server": "http://a:1", "top_p": 0.9}, {"top_k": 20}),
    ("", "--top-k 1 leaves one token", {"top_k": 1}, {"top_k": 2}),
    ("", "--min-p 1 leaves", {"min_p": 1.0}, {"min_p": 0.9}),
    *[(name, "without --rollout-server", {name: value}, {"rollout_server": "http://a:1"})
      for name, value in [("rollout_server_model", "a"), ("rollout_server_reload", "http://a:2"), ("rollout_server_requests", 4),
                          ("rollout_server_timeout", 9.0), ("rollout_server_retries", 2), ("rollout_server_max_gap", 0.5)]],
]  # fmt: skip
DISTILLATION_RULE_CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("", "between", {"distillation_loss": "jsd", "beta": 0.0}, {"beta": 0.1}),
    ("", "name one", {"fsdp": True}, {"teacher": "runs/teacher"}),
    ("", "leave one of them out", {"on_policy_share": 0.5, "teacher_top_k": 8}, {"teacher_top_k": None}),
    ("", "queried beforehand", {"streaming": True, "max_steps": 5, "teacher_top_k": 8}, {"teacher_top_k": None}),
    ("", "doesn't keep", {"streaming": True, "max_steps": 5, "on_policy_share": 0.5}, {"on_policy_share": 0.0}),
    ("", "as if it were data", {"on_policy_share": 0.5, "cross_entropy_share": 0.1}, {"cross_entropy_share": 0.0}),
    ("", "add --teacher-top-k 20", {"teacher": "http://a:1/v1"}, {"teacher_top_k": 20}),
    ("", "log-probabilities at 1", {"teacher": "http://a:1/v1", "teacher_top_k": 20, "temperature": 2.0}, {"temperature": 1.0}),
    ("", "two teachers", {"self_distillation": "ema", "cross_entropy_share": 0.5, "teacher": "org/m"}, {"teacher": None}),
    ("", "there is none", {"self_distillation": "base", "cross_entropy_share": 0.5}, {"use_peft": True}),
    ("", "begin as one model", {"self_distillation": "ema"}, {"cross_entropy_share": 0.5}),
    ("", "queried beforehand", {"self_distillation": "ema", "cross_entropy_share": 0.5, "teacher_top_k": 8}, {"teacher_top_k": None}),
    ("", "whole models", {"self_distillation": "ema", "cross_entropy_share": 0.5, "fsdp": True}, {"fsdp": False}),
    ("ema_decay", "take ema", {"self_distillation": "base", "use_peft": True, "cross_entropy_share": 0.5, "ema_decay": 0.9}, {"self_distillation": "ema"}),
    ("max_new_tokens", "without --on-policy-share", {"max_new_tokens": 8}, {"on_policy_share": 0.5}),
    ("beta", "take jsd", {"beta": 0.1}, {"distillation_loss": "jsd"}),
    ("skew_alpha", "take skewed_forward_kl or", {"skew_alpha": 0.2}, {"distillation_loss": "skewed_reverse_kl"}),
    ("teacher_revision", "name a teacher", {"teacher_revision": "main"}, {"teacher": "org/m"}),
    ("teacher_dtype", "name a teacher", {"teacher_dtype": "bfloat16"}, {"teacher": "org/m"}),
    *[(name, "started with its own", {name: value, "teacher": "http://a:1/v1", "teacher_top_k": 20}, {"teacher": "org/m"})
      for name, value in (("teacher_revision", "main"), ("teacher_dtype", "bfloat16"))],
]
CASES: list[tuple[type[Settings], str, str, dict[str, Any], dict[str, Any]]] = [
    *[(Everything, *case) for case in RULE_CASES], *[(Policy, *case) for case in POLICY_RULE_CASES],
    (Talks, "", "and not of a server", {"environment": "a.py:A", "rollout_server": "http://a:1"}, {"environment": None}),
    *[(Distilling, *case) for case in DISTILLATION_RULE_CASES],
    (DistillingClassifiers, "", "runs/accelerated", {"fsdp": True}, {"teacher": "runs/teacher"}),
    (DistillingClassifiers, "", "no classes", {"teacher": "http://a:1/v1"}, {"teacher": "runs/teacher"}),
    (DistillingClassifiers, "", "needs probabilities", {"match_attention": True, "attn_implementation": "sdpa"}, {"attn_implementation": "eager"}),
    (DistillingClassifiers, "match_attention", "take uniform", {"match_layers": "none", "match_attention": True}, {"match_layers": "last"}),
    (DistillingClassifiers, "match_weight", "take uniform", {"match_layers": "none", "match_weight": 2.0}, {"match_layers": "last"}),
    *[(PPO, *case) for case in PPO_RULE_CASES], *[(tk.RolloutConfig, *case) for case in ROLLOUT_RULE_CASES],
]  # fmt: skip


@pytest.mark.parametrize(("kind", "setting", "words", "wrong", "mend"), CASES, ids=[f"{c[1]}:{c[2]}" for c in CASES])
def test_settings_that_do_not_go_together_are_refused_by_one_rule(
    kind: type[Settings], setting: str, words: str, wrong: dict[str, Any], mend: dict[str, Any]
) -> None:
    """Fails when the rule's condition is replaced by False (nothing refused) or True (the mended settings are refused)."""
    with pytest.raises(Refusal) as refusal:
        check_together(kind(**wrong), frozenset(wrong))
    assert words in str(refusal.value)
    assert setting.replace("_", "-") in str(refusal.value)
    broken = broken_rules(kind(**wrong), frozenset(wrong))
    assert [name for name, _ in broken] == [setting]
    assert not broken_rules(kind(**wrong | mend), frozenset(wrong | mend))


def test_every_rule_has_a_case_that_breaks_it() -> None:
    """Fails when a rule is added without a case, or a case's values no longer reach their rule."""
    reached, twice = set(), list[str]()
    for kind, _, _, wrong, _ in CASES:
        broken = broken_rules(kind(**wrong), frozenset(wrong))
        reached |= broken.keys()
        twice += [message for message in broken.values() if re.search(r"(--[a-z-]+) \1\b", str(message))]
    assert twice == []  # a setting in braces is shown with its flag
    rules = [("", rule.message) for rule in CONTRADICTIONS] + [(name, rule.why) for rule in NO_EFFECT for name in rule.settings]
    assert sorted(reached) == sorted(rules)


@pytest.mark.parametrize("wrong", [case[2] for case in RULE_CASES if case[0]], ids=str)
def test_setting_without_effect_is_refused_only_when_given(wrong: dict[str, Any]) -> None:
    """Fails when broken_rules drops `name in given`: a recipe's own default would be refused next to a user's choice."""
    check_together(Everything(**wrong), frozenset())


def test_setting_turned_off_goes_with_everything() -> None:
    """Fails when broken_rules drops `values.get(name)`."""
    off: dict[str, Any] = {"group_by_length": False, "warmup_steps": 0.0, "tf32": None, "run_name": None}
    check_together(Everything(packing=True, lr_scheduler_type="constant", use_cpu=True, **off), frozenset(off))


@pytest.mark.parametrize(
    ("metric", "metrics"),
    [("loss", ["accuracy"]), ("f1_macro", ["f1_macro"]), ("eval_recall_class_3", ["recall_per_class"]), ("eval_x", ["glue"]), ("eval_rougeL", ["rouge"]), ("eval_auc", []), ("auc", ["f1"]), ("mape", []), ("eval_recall_at_5", []), ("accuracy2", []), ("pearsonr", [])],
)
def test_metric_that_will_or_may_be_measured_can_decide(metric: str, metrics: list[str]) -> None:
    """Fails when never_measured knows eval_loss alone, or refuses the unknown metrics of an evaluate module or of a copy."""
    check_together(Everything(metric_for_best_model=metric, metrics=metrics), frozenset({"metric_for_best_model", "metrics"}))


@pytest.mark.parametrize(("problem", "metric", "other"), [("single_label", "eval_f1", "eval_mse"), ("regression", "eval_r2", "eval_accuracy")])
def test_the_usual_metrics_are_those_of_the_problem(problem: str, metric: str, other: str) -> None:
    """Fails when: one list of metrics is the default of all kinds of labels."""
    given = frozenset({"metric_for_best_model", "problem_type"})
    check_together(Everything(problem_type=problem, metric_for_best_model=metric, metrics=[]), given)
    with pytest.raises(Refusal, match="name it in --metrics too"):
        check_together(Everything(problem_type=problem, metric_for_best_model=other, metrics=[]), given)


def test_a_setting_of_other_recipes_is_named_as_such() -> None:
    """Fails when: a setting that this recipe lacks is taken for a mistyped one, or a group or its recipe is forgotten."""
    import runpy

    import toolkit.config
    from toolkit.config import unknown_keys

    recipes = Path(__file__).resolve().parents[2] / "recipes"
    config = runpy.run_path(str(recipes / "basic.py"))["Config"]
    with pytest.raises(Refusal, match=r"eval_strategy\. .*accelerated"):
        read_values(config, {"eval_strategy": "steps"}, "c.yaml")
    groups = {name for name in toolkit.config.__all__ if name.endswith("Config")}
    in_every = {"ModelConfig", "BatchConfig", "DeviceConfig", "DataConfig", "OptimConfig", "OutputConfig", "SeedConfig"}
    within_run = {"DevicesConfig", "HubConfig", "LossConfig", "TeacherConfig"}
    assert groups - in_every - within_run == set(unknown_keys.RECIPES_WITH)
    for group, recipe in unknown_keys.RECIPES_WITH.items():
        assert issubclass(runpy.run_path(str(recipes / f"{recipe}.py"))["Config"], getattr(toolkit.config, group))


def test_a_longer_name_of_this_recipe_comes_before_a_setting_of_others_and_of_those_every_group_is_named() -> None:
    """Fails when: sft's user is sent to embedding for a temperature, or one group is named where several have the setting."""

    @dataclass(frozen=True)
    class Sampling(tk.SampleConfig):
        pass

    with pytest.raises(Refusal, match=r"Did you mean sample_temperature\?"):
        Sampling(temperature=0.0)
    with pytest.raises(Refusal, match=r"Did you mean --sample-temperature\?"):
        read_command_line(Sampling, ["--temperature", "0"], {})
    with pytest.raises(Refusal, match=r"tk\.ClassificationConfig, tk\.AnswerConfig"):
        Sampling(metrics=["bleu"])


def test_max_steps_beside_epochs_is_allowed() -> None:
    """transformers' users give both, and the help says which wins. Fails when a rule forbids it."""
    check_together(Everything(max_steps=5, num_train_epochs=2.0), frozenset({"max_steps", "num_train_epochs"}))


def test_rule_is_asked_only_where_the_recipe_has_its_settings() -> None:
    """Fails when _holds drops its first condition."""
    check_together(tk.OptimConfig(lr_power=2.0, lr_scheduler_type="polynomial"), frozenset({"lr_power"}))
    with pytest.raises(Refusal, match=r"--lr-power 2 .*--lr-scheduler-type cosine"):
        check_together(tk.OptimConfig(lr_power=2.0), frozenset({"lr_power"}))


def test_all_broken_rules_are_told_at_once() -> None:
    """Fails when check_together raises the first message alone."""
    with pytest.raises(Refusal) as refusal:
        check_together(Everything(bf16=True, fp16=True, lr_power=2.0), frozenset({"lr_power"}))
    assert len(str(refusal.value).splitlines()) == 3


SCHEDULE_SETTINGS = {"warmup_steps": 0.3, "min_lr_ratio": 0.999, "lr_power": 2.0, "lr_cycles": 3, "lr_gamma": 0.3,
                     "lr_decay_ratio": 0.6, "min_lr": 4.9995e-5, "warmup_type": "cosine", "lr_decay_type": "linear", "lr_patience": 3,
                     "lr_threshold": 0.01}  # fmt: skip
# Evaluations that get better by little for a while, and then no more.
OBJECTIVE = [1 - 0.001 * k for k in range(15)] + [1.0] * 25


@pytest.mark.parametrize("scheduler", settings_of(tk.OptimConfig)["lr_scheduler_type"].choices)
@pytest.mark.parametrize("name", SCHEDULE_SETTINGS)
def test_schedule_setting_is_refused_exactly_where_it_leaves_the_curve_unchanged(scheduler: str, name: str) -> None:
    """The schedules themselves are the reference. Fails when "step" is taken out of the rule for lr_gamma."""
    from toolkit.optim.schedules import build_schedule

    plain, changed = (tk.OptimConfig(lr_scheduler_type=scheduler, **extra) for extra in ({}, {name: SCHEDULE_SETTINGS[name]}))
    refused = any(setting == name for setting, _ in broken_rules(changed, frozenset({name})))
    curves = [[build_schedule(config, 50)(step / 50, OBJECTIVE[:step]) for step in range(51)] for config in (plain, changed)]
    assert refused == (curves[0] == curves[1])


@pytest.mark.parametrize("scheduler", settings_of(tk.OptimConfig)["lr_scheduler_type"].choices)
def test_a_schedule_has_read_all_of_its_settings_when_it_is_built(scheduler: str) -> None:
    """Every schedule with every setting that is not refused with it, alone and (but for two ways to give one floor) together.

    Fails when: a schedule reads a setting, as lr_patience, when it comes to the step that needs it.
    """
    from toolkit.config.reading import forget_reads, settings_read
    from toolkit.optim.schedules import build_schedule

    values = {**SCHEDULE_SETTINGS, "warmup_steps": 5, "min_lr": 1e-6}
    taken = [
        name for name in values
        if not broken_rules(tk.OptimConfig(lr_scheduler_type=scheduler, **{"warmup_steps": 5, name: values[name]}), frozenset({name}))
    ]  # fmt: skip
    together = [[name for name in taken if name != floor] for floor in ("min_lr", "min_lr_ratio")]
    for names in [*([name] for name in taken), *together]:
        config = tk.OptimConfig(lr_scheduler_type=scheduler, **{"warmup_steps": 5, **{name: values[name] for name in names}})
        forget_reads(config)
        build_schedule(config, 50)
        assert set(names) <= settings_read(config)


# -- files -----------------------------------------------------------------------------------------------------------


def test_written_config_file_gives_the_same_config_back(tmp_path: Any) -> None:
    """Fails when write_config_file writes str(value), or leaves out the settings at their defaults."""
    config = Everything(
        learning_rate=1e-5 / 3, eval_strategy="no", report_to=["wandb", "trackio"], lr_patterns=["layers.(1,2)=0.5", "a: b=1"],
        run_name="yes", tokenizer="- 'quoted' \"twice\" # ö\n next", model_revision="0123", dataset="a:0.7,b:0.3", tf32=False,
        own_number=2**60 + 1, save_total_limit=None, class_weights=[1.0, 1e-7], adam_epsilon=1e-8,
    )  # fmt: skip
    write_config_file(config, tmp_path / "config.yaml")
    values = read_values(Everything, read_config_file(tmp_path / "config.yaml"))
    assert set(values) == set(settings_of(type(config)))
    assert Everything(**values) == config


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("seed: 010\n", {"seed": 10}),  # in YAML 1.1 eight
        ("run_name: 12:30\n", {"run_name": "12:30"}),  # 750
        ("run_name: 2026-01-31\n", {"run_name": "2026-01-31"}),  # a date
        ("run_name: 0x10\n", {"run_name": "0x10"}),  # sixteen
        ("learning_rate: 2e-4\nseed: 1_000\n", {"learning_rate": 2e-4, "seed": 1000}),
        ("seed: &s 5\nlogging_steps: *s\n", {"seed": 5, "logging_steps": 5}),
        ('{"seed": 7, "packing": false}', {"seed": 7, "packing": False}),  # JSON is YAML
    ],
)
def test_a_file_means_what_its_writer_meant(tmp_path: Any, text: str, settings: dict[str, Any]) -> None:
    """Fails when parse_yaml reads with PyYAML's own loader."""
    (tmp_path / "c.yaml").write_text(text)
    assert read_values(Everything, read_config_file(tmp_path / "c.yaml")) == settings


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_whole_number_has_both_ends_of_its_range(group: type[Settings]) -> None:
    """Fails when `most` is left out of one."""
    for each in settings_of(group).values():
        assert each.kind is not int or (each.least is not None and each.most is not None), each.name


def test_config_file_is_stable_grouped_and_shows_the_default_beside_what_differs(tmp_path: Any) -> None:
    """Fails when the panel's comment or the default's is left out."""
    write_config_file(Everything(learning_rate=0.25), tmp_path / "a.yaml")
    write_config_file(Everything(learning_rate=0.25), tmp_path / "b.yaml")
    text = (tmp_path / "a.yaml").read_text()
    assert text == (tmp_path / "b.yaml").read_text()
    lines = text.splitlines()
    assert "learning_rate: 0.25  # default: 5e-05" in lines
    assert lines.index("# Optimizer") < lines.index("learning_rate: 0.25  # default: 5e-05") < lines.index("# Run")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.yaml", None, "c.yaml: no such file."),
        ("c.yaml", b"a: [1\nb: 2", "c.yaml:2: is not YAML"),
        ("c.yaml", b"a: 1\n\nb: 2\na: 3\n", "c.yaml:4: a is there twice, first in line 1"),
        ("c.yaml", b"- a\n- b\n", "c.yaml: must hold"),
        ("c.yaml", b"run_name: caf\xe9\n", "c.yaml: byte 13 is not UTF-8"),
        ("c.yaml", b"run_name: a\x00b\n", "c.yaml: is not YAML"),
        ("c.json", b'{"a": 1,\n "b": }', "c.json:2: is not JSON"),
        ("c.json", b'{"a": 1, "b": 2, "a": 3}', "c.json: a is twice"),
        ("c.json", b"[1]", "c.json: must hold"),
        ("c.json", b"[" * 100_000, "c.json: lists and objects"),
        ("c.json", b"", "c.json:1: is not JSON"),
    ],
    ids=["missing", "syntax", "twice", "list", "latin-1", "null byte", *(f"JSON {what}" for what in ("syntax", "twice", "list", "deep", "empty"))],
)
def test_bad_config_file_is_refused_with_its_place(tmp_path: Any, name: str, content: bytes | None, message: str) -> None:
    """Fails when read_config_file is yaml.safe_load(open(path)) alone, or json.loads alone."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(Refusal) as refusal:
        read_config_file(tmp_path / name)
    assert message in str(refusal.value)


def test_json_config_means_what_the_same_yaml_means(tmp_path: Any) -> None:
    """With tabs and a sign beyond 16 bits, which YAML does not read. Fails when a .json file is read as YAML."""
    settings = {"learning_rate": 2e-5, "report_to": ["wandb"], "run_name": "\N{ROCKET}", "resume_from": None, "packing": True,
                "remove_unused_columns": True}  # fmt: skip
    (tmp_path / "c.json").write_text(json.dumps(settings, indent="\t"))
    read = read_values(Everything, read_config_file(tmp_path / "c.json"))
    assert read == {"learning_rate": 2e-5, "report_to": ["wandb"], "run_name": "\N{ROCKET}", "resume_from": None, "packing": True}


def test_empty_config_file_says_nothing(tmp_path: Any) -> None:
    """Fails when read_config_file drops its case for None."""
    (tmp_path / "c.yaml").write_text("# nothing yet\n")
    assert read_config_file(tmp_path / "c.yaml") == {}


def test_changed_settings_are_those_that_differ_from_the_recipes_own_defaults() -> None:
    """Fails when the defaults are those of the group: dataset would differ."""
    assert changed_settings(Everything()) == {}
    assert changed_settings(Everything(dataset="stdlib:sft", seed=1)) == {"dataset": "stdlib:sft", "seed": 1}
