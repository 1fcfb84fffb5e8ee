"""Which engine shards a run: the settings and what `accelerate launch` says, agreed or refused.

The launcher's variables are made by Accelerate's own launcher from YAML files, so that a new name of one of them is noticed.
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import toolkit as tk
from toolkit.config import Refusal
from toolkit.distributed.engines import choice, deepspeed_config, named
from toolkit.distributed.engines.choice import EngineChoice, FsdpChoice, choose_engine

NOBODY: dict[str, str] = {}


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.RunConfig):
    pass


Launched = Callable[..., dict[str, str]]


@pytest.fixture
def launched(tmp_path: Path) -> Launched:
    """The variables that `accelerate launch --config_file` gives its ranks, for what is in the file."""

    def launch(kind: str, **fields: Any) -> dict[str, str]:
        if kind == "torchrun":
            return {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"} | fields
        general = {
            name: fields.pop(name) for name in ("mixed_precision", "dynamo_config", "parallelism_config") if name in fields
        }
        section = {"DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config", "MEGATRON_LM": "megatron_lm_config"}.get(kind)
        path = tmp_path / "accelerate.yaml"
        whole = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": kind,
            "num_processes": 2,
            "num_machines": 1,
        } | general
        path.write_text(yaml.safe_dump(whole | ({section: fields} if section else {})))
        return launcher_variables(path) | {"WORLD_SIZE": "2"}

    return launch


def launcher_variables(path: Path) -> dict[str, str]:
    """As `accelerate.commands.launch.launch_command` (1.15) makes them."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(path), "x.py"]))
    if not args.use_deepspeed:
        return prepare_multi_gpu_env(args)
    args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    return prepare_deepspeed_cmd_env(args)[1]


