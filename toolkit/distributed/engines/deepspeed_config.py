"""The DeepSpeed configuration of a run: from the settings alone, or a user's own with every "auto" filled.

A file may repeat the settings, and must not contradict them. The keys are those of
https://www.deepspeed.ai/docs/config-json/. No heavy library is imported
before `check_known_keys` is called.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from toolkit.config import Refusal
from toolkit.config.json_and_yaml import parse_json, read_text_file
from toolkit.config.setting import did_you_mean, flag_of
from toolkit.distributed.engines.named import OFFLOADED, SILENT, Named, accumulation, agreed, in_file, in_settings, look_up


def read_deepspeed_file(path: str) -> dict[str, Any]:
    """The content of a DeepSpeed configuration file.

    Raises:
        Refusal: no such file, not readable, no JSON object, a key that is in it twice, or a section that is none.
    """
    written = parse_json(read_text_file(path, f"DeepSpeed configuration {path}"), path, is_file=True)
    if not isinstance(written, dict):
        raise Refusal(f'{path}: must hold one JSON object, such as {{"zero_optimization": {{"stage": 2}}}}.')
    for key in _SECTIONS:
        section = look_up(written, key)
        if section is not None and not isinstance(section, dict):
            raise Refusal(f"{key}: {json.dumps(section)} in {path}: must be a section in braces.")
    return written


def complete_deepspeed(
    settings: Mapping[str, Any], *, stage: int, offload: str, mixed_precision: str, written: Mapping[str, Any], source: str,
    world_size: int,
) -> dict[str, Any]:  # fmt: skip
    """The complete configuration for `deepspeed.initialize`, with no "auto" left in it.

    Accumulation, clipping, optimizer and schedule are the toolkit's own, so DeepSpeed gets one micro-batch a step, no
    clipping and neither of the two.

    Args:
        settings: of the recipe, by name; those of groups that it lacks are absent.
        stage: ZeRO stage 1 to 3; like `offload` and `mixed_precision` already agreed between settings and file.
        offload: "none", "optimizer" or "parameters".
        mixed_precision: "no" or "bf16".
        written: the user's own configuration; empty where there is none.
        source: where that is, for messages.
        world_size: number of ranks.

    Raises:
        Refusal: a value in the file contradicts a setting, has no counterpart here, or is an "auto" nobody can fill.
    """
    result = copy.deepcopy(dict(written))
    for key, only in _ONLY.items():
        found = look_up(result, key)
        if found not in (None, "auto", only):
            instead = "remove it" if only is None else f"write {json.dumps(only)}, or remove it"
            raise Refusal(
                f"{key}: {json.dumps(found)} in {source} is not supported: batches, precision, gradients and optimizer are the "
                f"toolkit's own: {instead}."
            )
    _check_repeated(result, settings, source, world_size)
    for key in ("optimizer", "scheduler", "train_batch_size", "fp16", "amp"):
        result.pop(key, None)
    result |= {
        # Where the recipe has no such setting its step is one example: DeepSpeed only needs a number for its log.
        "train_micro_batch_size_per_gpu": settings.get("per_device_train_batch_size", 1),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": (result.get("bf16") or {}) | {"enabled": mixed_precision == "bf16"},
        "zero_optimization": _zero_section(result.get("zero_optimization") or {}, stage, offload),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's own optimizers step on the offloaded shards: the same numbers
        "steps_per_print": 10**12,
        "wall_clock_breakdown": result.get("wall_clock_breakdown", False),
    }
    if mixed_precision == "bf16" and stage > 1:  # parts of a mean would lose digits in each addition
        result["data_types"] = {"grad_accum_dtype": "fp32", **(result.get("data_types") or {})}
    unfilled = _first_auto(result)
    if unfilled:
        raise Refusal(f'{unfilled}: "auto" in {source}: no setting has its value: write one, or remove it.')
    return result


def fit_buckets(deepspeed: Mapping[str, Any], num_parameters: int) -> dict[str, Any]:
    """The same configuration with DeepSpeed's buffers no larger than the model, where the user's file does not size them.

    DeepSpeed fills buffers of its default 5e8 elements whatever the model: on a toy model that takes longer than the step.
    """
    zero = dict(deepspeed["zero_optimization"])
    fitting = max(10_000, 1000 * -(-num_parameters // 1000))  # even: DeepSpeed aligns its buffers
    for key, default in _BUCKETS.items():
        zero.setdefault(key, min(default, fitting))
    return {**deepspeed, "zero_optimization": zero}


def check_known_keys(written: Mapping[str, Any]) -> None:
    """Refuse keys that DeepSpeed doesn't have: at the top it ignores them, below it ends with a traceback."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    in_zero = {*fields, *(str(field.alias) for field in fields.values() if field.alias)}
    for place, keys, known in (("", written, _KNOWN_KEYS), ("zero_optimization.", written["zero_optimization"], in_zero)):
        for key in keys:
            if key not in known:
                hint = did_you_mean(key, known)
                raise Refusal(f"DeepSpeed configuration: {place}{key} is not a key of DeepSpeed's.{hint}")


