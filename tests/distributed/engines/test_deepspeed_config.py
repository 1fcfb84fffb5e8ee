"""DeepSpeed's configuration: made from the settings, or a user's own file with every "auto" filled and no contradiction.

DeepSpeed's and Accelerate's own classes are the reference for what is accepted.
"""

import copy
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk
from toolkit.config import Refusal
from toolkit.config.reading import values_of
from toolkit.distributed.engines.deepspeed_config import complete_deepspeed, fit_buckets, read_deepspeed_file


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.RunConfig):
    pass


# The file of transformers' documentation: every value that the settings know is "auto".
ALL_AUTO: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "auto"},
        "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9, "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000, "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip


def build(config: Any = None, **changed: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "stage": 2, "offload": "none", "mixed_precision": "no", "written": {}, "source": "ds.json", "world_size": 2,
    }  # fmt: skip
    return complete_deepspeed(values_of(config or Config()), **(arguments | changed))


# -- what is passed to DeepSpeed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [{}, ALL_AUTO], ids=["settings", "all auto"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    ("stage", "offload"), [(1, "none"), (1, "optimizer"), (2, "optimizer"), (3, "none"), (3, "parameters")]
)
def test_result_is_complete_and_accepted_by_deepspeed(stage: int, offload: str, precision: str, written: Any) -> None:
    """Fails when _FILLED misses a key, an unknown key is written, or train_batch_size stays in."""
    from deepspeed.runtime.config import DeepSpeedConfig

    config = Config(per_device_train_batch_size=3, gradient_accumulation_steps=5, lr_scheduler_type="linear", max_grad_norm=0.5)
    result = fit_buckets(build(config, stage=stage, offload=offload, mixed_precision=precision, written=written), 10**6)
    json.dumps(result)
    assert '"auto"' not in json.dumps(result)
    taken = DeepSpeedConfig(copy.deepcopy(result))
    zero = taken.zero_config
    assert int(zero.stage) == stage
    assert (zero.offload_optimizer is not None, zero.offload_param is not None) == {
        "none": (False, False), "optimizer": (True, False), "parameters": (True, True)
    }[offload]  # fmt: skip
    assert {part.device for part in (zero.offload_optimizer, zero.offload_param) if part} <= {"cpu"}
    assert taken.bfloat16_config.enabled is (precision == "bf16")
    assert not taken.float16_config.enabled
    # Accumulation, clipping, optimizer and schedule are the toolkit's.
    assert (taken.train_micro_batch_size_per_gpu, taken.gradient_accumulation_steps, taken.gradient_clipping) == (3, 1, 0.0)
    assert (taken.optimizer_name, taken.scheduler_name) == (None, None)
    assert taken.zero_allow_untested_optimizer
    assert not taken.zero_force_ds_cpu_optimizer
    assert zero.gather_16bit_weights_on_model_save is (stage == 3)  # else Accelerate saves no whole model