def written(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "ds_config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


# -- what one source names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "launcher", "expected"),
    [
        ({}, None, EngineChoice("plain")),
        ({"fp16": True}, None, EngineChoice("plain", mixed_precision="fp16")),
        ({"fsdp": True}, None, EngineChoice("fsdp", fsdp=FsdpChoice())),
        ({"fsdp": True, "bf16": True, "offload": "parameters"}, None,
         EngineChoice("fsdp", offload="parameters", mixed_precision="bf16", fsdp=FsdpChoice())),
        ({"bf16": True}, ("torchrun", {}), EngineChoice("plain", mixed_precision="bf16")),
        ({"bf16": True}, ("MULTI_GPU", {"mixed_precision": "no"}), EngineChoice("plain", mixed_precision="bf16")),
        ({}, ("MULTI_GPU", {"mixed_precision": "bf16"}), EngineChoice("plain", mixed_precision="bf16")),
        ({}, ("MULTI_GPU", {"mixed_precision": "fp16"}), EngineChoice("plain", mixed_precision="fp16")),
        ({}, ("FSDP", {"fsdp_version": 2}), EngineChoice("fsdp", fsdp=FsdpChoice())),
        ({"fsdp": True, "gradient_checkpointing": True},
         ("FSDP", {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_offload_params": True, "mixed_precision": "bf16",
                   "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,Other", "fsdp_activation_checkpointing": True,
                   "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}),
         EngineChoice("fsdp", offload="parameters", mixed_precision="bf16",
                      fsdp=FsdpChoice(reshard_after_forward=False, wrapped_layers=("LlamaDecoderLayer", "Other")))),
    ],
)  # fmt: skip
def test_what_one_source_names_is_taken(
    settings: dict[str, Any], launcher: Any, expected: EngineChoice, launched: Launched
) -> None:
    """Fails when a name in _FSDP_FIELDS, _Launched or _choose_fsdp is not the launcher's, or "no" names a precision."""
    environment = launched(launcher[0], **launcher[1]) if launcher else NOBODY
    assert choose_engine(Config(**settings), environment) == expected


@pytest.mark.parametrize(
    ("settings", "launcher", "file", "stage", "offload", "precision"),
    [
        ({"zero_stage": 1}, None, None, 1, "none", "no"),
        ({"zero_stage": 3, "offload": "parameters", "bf16": True}, None, None, 3, "parameters", "bf16"),
        ({"zero_stage": 3}, ("torchrun", {}), None, 3, "none", "no"),
        ({}, ("DEEPSPEED", {}), None, 2, "none", "no"),  # Accelerate's own default
        ({"zero_stage": 3}, ("DEEPSPEED", {}), None, 3, "none", "no"),
        ({}, ("DEEPSPEED", {"zero_stage": 1, "offload_optimizer_device": "cpu"}), None, 1, "optimizer", "no"),
        ({"offload": "optimizer"}, ("DEEPSPEED", {"zero_stage": 2, "offload_optimizer_device": "none"}), None, 2, "optimizer", "no"),
        ({}, ("DEEPSPEED", {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu",
                            "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "mixed_precision": "bf16"}),
         None, 3, "parameters", "bf16"),
        ({"gradient_accumulation_steps": 4}, ("DEEPSPEED", {"gradient_accumulation_steps": 1}), None, 2, "none", "no"),
        ({"gradient_accumulation_steps": 4, "max_grad_norm": 0.5},
         ("DEEPSPEED", {"gradient_accumulation_steps": 4, "gradient_clipping": 0.5}), None, 2, "none", "no"),
        ({}, None, {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, 3, "none", "bf16"),
        ({"bf16": True, "zero_stage": 1, "offload": "optimizer"}, None,
         {"zero_optimization": {"stage": "auto"}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, 1, "optimizer", "bf16"),
        ({}, None, {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"},
                                          "offload_param": {"device": "nvme", "nvme_path": "/n"}}}, 3, "parameters", "no"),
    ],
)  # fmt: skip
def test_zero_is_what_settings_launcher_and_file_name_together(
    settings: dict[str, Any],
    launcher: Any,
    file: Any,
    stage: int,
    offload: str,
    precision: str,
    launched: Launched,
    tmp_path: Path,
) -> None:
    """Fails when a variable's name in _choose_zero is not the launcher's, or when "none" names a device (SILENT)."""
    environment = launched(launcher[0], **launcher[1]) if launcher else NOBODY
    chosen = choose_engine(Config(**settings, deepspeed=written(tmp_path, file) if file else None), environment)
    assert (chosen.name, chosen.zero_stage, chosen.offload, chosen.mixed_precision) == ("zero", stage, offload, precision)
    assert chosen.deepspeed
    zero = chosen.deepspeed["zero_optimization"]
    assert zero["stage"] == stage
    assert {part for part in ("offload_optimizer", "offload_param") if part in zero} == {
        "none": set(), "optimizer": {"offload_optimizer"}, "parameters": {"offload_optimizer", "offload_param"}
    }[offload]  # fmt: skip
    assert chosen.deepspeed["bf16"]["enabled"] is (precision == "bf16")


@pytest.mark.parametrize("engine", [{}, {"fsdp": True}, {"zero_stage": 2}], ids=str)
def test_the_precision_of_the_device_is_that_of_a_run_where_nobody_names_one(engine: dict[str, Any], tmp_path: Path) -> None:
    """With each engine. Fails when one of them leaves it out, or takes it before what is named: in a setting, in a file."""
    assert choose_engine(Config(**engine), NOBODY, precision="bf16").mixed_precision == "bf16"
    assert choose_engine(Config(**engine, bf16=False), NOBODY, precision="bf16").mixed_precision == "no"
    assert choose_engine(Config(**engine), NOBODY, precision="fp16").mixed_precision == ("no" if engine else "fp16")
    if "zero_stage" in engine:
        file = written(tmp_path, STAGE_2 | {"bf16": {"enabled": False}})
        assert choose_engine(Config(deepspeed=file), NOBODY, precision="bf16").mixed_precision == "no"


def test_file_of_the_accelerate_config_is_the_file_of_the_settings(launched: Launched, tmp_path: Path) -> None:
    """Fails when _choose_zero compares the paths as they are written, or ignores the launcher's."""
    path = written(tmp_path, {"zero_optimization": {"stage": 1}})
    environment = launched("DEEPSPEED", deepspeed_config_file=path)
    assert choose_engine(Config(), environment).zero_stage == 1
    roundabout = str(tmp_path / ".." / tmp_path.name / "ds_config.json")
    assert choose_engine(Config(deepspeed=roundabout), environment).zero_stage == 1


def test_configuration_made_in_a_recipes_code_stands_in_place_of_a_file(tmp_path: Path) -> None:
    """Fails when choose_engine or _choose_zero does not look at it, or when it is not checked like a file."""
    in_code = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": "auto"}
    chosen = choose_engine(Config(), NOBODY, in_code)
    assert (chosen.name, chosen.zero_stage, chosen.offload) == ("zero", 3, "optimizer")
    for settings, words in [
        ({"zero_stage": 2}, "--zero-stage 2 .*zero_optimization.stage: 3 .*DeepSpeedPlugin"),
        ({"fsdp": True}, "DeepSpeedPlugin and --fsdp "),
        ({"deepspeed": written(tmp_path, in_code)}, r"ds_config\.json .*DeepSpeedPlugin"),
    ]:
        with pytest.raises(Refusal, match=words):
            choose_engine(Config(**settings), NOBODY, in_code)


def test_recipe_without_a_group_of_settings_has_an_engine_all_the_same() -> None:
    """Fails when a setting of DataConfig, OptimConfig or ModelConfig is taken for one that every recipe has."""
    assert choose_engine(tk.RunConfig(), NOBODY) == EngineChoice("plain")
    chosen = choose_engine(tk.RunConfig(zero_stage=2), NOBODY)
    assert chosen.deepspeed
    assert chosen.deepspeed["train_micro_batch_size_per_gpu"] == 1


def test_variables_of_an_engine_that_is_not_used_say_nothing() -> None:
    """Fails when _Launched reads the fields of an engine without asking whether it is on."""
    left_over = {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "FSDP_VERSION": "1", "FSDP_OFFLOAD_PARAMS": "true",
        "ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    }  # fmt: skip
    assert choose_engine(Config(), left_over) == EngineChoice("plain")
    assert choose_engine(Config(fsdp=True), left_over) == EngineChoice("fsdp", fsdp=FsdpChoice())
    assert choose_engine(Config(zero_stage=3), left_over).zero_stage == 3


# -- what two name differently ---------------------------------------------------------------------------------------

STAGE_2 = {"zero_optimization": {"stage": 2}}

# (settings, launcher, DeepSpeed file, words of the message)
REFUSED: list[tuple[dict[str, Any], tuple[str, dict[str, Any]] | None, Any, list[str]]] = [
    # Two engines
    ({"zero_stage": 2, "fsdp": True}, None, None, ["--zero-stage 2 and --fsdp "]),
    ({"fsdp": True}, None, STAGE_2, ["--deepspeed ", "ds_config.json and --fsdp "]),
    ({"fsdp": True}, ("DEEPSPEED", {"zero_stage": 2}), None, ["DeepSpeed in the accelerate config and --fsdp"]),
    ({"zero_stage": 2}, ("FSDP", {"fsdp_version": 2}), None, ["--zero-stage 2 and FSDP in the accelerate config"]),
    # Stage
    ({"zero_stage": 3}, ("DEEPSPEED", {"zero_stage": 2}), None,
     ["--zero-stage 3 contradicts zero_stage: 2 in ", "accelerate config"]),
    ({"zero_stage": 3}, None, STAGE_2, ["--zero-stage 3 contradicts zero_optimization.stage: 2 in ", "ds_config.json"]),
    ({}, ("DEEPSPEED", {"zero_stage": 0}), None, ["zero_stage: 0 in the accelerate config", "plain data parallelism"]),
    ({}, None, {"zero_optimization": {"stage": 0}}, ["zero_optimization.stage: 0 in ", "plain data", "remove --deepspeed"]),
    ({}, None, {"zero_optimization": {"stage": 4}}, ["zero_optimization.stage: 4 in ", "stages of ZeRO are 1, 2 and 3"]),
    ({}, None, {"bf16": {"enabled": True}}, ["ds_config.json has no zero_optimization.stage", "--zero-stage 1, 2 or 3"]),
    # Offload
    ({"offload": "optimizer"}, None, None, ["--offload optimizer has no effect", "--zero-stage 2"]),
    ({"offload": "parameters"}, ("MULTI_GPU", {}), None, ["--offload parameters has no effect"]),
    ({"offload": "optimizer", "fsdp": True}, None, None, ["--offload optimizer with FSDP", "--offload parameters"]),
    ({"offload": "parameters", "zero_stage": 2}, None, None, ["--offload parameters with ZeRO stage 2", "--zero-stage 3"]),
    ({}, None, {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
     ["with ZeRO stage 1: ", "stage 3"]),
    ({"offload": "parameters"}, ("DEEPSPEED", {"zero_stage": 3, "offload_optimizer_device": "cpu"}), None,
     ["--offload parameters contradicts offload_optimizer_device: cpu in ", "accelerate config"]),
    ({"offload": "optimizer"}, None, {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
     ["--offload optimizer contradicts zero_optimization.offload_optimizer", "zero_optimization.offload_param"]),
    ({"zero_stage": 3}, ("DEEPSPEED", {"offload_param_device": "cpu"}), None,
     ["offload_param_device: cpu in the accelerate config", "offload_optimizer"]),
    ({"zero_stage": 3}, None, {"zero_optimization": {"offload_param": {"device": "cpu"}}},
     ["zero_optimization.offload_param.device", "offload_optimizer"]),
    ({}, ("DEEPSPEED", {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/nvme"}), None,
     ["offload_optimizer_device: nvme", "path", "--deepspeed"]),
    # Precision
    ({"fp16": True, "zero_stage": 2}, None, None, ["--fp16 with ZeRO", "--bf16"]),
    ({"fp16": True, "fsdp": True}, None, None, ["--fp16 with FSDP", "--bf16"]),
    ({}, ("DEEPSPEED", {"mixed_precision": "fp16"}), None, ["mixed_precision: fp16 in the accelerate config with ZeRO", "--bf16"]),
    ({"bf16": True}, None, STAGE_2 | {"fp16": {"enabled": True}}, ["fp16.enabled: true in ", "--bf16"]),
    ({"bf16": True}, ("MULTI_GPU", {"mixed_precision": "fp16"}), None,
     ["--bf16 contradicts mixed_precision: fp16 in the accelerate config"]),
    ({"fp16": True}, ("MULTI_GPU", {"mixed_precision": "bf16"}), None, ["--fp16 contradicts mixed_precision: bf16"]),
    ({"bf16": True}, None, STAGE_2 | {"bf16": {"enabled": False}}, ["--bf16 contradicts bf16.enabled: false in "]),
    ({"bf16": False}, None, STAGE_2 | {"bf16": {"enabled": True}}, ["--no-bf16 contradicts bf16.enabled: true in "]),
    ({"bf16": False}, ("FSDP", {"fsdp_version": 2, "mixed_precision": "bf16"}), None, ["--no-bf16 contradicts mixed_precision: bf16"]),
    # Counts and clipping
    ({"gradient_accumulation_steps": 2}, ("DEEPSPEED", {"gradient_accumulation_steps": 4}), None,
     ["--gradient-accumulation-steps 2 contradicts gradient_accumulation_steps: 4 in the accelerate config"]),
    ({"global_batch_size": 32}, ("torchrun", {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}), None,
     ["--global-batch-size 32 (ranks: 2, accumulation: 2) contradicts"]),
    ({}, ("DEEPSPEED", {"gradient_clipping": 0.5}), None,
     ["--max-grad-norm 1 contradicts gradient_clipping: 0.5 in the accelerate config"]),
    ({}, ("DEEPSPEED", {"zero_stage": "two"}), None, ["zero_stage: two in ", "accelerate config: ", "number"]),
    # FSDP
    ({}, ("FSDP", {"fsdp_version": 1, "fsdp_reshard_after_forward": "true"}), None, ["fsdp_version: 1", "write 2"]),
    ({}, ("FSDP", {"fsdp_version": 2, "fsdp_activation_checkpointing": True}), None,
     ["fsdp_activation_checkpointing: true", "take --gradient-checkpointing"]),
    ({"gradient_checkpointing": True},
     ("FSDP", {"fsdp_version": 2, "fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True}), None,
     ["fsdp_activation_checkpointing_offload: true"]),
    ({}, ("FSDP", {"fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}), None, ["fsdp_auto_wrap_policy: SIZE_BASED_WRAP", "transformer_based_wrap"]),
    ({}, ("FSDP", {"fsdp_version": 2, "fsdp_reshard_after_forward": "FULL_SHARD"}), None, ["fsdp_reshard_after_forward: full_shard", "true"]),
    ({}, ("FSDP", {"fsdp_version": 2, "fsdp_ignored_modules": "lm_head"}), None, ["fsdp_ignored_modules: lm_head", "remove it"]),
    # Not supported
    ({}, ("MEGATRON_LM", {}), None, ["Megatron-LM", "not supported yet"]),
    ({}, ("FSDP", {"fsdp_version": 2, "parallelism_config": {"parallelism_config_tp_size": 2}}), None, ["tp_size: 2", "not supported"]),
    ({}, ("FSDP", {"fsdp_version": 2, "parallelism_config": {"parallelism_config_cp_size": 2}}), None, ["cp_size: 2", "not supported"]),
    ({}, ("torchrun", {"ACCELERATE_MIXED_PRECISION": "fp8"}), None, ["mixed_precision: fp8", "bf16", "--fp8"]),
    ({"fp8": "rowwise"}, ("torchrun", {"ACCELERATE_MIXED_PRECISION": "fp16"}), None, ["--fp8 rowwise contradicts mixed_precision: fp16"]),
    ({}, ("MULTI_GPU", {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}), None, ["--no-torch-compile contradicts dynamo_backend: inductor", "take --torch-compile"]),
    ({"torch_compile": True}, ("MULTI_GPU", {"dynamo_config": {"dynamo_backend": "EAGER"}}), None, ["dynamo_backend: eager", "inductor"]),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "launcher", "file", "words"), REFUSED, ids=[str(case[3][0]) for case in REFUSED])
def test_contradiction_is_refused_naming_both_values(
    settings: dict[str, Any], launcher: Any, file: Any, words: list[str], launched: Launched, tmp_path: Path
) -> None:
    """Fails when: the check of its case is removed; most of them when `agreed` takes the first value that is named."""
    environment = launched(launcher[0], **launcher[1]) if launcher else NOBODY
    with pytest.raises(Refusal) as refusal:
        choose_engine(Config(**settings, deepspeed=written(tmp_path, file) if file else None), environment)
    for each in words:
        assert each in str(refusal.value)


def test_compilation_that_both_ask_for_is_no_contradiction(launched: Launched) -> None:
    """Fails when _check_compilation does not read torch_compile."""
    environment = launched("MULTI_GPU", dynamo_config={"dynamo_backend": "INDUCTOR"})
    assert choose_engine(Config(torch_compile=True), environment) == EngineChoice("plain")


def test_two_devices_for_one_offload_are_refused(tmp_path: Path) -> None:
    """Fails when _zero_offload does not compare the devices: both say "optimizer"."""
    nvme = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}}
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}
    words = "offload_optimizer_device: cpu .*zero_optimization.offload_optimizer.device: .nvme. in"
    with pytest.raises(Refusal, match=words):
        choose_engine(Config(deepspeed=written(tmp_path, nvme)), environment)


def test_two_deepspeed_files_are_refused(launched: Launched, tmp_path: Path) -> None:
    """Fails when _choose_zero takes the first of the two."""
    other = tmp_path / "other.json"
    other.write_text(json.dumps(STAGE_2))
    environment = launched("DEEPSPEED", deepspeed_config_file=str(other))
    with pytest.raises(Refusal) as refusal:
        choose_engine(Config(deepspeed=written(tmp_path, STAGE_2)), environment)
    assert re.search(rf"--deepspeed {tmp_path}/ds_config\.json .*deepspeed_config_file: {other}", str(refusal.value))


@pytest.mark.parametrize("module", [choice, deepspeed_config, named], ids=lambda module: module.__name__)
def test_engine_is_chosen_without_a_heavy_import(module: ModuleType) -> None:
    """Fails when choice.py or deepspeed_config.py imports torch, accelerate or deepspeed at its top."""
    imports = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {str(node.module) if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    light = {*(f"toolkit.config{name}" for name in ("", ".conditions", ".json_and_yaml", ".reading", ".setting")), *(f"toolkit.distributed.engines.{name}" for name in ("deepspeed_config", "named"))}
    assert {name for name in names - light if name.partition(".")[0] not in sys.stdlib_module_names} == set()


@pytest.mark.parametrize(("offload", "part", "stage"), [("optimizer", "offload_optimizer", 2), ("parameters", "offload_param", 3)])
def test_an_offload_that_a_file_turns_off_is_refused(tmp_path: Path, offload: str, part: str, stage: int) -> None:
    """Fails when: "none" in a file is taken for silence."""
    path = written(tmp_path, {"zero_optimization": {"stage": stage, part: {"device": "none"}}})
    with pytest.raises(Refusal) as refusal:
        choose_engine(Config(deepspeed=path, offload=offload), {})
    assert f'--offload {offload} contradicts zero_optimization.{part}.device: "none" in {path}' in str(refusal.value)