# -- details ---------------------------------------------------------------------------------------------------------

_SECTIONS = (
    "zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "bf16", "fp16", "optimizer",
    "optimizer.params", "scheduler", "scheduler.params",
)  # fmt: skip

# Sections and keys at the top of a configuration (deepspeed.ai/docs/config-json, DeepSpeed 0.19).
_KNOWN_KEYS = frozenset({
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "csv_monitor", "curriculum_learning", "data_efficiency", "data_types",
    "dataloader_drop_last", "disable_allgather", "dump_state", "elasticity", "eigenvalue", "flops_profiler", "fp16",
    "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor", "graph_harvesting", "hybrid_engine",
    "memory_breakdown", "monitor_config", "nebula", "optimizer", "pld_enabled", "prescale_gradients", "progressive_layer_drop",
    "scheduler", "seq_parallel_communication_data_type", "sequence_parallel_size", "sparse_attention", "sparse_gradients",
    "steps_per_print", "tensorboard", "timers", "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu",
    "use_data_before_expert_parallelism", "use_node_local_storage", "wall_clock_breakdown", "wandb", "weight_quantization",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
})  # fmt: skip

# Keys that a file may hold only with this value (None: not at all): anything else would change the mathematics of a step, or
# have DeepSpeed do what the toolkit does.
_ONLY: dict[str, Any] = {
    "fp16.enabled": False, "amp.enabled": False, "torch_autocast.enabled": False, "bfloat16": None,
    "bf16.check_grad_overflow": True, "bf16.bf16_master_weights_and_grads": False, "bf16.bf16_optimizer_states": False,
    "zero_optimization.cpu_offload": False, "zero_optimization.cpu_offload_param": False,
    "zero_optimization.compute_grad_norm": True, "zero_optimization.zenflow": None,
    "zero_optimization.offload_optimizer.ratio": 1.0, "zero_optimization.offload_optimizer.super_offload": False,
    "zero_optimization.zero_quantized_weights": False, "zero_optimization.zero_quantized_gradients": False,
    "zero_optimization.zero_quantized_nontrainable_weights": False, "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.mics_shard_size": -1, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    "managed_gradient_accumulation": True, "sequence_parallel_size": 1, "tensor_parallel": None, "expert_parallel": None,
    "hybrid_engine.enabled": False, "elasticity.enabled": False, "autotuning.enabled": False,
    "data_efficiency.enabled": False, "curriculum_learning.enabled": False, "progressive_layer_drop.enabled": False,
    "compression_training": None, "quantize_training": None, "communication_data_type": "fp32",
    "seq_parallel_communication_data_type": "fp32", "data_types.grad_accum_dtype": "fp32", "prescale_gradients": False,
    "gradient_predivide_factor": 1.0, "sparse_gradients": False,
}  # fmt: skip

# Keys of a file that repeat a setting under another name.
_SAME = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size", "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate", "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.eps": "adam_epsilon", "optimizer.params.momentum": "momentum",
}  # fmt: skip

