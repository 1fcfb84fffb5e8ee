"""A user's own DeepSpeed configuration, as it is written: reading it, and what it says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from toolkit.config import Refusal
from toolkit.config.parsing import parse_json, read_text_file
from toolkit.distributed.engines.agreement import SILENT, Said

OFFLOADED = {"none": (), "optimizer": ("offload_optimizer",), "parameters": ("offload_optimizer", "offload_param")}

_SECTIONS = (
    "zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "bf16", "fp16", "optimizer",
    "optimizer.params", "scheduler", "scheduler.params",
)  # fmt: skip


# Sections and keys at the top of a configuration (deepspeed.ai/docs/config-json, DeepSpeed 0.19).
KNOWN_KEYS = frozenset({
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "compression_training", "csv_monitor", "curriculum_learning", "data_efficiency",
    "data_types", "dataloader_drop_last",
    "disable_allgather", "dump_state", "elasticity", "eigenvalue", "flops_profiler", "fp16", "gradient_accumulation_steps",
    "gradient_clipping", "gradient_predivide_factor", "graph_harvesting", "hybrid_engine", "memory_breakdown", "monitor_config",
    "nebula", "optimizer", "pld_enabled", "prescale_gradients", "progressive_layer_drop", "quantize_training", "scheduler",
    "seq_parallel_communication_data_type", "sequence_parallel_size", "sparse_attention", "sparse_gradients", "steps_per_print",
    "tensor_parallel", "tensorboard", "timers", "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu",
    "use_data_before_expert_parallelism", "use_node_local_storage", "wall_clock_breakdown", "wandb", "weight_quantization",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
})  # fmt: skip


def said_by_file(written: Mapping[str, Any] | None, key: str, source: str) -> Said:
    """What a DeepSpeed file says under a key such as `zero_optimization.stage`."""
    return Said(look_up(written or {}, key), lambda value: f"{key}: {json.dumps(value)}", f" in {source}")


def read_deepspeed_file(path: str) -> dict[str, Any]:
    """The content of a DeepSpeed configuration file.

    Raises:
        Refusal: no such file, not readable, no JSON object, a key that stands there twice, or a section that is none.
    """
    written = parse_json(read_text_file(path, f"DeepSpeed configuration {path}"), path, is_file=True)
    if not isinstance(written, dict):
        raise Refusal(f'{path}: must hold one JSON object, such as {{"zero_optimization": {{"stage": 2}}}}.')
    for key in _SECTIONS:
        section = look_up(written, key)
        if section is not None and not isinstance(section, dict):
            raise Refusal(f"{key}: {json.dumps(section)} in {path}: must be a section in braces.")
    return written


def precision_of_file(written: Mapping[str, Any] | None, source: str) -> Said:
    """The mixed precision that a DeepSpeed file asks for: bf16, fp16, or "no" where it turns bf16 off."""
    half, brain = look_up(written or {}, "fp16.enabled"), look_up(written or {}, "bf16.enabled")
    value = "fp16" if half is True else "bf16" if brain is True else "no" if brain is False else None
    words = {"bf16": "bf16.enabled: true", "fp16": "fp16.enabled: true", "no": "bf16.enabled: false"}
    return Said(value, words.__getitem__, f" in {source}")


def offload_of_file(written: Mapping[str, Any] | None, source: str) -> Said:
    """What a DeepSpeed file offloads, in the words of --offload, whatever the device.

    Raises:
        Refusal: parameters without the optimizer's state: --offload has no word for it.
    """
    zero = (written or {}).get("zero_optimization") or {}
    parts = [part for part in OFFLOADED["parameters"] if (zero.get(part) or {}).get("device") not in SILENT]
    if parts == ["offload_param"]:
        raise Refusal(
            f"zero_optimization.offload_param in {source}: parameters are offloaded only together with the optimizer's state. "
            'Write "offload_optimizer": {"device": "cpu"} beside it.'
        )
    value = "parameters" if "offload_param" in parts else "optimizer" if parts else None
    words = {level: " and ".join(f"zero_optimization.{part}" for part in parts) for level, parts in OFFLOADED.items()}
    words["none"] = "no offload"
    return Said(value, words.__getitem__, f" in {source}")


def look_up(written: Any, key: str) -> Any:
    """The value under a key such as `zero_optimization.stage`, None where there is none."""
    for name in key.split("."):
        if not isinstance(written, Mapping):
            return None
        written = written.get(name)
    return written