def test_result_passes_through_accelerates_plugin_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when an "auto" is left for the plugin to fill, or a section has not the form it reads."""
    from accelerate import DeepSpeedPlugin

    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    result = build(stage=3, offload="parameters", mixed_precision="bf16")
    plugin = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(result))
    assert (plugin.zero_stage, plugin.offload_optimizer_device, plugin.offload_param_device) == (3, "cpu", "cpu")
    assert (plugin.gradient_accumulation_steps, plugin.gradient_clipping, plugin.zero3_save_16bit_model) == (1, 0.0, True)
    plugin.set_mixed_precision("bf16")
    silent = {"steps_per_print": plugin.deepspeed_config["steps_per_print"], "fp16": {"enabled": False}}
    assert plugin.deepspeed_config == result | silent


def test_users_own_values_and_sections_stay() -> None:
    """Fails when complete_deepspeed or _zero_section starts from an empty dictionary, fit_buckets overwrites, or the copy is shallow."""
    own = {
        "zero_optimization": {
            "stage": 3, "reduce_bucket_size": 77, "sub_group_size": 5, "round_robin_gradients": True,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/n", "pin_memory": False}, "offload_param": {"device": "cpu"},
        },
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "comms_logger": {"enabled": True}, "flops_profiler": {"enabled": False}, "activation_checkpointing": {"cpu_checkpointing": False},
        "wall_clock_breakdown": True,
    }  # fmt: skip
    before = copy.deepcopy(own)
    result = fit_buckets(build(stage=3, offload="parameters", mixed_precision="bf16", written=own), 10**6)
    zero = result["zero_optimization"]
    assert {
        key: zero[key] for key in ("reduce_bucket_size", "sub_group_size", "round_robin_gradients", "offload_optimizer")
    } == {
        key: before["zero_optimization"][key]
        for key in ("reduce_bucket_size", "sub_group_size", "round_robin_gradients", "offload_optimizer")
    }
    assert zero["allgather_bucket_size"] == 10**6
    for key in ("bf16", "comms_logger", "flops_profiler", "activation_checkpointing", "wall_clock_breakdown"):
        assert result[key] == before[key]
    result["comms_logger"]["enabled"] = False  # as DeepSpeed might
    assert own == before


@pytest.mark.parametrize(
    ("num_parameters", "reduce", "prefetch"),
    [(500, 10_000, 10_000), (21_700_000, 21_700_000, 21_700_000), (8_000_000_000, 500_000_000, 50_000_000)],
)
def test_buckets_are_no_larger_than_the_model(num_parameters: int, reduce: int, prefetch: int) -> None:
    """Fails when fit_buckets drops its min or its max."""
    plain = build()
    assert "reduce_bucket_size" not in plain["zero_optimization"]
    zero = fit_buckets(plain, num_parameters)["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["allgather_bucket_size"]) == (reduce, reduce)
    assert zero["stage3_prefetch_bucket_size"] == prefetch


# -- what a file may repeat ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ({"gradient_accumulation_steps": 2},
         {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 8, "train_batch_size": 32, "gradient_clipping": 1}),
        ({"global_batch_size": 40}, {"gradient_accumulation_steps": 3, "train_batch_size": 40}),
        ({"learning_rate": 1e-3, "weight_decay": 0.1, "adam_beta2": 0.95},
         {"optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1,
                                                   "adam_w_mode": True, "torch_adam": True}}}),
        ({"optim": "adamw_torch_fused"}, {"optimizer": {"type": "AdamW"}}),
        ({"optim": "sgd", "momentum": 0.9}, {"optimizer": {"type": "SGD", "params": {"momentum": 0.9, "lr": "auto"}}}),
        ({"lr_scheduler_type": "constant_with_warmup"}, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}),
        ({"lr_scheduler_type": "cosine"}, {"scheduler": {"type": "WarmupCosineLR"}}),
        ({}, {"amp": {"enabled": False}, "fp16": {"enabled": False}, "zero_allow_untested_optimizer": True,
              "sequence_parallel_size": 1}),
    ],
)  # fmt: skip
def test_file_that_repeats_the_settings_is_accepted(settings: dict[str, Any], written: dict[str, Any]) -> None:
    """Fails when a rule refuses whatever is under its key, or when a section that is the toolkit's stays in."""
    result = build(Config(**settings), written=written)
    assert not {"optimizer", "scheduler", "train_batch_size", "fp16", "amp"} & set(result)
    assert result["gradient_accumulation_steps"] == 1
    assert result["gradient_clipping"] == 0.0


ZERO = "zero_optimization"