# What a file's sections are called that describe an optimizer or a schedule of the toolkit's; DeepSpeed's Adam is AdamW.
_TYPES: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "optim": ("optimizer", {"adamw_torch": ("AdamW", "Adam"), "adamw_torch_fused": ("AdamW", "Adam"), "sgd": ("SGD",)}),
    "lr_scheduler_type": ("scheduler", {
        "constant_with_warmup": ("WarmupLR",), "linear": ("WarmupDecayLR",), "cosine": ("WarmupCosineLR",),
    }),
}  # fmt: skip
# What the toolkit's own optimizers do; `torch_adam` and `fused` only choose an implementation.
_OPTIMIZER_FACTS = {"adam_w_mode": (True,), "bias_correction": (True,), "amsgrad": (False,), "nesterov": (False,),
                    "dampening": (0,), "torch_adam": (True, False), "fused": (True, False)}  # fmt: skip


def _check_repeated(written: Mapping[str, Any], settings: Mapping[str, Any], source: str, world_size: int) -> None:
    """Refuse what in a file contradicts the settings of the recipe."""
    named = {key: in_settings(settings, name) for key, name in _SAME.items()}
    if settings.get("momentum", 0.0) is None:
        named["optimizer.params.momentum"] = Named(0.0, "--momentum 0")  # what it is for sgd, the one that a file can name
    if (micro := settings.get("per_device_train_batch_size")) is not None:
        steps = named["gradient_accumulation_steps"] = accumulation(settings, world_size)
        whole = micro * settings["gradient_accumulation_steps"] * world_size
        shown = f"--per-device-train-batch-size {micro} times {steps and steps.text}, ranks: {world_size}"
        named["train_batch_size"] = in_settings(settings, "global_batch_size") or Named(whole, shown)
    betas = [settings.get("adam_beta1"), settings.get("adam_beta2")]
    if None not in betas:
        named["optimizer.params.betas"] = Named(betas, f"--adam-beta1 {betas[0]} --adam-beta2 {betas[1]}")
    for key, setting in named.items():
        agreed(setting, in_file(written, key, source))
    for name, (section, types) in _TYPES.items():
        kind, chosen = look_up(written, f"{section}.type"), in_settings(settings, name)
        if chosen and kind not in SILENT and str(kind).lower() not in map(str.lower, types.get(chosen.value, ())):
            fitting = [value for value, kinds in types.items() if str(kind).lower() in map(str.lower, kinds)]
            instead = f"take {flag_of(name)} {fitting[0]}, or " if fitting else ""
            raise Refusal(
                f"{chosen.text} contradicts {section}.type: {json.dumps(kind)} in {source}: {instead}remove the section."
            )
        for key, value in (look_up(written, f"{section}.params") or {}).items():
            known = f"{section}.params.{key}" in named or value in _OPTIMIZER_FACTS.get(key, ())
            if value != "auto" and not (section == "optimizer" and known):
                raise Refusal(
                    f'{section}.params.{key}: {json.dumps(value)} in {source}: the {section} is the settings\': write "auto", '
                    "or remove the section."
                )


def _zero_section(written: Mapping[str, Any], stage: int, offload: str) -> dict[str, Any]:
    zero = {key: value for key, value in written.items() if not (key in _FILLED and value == "auto")}
    zero["stage"] = stage
    zero.setdefault("overlap_comm", True)  # gradients travel while backward continues; DeepSpeed's default for stage 3 alone
    for part in OFFLOADED["parameters"]:
        section = zero.pop(part, None) or {}
        if part in OFFLOADED[offload]:
            device = section.get("device")
            # Where there is no GPU, DeepSpeed's CPU accelerator pins nothing.
            zero[part] = {"pin_memory": True} | section | {"device": "cpu" if device in SILENT else device}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return zero


_BUCKETS = {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000, "stage3_prefetch_bucket_size": 50_000_000}

# Keys of `zero_optimization` that may be "auto": filled above, or DeepSpeed's default.
_FILLED = (
    *_BUCKETS, "stage", "stage3_param_persistence_threshold", "stage3_gather_16bit_weights_on_model_save", "overlap_comm",
)  # fmt: skip


def _first_auto(section: Mapping[str, Any], before: str = "") -> str | None:
    """The key of the first "auto" in a configuration, or None."""
    for key, value in section.items():
        if value == "auto":
            return before + key
        if isinstance(value, Mapping) and (found := _first_auto(value, f"{before}{key}.")):
            return found
    return None
