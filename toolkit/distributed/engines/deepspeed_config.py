"""The DeepSpeed configuration of a run: from the settings alone, or a user's own file with every "auto" filled.

A file may repeat what the settings say, and must not contradict them. The keys are those of
https://www.deepspeed.ai/docs/config-json/. Nothing here imports a heavy library.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

from toolkit.config import Refusal, show_value
from toolkit.config.conditions import momentum_of
from toolkit.config.reading import values_of
from toolkit.distributed.engines.agreement import SILENT, Said, accumulation, agreed, said_by_setting
from toolkit.distributed.engines.deepspeed_file import OFFLOADED, look_up, said_by_file


def deepspeed_config(
    config: Any,
    *,
    stage: int,
    offload: str,
    mixed_precision: str,
    written: Mapping[str, Any] | None,
    source: str,
    world_size: int,
    num_parameters: int | None = None,
) -> dict[str, Any]:
    """The complete configuration for `deepspeed.initialize`, with no "auto" left in it.

    Accumulation, clipping, optimizer and schedule are the toolkit's own, so DeepSpeed is told of one micro-batch a step,
    of no clipping and of neither of the two.

    Args:
        config: the settings of the recipe.
        stage: ZeRO stage 1 to 3; like `offload` and `mixed_precision` already agreed between settings and file.
        offload: "none", "optimizer" or "parameters".
        mixed_precision: "no" or "bf16".
        written: what `read_deepspeed_file` returned; None without a file.
        source: the file's name, for messages.
        world_size: number of ranks.
        num_parameters: of the model; fits DeepSpeed's buffers to it (see `fit_buckets`).

    Raises:
        Refusal: a value in the file contradicts a setting, has no counterpart here, or is an "auto" nobody can fill.
    """
    result = copy.deepcopy(dict(written or {}))
    for key, (value, why) in _MUST_BE.items():
        found = look_up(result, key)
        if found is not None and found != "auto" and found != value:
            instead = "remove it" if value is None else f"write {json.dumps(value)}, or remove it"
            raise Refusal(f"{key}: {json.dumps(found)} in {source}: {why}: {instead}.")
    for key, of_settings in _SHARED.items():
        agreed(of_settings(config, world_size), said_by_file(result, key, source))
    _check_optimizer(result.pop("optimizer", None) or {}, config, source)
    _check_scheduler(result.pop("scheduler", None) or {}, config, source)
    for key in ("train_batch_size", "fp16", "amp"):
        result.pop(key, None)

    result |= {
        # Where the recipe has no such setting its step is one example: DeepSpeed only wants a number for its log.
        "train_micro_batch_size_per_gpu": getattr(config, "per_device_train_batch_size", 1),
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
        raise Refusal(f'{unfilled}: "auto" in {source}: nothing here knows its value: write one, or remove it.')
    return fit_buckets(result, num_parameters) if num_parameters else result


def fit_buckets(deepspeed: Mapping[str, Any], num_parameters: int) -> dict[str, Any]:
    """The same configuration with DeepSpeed's buffers no larger than the model, where the user's file does not size them.

    DeepSpeed fills buffers of its default 5e8 elements whatever the model: on a toy model that takes longer than the step.
    """
    zero = dict(deepspeed["zero_optimization"])
    fitting = max(10_000, 1000 * -(-num_parameters // 1000))  # even: DeepSpeed aligns its buffers
    for key, default in _BUCKETS.items():
        zero.setdefault(key, min(default, fitting))
    return {**deepspeed, "zero_optimization": zero}


# -- details ---------------------------------------------------------------------------------------------------------

_BUCKETS = {
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
}

# Keys that a file may hold only with this value (None: not at all), and why.
_MUST_BE: dict[str, tuple[Any, str]] = {
    "fp16.enabled": (False, "DeepSpeed's loss scaling is not proven here yet, take --bf16"),
    "amp.enabled": (False, "NVIDIA's apex is not supported, take --bf16"),
    "torch_autocast.enabled": (False, "precision is --bf16's"),
    "bfloat16": (None, "an old name, the section is called bf16"),
    "zero_optimization.cpu_offload": (False, "an old name for an offload_optimizer section"),
    "zero_optimization.cpu_offload_param": (False, "an old name for an offload_param section"),
    "zero_optimization.compute_grad_norm": (True, "the gradient norm is logged, clipped and guarded by the toolkit"),
    "zero_optimization.zenflow": (None, "its updates lag behind the gradients"),
    "zero_optimization.offload_optimizer.ratio": (1.0, "the part that stays on the GPU would be AdamW's whatever --optim says"),
    "zero_optimization.offload_optimizer.super_offload": (False, "it replaces the optimizer, which is --optim's"),
    "zero_allow_untested_optimizer": (True, "the optimizer is the toolkit's own"),
    "zero_force_ds_cpu_optimizer": (False, "the optimizer is the toolkit's own"),
    "managed_gradient_accumulation": (True, "the step tells DeepSpeed where a batch ends"),
    "sequence_parallel_size": (1, "sequence parallelism is not supported yet"),
    "tensor_parallel": (None, "tensor parallelism is not supported yet"),
    "expert_parallel": (None, "expert parallelism is not supported yet"),
    "hybrid_engine.enabled": (False, "not supported"),
    "elasticity.enabled": (False, "the batch size is the settings', for any number of ranks"),
    "autotuning.enabled": (False, "the batch size is the settings'"),
    "data_efficiency.enabled": (False, "the order of examples is the toolkit's"),
    "curriculum_learning.enabled": (False, "the order of examples is the toolkit's"),
    "progressive_layer_drop.enabled": (False, "not supported"),
    "compression_training": (None, "not supported"),
    "communication_data_type": ("fp32", "gradients are exchanged in float32"),
    "seq_parallel_communication_data_type": ("fp32", "gradients are exchanged in float32"),
    "data_types.grad_accum_dtype": ("fp32", "gradients are added up in float32"),
    "prescale_gradients": (False, "the step has scaled the loss already"),
    "gradient_predivide_factor": (1.0, "the step has scaled the loss already"),
    "sparse_gradients": (False, "not supported"),
    "quantize_training": (None, "not supported"),
    "bf16.check_grad_overflow": (True, "a step that is not finite must change nothing"),
    "bf16.bf16_master_weights_and_grads": (False, "the weights that are trained are float32"),
    "bf16.bf16_optimizer_states": (False, "moments are float32"),
    "zero_optimization.zero_quantized_weights": (False, "not supported"),
    "zero_optimization.zero_quantized_gradients": (False, "not supported"),
    "zero_optimization.zero_quantized_nontrainable_weights": (False, "not supported"),
    "zero_optimization.zero_hpz_partition_size": (1, "not supported"),
    "zero_optimization.mics_shard_size": (-1, "not supported"),
}


def _global_batch(config: Any, world_size: int) -> Said:
    size = getattr(config, "per_device_train_batch_size", None)
    if size is None or getattr(config, "global_batch_size", None):
        return said_by_setting(config, "global_batch_size")
    steps = config.gradient_accumulation_steps
    return Said(
        size * steps * world_size,
        lambda value: f"--global-batch-size {value}",
        shown=f"--per-device-train-batch-size {size} times --gradient-accumulation-steps {steps}, ranks: {world_size}",
    )


# Keys of a file that repeat a setting.
_SHARED: dict[str, Callable[[Any, int], Said]] = {
    "train_micro_batch_size_per_gpu": lambda config, world_size: said_by_setting(config, "per_device_train_batch_size"),
    "gradient_accumulation_steps": accumulation,
    "train_batch_size": _global_batch,
    "gradient_clipping": lambda config, world_size: said_by_setting(config, "max_grad_norm"),
}

# The optimizers of a file's `optimizer` section that the toolkit has too, by its type in small letters.
_OPTIMIZERS = {
    "adamw": ("adamw_torch", "adamw_torch_fused"),
    "adam": ("adamw_torch", "adamw_torch_fused"),  # DeepSpeed's Adam is AdamW unless adam_w_mode is false
    "sgd": ("sgd",),
}
_OPTIMIZER_SETTINGS = {
    "lr": "learning_rate", "weight_decay": "weight_decay", "eps": "adam_epsilon",
}  # fmt: skip
# What the toolkit's own optimizers do; `torch_adam` and `fused` only choose an implementation.
_OPTIMIZER_FACTS = {"adam_w_mode": (True,), "bias_correction": (True,), "amsgrad": (False,), "nesterov": (False,),
                    "dampening": (0,), "torch_adam": (True, False), "fused": (True, False)}  # fmt: skip

_SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _check_optimizer(section: Mapping[str, Any], config: Any, source: str) -> None:
    """Refuse an `optimizer` section that describes another optimizer than the settings."""
    name = section.get("type", "auto")
    if name != "auto":
        same = _OPTIMIZERS.get(str(name).lower())
        chosen = values_of(config).get("optim")
        if same is None or (chosen is not None and chosen not in same):
            choice = f"take --optim {same[0]}, or " if same else ""
            raise Refusal(
                f"optimizer.type: {json.dumps(name)} in {source} contradicts --optim {chosen}: {choice}remove the section."
            )
    for key, value in (section.get("params") or {}).items():
        said = said_by_file({"optimizer": section}, f"optimizer.params.{key}", source)
        if value == "auto":
            continue
        if key == "betas":
            betas = [getattr(config, "adam_beta1", None), getattr(config, "adam_beta2", None)]
            if None not in betas:
                agreed(Said(betas, lambda pair: f"--adam-beta1 {pair[0]} --adam-beta2 {pair[1]}"), said)
        elif key == "momentum" and hasattr(config, "momentum"):
            agreed(Said(momentum_of(config), lambda value: f"--momentum {show_value(value)}"), said)
        elif key in _OPTIMIZER_SETTINGS:
            agreed(said_by_setting(config, _OPTIMIZER_SETTINGS[key]), said)
        elif value not in _OPTIMIZER_FACTS.get(key, ()):
            raise Refusal(f"{said.text}: the optimizer is --optim's: remove the section.")


def _check_scheduler(section: Mapping[str, Any], config: Any, source: str) -> None:
    """Refuse a `scheduler` section that says more than the name of the settings' own schedule."""
    name = section.get("type", "auto")
    if name != "auto":
        same, chosen = _SCHEDULES.get(name), getattr(config, "lr_scheduler_type", None)
        if same is None or (chosen is not None and chosen != same):
            choice = f"take --lr-scheduler-type {same}, or " if same else ""
            raise Refusal(
                f"scheduler.type: {json.dumps(name)} in {source} contradicts --lr-scheduler-type {chosen}: "
                f"{choice}remove the section."
            )
    for key, value in (section.get("params") or {}).items():
        if value != "auto":
            raise Refusal(
                f"scheduler.params.{key}: {json.dumps(value)} in {source}: the schedule is --lr-scheduler-type's and "
                '--warmup-steps\': write "auto", or remove the section.'
            )


def _zero_section(written: Mapping[str, Any], stage: int, offload: str) -> dict[str, Any]:
    zero = {key: value for key, value in written.items() if not (key in _FILLED and value == "auto")}
    zero["stage"] = stage
    zero.setdefault("overlap_comm", True)  # gradients travel while backward goes on; DeepSpeed's default for stage 3 alone
    for part in OFFLOADED["parameters"]:
        section = zero.pop(part, None) or {}
        if part in OFFLOADED[offload]:
            device = section.get("device")
            # Where there is no GPU, DeepSpeed's CPU accelerator pins nothing.
            zero[part] = {"pin_memory": True} | section | {"device": "cpu" if device in SILENT else device}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return zero


# Keys of `zero_optimization` for which "auto" may stand: filled above, or DeepSpeed's default.
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