REFUSED: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {"train_micro_batch_size_per_gpu": 4},
     ["--per-device-train-batch-size 8 contradicts train_micro_batch_size_per_gpu: 4 in ds.json"]),
    ({}, {"gradient_accumulation_steps": 4}, ["--gradient-accumulation-steps 1 contradicts gradient_accumulation_steps: 4 in ds.json"]),
    ({"global_batch_size": 40}, {"gradient_accumulation_steps": 2},
     ["--global-batch-size 40 (ranks: 2, accumulation: 3) contradicts gradient_accumulation_steps: 2"]),
    ({"gradient_accumulation_steps": 2}, {"train_batch_size": 16},
     ["--per-device-train-batch-size 8 times --gradient-accumulation-steps 2, ranks: 2 contradicts train_batch_size: 16 in ds.json"]),
    ({"global_batch_size": 64}, {"train_batch_size": 32}, ["--global-batch-size 64 contradicts train_batch_size: 32 in ds.json"]),
    ({}, {"gradient_clipping": 0.3}, ["--max-grad-norm 1 contradicts gradient_clipping: 0.3 in ds.json"]),
    ({"max_grad_norm": 0.5}, {"gradient_clipping": 0.0}, ["--max-grad-norm 0.5 contradicts gradient_clipping: 0.0 in ds.json"]),
    # Optimizer
    ({"optim": "sgd"}, {"optimizer": {"type": "AdamW"}},
     ['--optim sgd contradicts optimizer.type: "AdamW" in ds.json: take --optim adamw_torch']),
    ({}, {"optimizer": {"type": "OneBitAdam"}}, ['--optim adamw_torch contradicts optimizer.type: "OneBitAdam" in ds.json: remove the section.']),
    ({}, {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}},
     ["--learning-rate 5e-05 contradicts optimizer.params.lr: 0.0003 in ds.json"]),
    ({}, {"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.9]}}},
     ["--adam-beta1 0.9 --adam-beta2 0.999 contradicts optimizer.params.betas: [0.8, 0.9] in ds.json"]),
    ({}, {"optimizer": {"type": "AdamW", "params": {"eps": 1e-6}}}, ["--adam-epsilon 1e-08 contradicts"]),
    ({"weight_decay": 0.1}, {"optimizer": {"type": "AdamW", "params": {"weight_decay": 0}}}, ["--weight-decay 0.1 contradicts"]),
    ({"optim": "sgd"}, {"optimizer": {"type": "SGD", "params": {"momentum": 0.5}}}, ["--momentum 0 contradicts"]),
    ({}, {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, ["optimizer.params.adam_w_mode: false in ds.json", "settings"]),
    ({}, {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, ["optimizer.params.max_grad_norm: 1.0 in ds.json"]),
    # Schedule
    ({"lr_scheduler_type": "cosine"}, {"scheduler": {"type": "WarmupDecayLR"}},
     ['--lr-scheduler-type cosine contradicts scheduler.type: "WarmupDecayLR" in ds.json: take --lr-scheduler-type linear']),
    ({}, {"scheduler": {"type": "OneCycle"}}, ['--lr-scheduler-type cosine contradicts scheduler.type: "OneCycle" in ds.json: remove the section.']),
    ({}, {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10}}},
     ["scheduler.params.warmup_num_steps: 10 in ds.json", 'write "auto"']),
    # What must be as it is
    ({}, {"fp16": {"enabled": True}}, ["fp16.enabled: true in ds.json", "write false, or remove it."]),
    ({}, {"amp": {"enabled": True}}, ["amp.enabled: true in ds.json"]),
    ({}, {"bfloat16": {"enabled": True}}, ["bfloat16: ", "remove it."]),
    ({}, {ZERO: {"cpu_offload": True}}, ["zero_optimization.cpu_offload: true", "write false"]),
    ({}, {ZERO: {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, ["offload_optimizer.ratio: 0.5", "write 1.0"]),
    ({}, {ZERO: {"compute_grad_norm": False}}, ["compute_grad_norm: false", "write true"]),
    ({}, {"zero_force_ds_cpu_optimizer": True}, ["zero_force_ds_cpu_optimizer: true", "write false"]),
    ({}, {"tensor_parallel": {"autotp_size": 2}}, ["tensor_parallel: ", "not supported", "remove it."]),
    ({}, {"sequence_parallel_size": 2}, ["sequence_parallel_size: 2", "write 1, or remove it."]),
    ({}, {"elasticity": {"enabled": True}}, ["elasticity.enabled: true"]),
    ({}, {"data_efficiency": {"enabled": True}}, ["data_efficiency.enabled: true"]),
    ({}, {"communication_data_type": "fp16"}, ['communication_data_type: "fp16"', 'write "fp32"']),
    ({}, {"data_types": {"grad_accum_dtype": "bf16"}}, ['data_types.grad_accum_dtype: "bf16"', 'write "fp32"']),
    ({}, {"prescale_gradients": True}, ["prescale_gradients: true", "gradients"]),
    ({}, {"bf16": {"check_grad_overflow": False}}, ["bf16.check_grad_overflow: false", "write true"]),
    ({}, {ZERO: {"zero_quantized_gradients": True}}, ["zero_quantized_gradients: true"]),
    ({}, {ZERO: {"mics_shard_size": 1}}, ["mics_shard_size: 1"]),
    ({}, {"flops_profiler": {"profile_step": "auto"}}, ['flops_profiler.profile_step: "auto" in ds.json', "write one, or remove it."]),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "written", "words"), REFUSED, ids=[case[2][0] for case in REFUSED])
def test_file_that_contradicts_is_refused_naming_both_values(
    settings: dict[str, Any], written: dict[str, Any], words: list[str]
) -> None:
    """Fails when: its row of _SAME, _ONLY, _TYPES or _OPTIMIZER_FACTS goes."""
    with pytest.raises(Refusal) as refusal:
        build(Config(**settings), written=written)
    for each in words:
        assert each in str(refusal.value)


# -- the file itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["ds.json: no such file."]),
        (b'{\n  "zero_optimization": {"stage": 2},\n}', ["ds.json:", "is not JSON"]),
        (b'{\n"train_batch_size" 4}', ["ds.json:2: is not JSON (Expecting ':' delimiter, column 20)."]),
        (b'{"a": "\xff"}', ["ds.json: byte 7 is not UTF-8"]),
        (b"[1]", ["ds.json: must hold"]),
        (b'{"bf16": {"enabled": true, "enabled": false}}', ["ds.json: enabled is twice"]),
        (b'{"zero_optimization": true}', ["zero_optimization: true in ", "ds.json: must be a section in braces."]),
        (
            b'{"zero_optimization": {"offload_param": "cpu"}}',
            ['zero_optimization.offload_param: "cpu" in ', "must be a section"],
        ),
    ],
    ids=str,
)
def test_unreadable_file_is_refused_with_its_line_or_reason(content: bytes | None, words: list[str], tmp_path: Path) -> None:
    """Fails when an except clause of read_deepspeed_file goes, or the check of _SECTIONS."""
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Refusal) as refusal:
        read_deepspeed_file(str(path))
    for each in words:
        assert each in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_directory_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    """Fails when read_deepspeed_file catches no OSError."""
    with pytest.raises(Refusal, match="is a folder"):
        read_deepspeed_file(str(tmp_path))
