"""Which engine shards a run: from the settings, and from what `accelerate launch` told its ranks.

What only one of the two says is honored; what both say, and say differently, is refused with both values and both places.
The names of the launcher's variables are Accelerate's own (1.15: utils/launch.py, utils/dataclasses.py, state.py). Nothing
here imports a heavy library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.config import Refusal, show_value
from toolkit.distributed.engines.agreement import SILENT, Said, accumulation, agreed, said_by_setting
from toolkit.distributed.engines.deepspeed_config import deepspeed_config
from toolkit.distributed.engines.deepspeed_file import (
    OFFLOADED,
    look_up,
    offload_of_file,
    precision_of_file,
    read_deepspeed_file,
    said_by_file,
)


@dataclass(frozen=True)
class FsdpChoice:
    """What FSDP2 is told beside the offload."""

    reshard_after_forward: bool = True  # free a layer's gathered parameters between its forward and its backward
    wrapped_layers: tuple[str, ...] = ()  # class names of the layers to shard one by one; none: the model's own list


@dataclass(frozen=True)
class EngineChoice:
    """What shards a run, and how."""

    name: str  # "none" (one device, or DDP), "zero", "fsdp"
    zero_stage: int | None = None  # 1, 2, 3 for zero
    offload: str = "none"  # "none", "optimizer", "parameters"
    mixed_precision: str = "no"  # "no", "bf16", "fp16"
    deepspeed: dict[str, Any] | None = None  # for zero: the complete DeepSpeed configuration, no "auto" left in it
    fsdp: FsdpChoice | None = None


def choose_engine(
    config: Any, environment: Mapping[str, str] = os.environ, in_code: Mapping[str, Any] | None = None
) -> EngineChoice:
    """The engine of a run.

    Args:
        config: a recipe's settings; groups it lacks say nothing.
        environment: the variables of this rank, as `accelerate launch`, torchrun or nobody set them.
        in_code: a DeepSpeed configuration that the recipe itself made, in place of a file.

    Raises:
        Refusal: settings, the accelerate config and a DeepSpeed file contradict each other, or ask for what is not
            supported.
    """
    _refuse_unsupported(environment)
    asked = _asked_for(config, environment, in_code)
    engine = _choose_zero(config, environment, in_code) if asked == "zero" else _CHOICES[asked](config, environment)
    agreed(accumulation(config, _world_size(environment)), _accumulation_of_launcher(environment))
    _check_compilation(config, environment)
    return engine


# -- one engine each -------------------------------------------------------------------------------------------------


def _asked_for(config: Any, environment: Mapping[str, str], in_code: Mapping[str, Any] | None) -> str:
    """none, zero or fsdp."""
    stage, file = getattr(config, "zero_stage", None), getattr(config, "deepspeed", None)
    asked = {
        f"--zero-stage {stage}": stage is not None and "zero",
        f"--deepspeed {file}": file is not None and "zero",
        "the recipe's DeepSpeedPlugin": in_code is not None and "zero",
        "DeepSpeed in the accelerate config": _is_true(environment, "ACCELERATE_USE_DEEPSPEED") and "zero",
        "--fsdp": getattr(config, "fsdp", False) and "fsdp",
        "FSDP in the accelerate config": _is_true(environment, "ACCELERATE_USE_FSDP") and "fsdp",
    }
    by = {engine: text for text, engine in reversed(asked.items()) if engine}
    if len(by) == 2:
        raise Refusal(f"{by['zero']} and {by['fsdp']} are two ways to shard one run: give one of the two.")
    return str(next(iter(by), "none"))


def _choose_none(config: Any, environment: Mapping[str, str]) -> EngineChoice:
    offload = getattr(config, "offload", "none")
    if offload != "none":
        raise Refusal(
            f"--offload {offload} has no effect where nothing is sharded: leave it out, or add --zero-stage 2 or --fsdp "
            "(which takes --offload parameters)."
        )
    return EngineChoice("none", mixed_precision=_precision(config, environment))


def _choose_fsdp(config: Any, environment: Mapping[str, str]) -> EngineChoice:
    launched = _is_true(environment, "ACCELERATE_USE_FSDP")
    fields = environment if launched else {}
    for variable, (supported, key, advice) in _FSDP_FIELDS.items():
        value = fields.get(variable)
        if value is not None and value.lower() not in supported:
            raise Refusal(f"{key}: {value} in the accelerate config: {advice}.")
    if launched and fields.get("FSDP_VERSION", "1") != "2":
        raise Refusal("FSDP version 1 in the accelerate config: version 2 is supported. Write fsdp_version: 2 in fsdp_config.")
    if _is_true(fields, "FSDP_ACTIVATION_CHECKPOINTING") and not getattr(config, "gradient_checkpointing", False):
        raise Refusal(
            "fsdp_activation_checkpointing: true in the accelerate config contradicts --no-gradient-checkpointing: take "
            "--gradient-checkpointing, or write fsdp_activation_checkpointing: false in the accelerate config."
        )
    offload = said_by_setting(config, "offload")
    if offload.value == "optimizer":
        raise Refusal(
            "--offload optimizer with FSDP: FSDP2 moves parameters, gradients and the optimizer's state together. "
            "Take --offload parameters, or --zero-stage 2 for the state alone."
        )
    layers = fields.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    return EngineChoice(
        "fsdp",
        offload="parameters" if offload.value == "parameters" or _is_true(fields, "FSDP_OFFLOAD_PARAMS") else "none",
        mixed_precision=_precision(config, environment, engine="FSDP"),
        fsdp=FsdpChoice(
            reshard_after_forward=fields.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false",
            wrapped_layers=tuple(name.strip() for name in layers.split(",") if name.strip()),
        ),
    )


def _choose_zero(config: Any, environment: Mapping[str, str], in_code: Mapping[str, Any] | None) -> EngineChoice:
    fields = environment if _is_true(environment, "ACCELERATE_USE_DEEPSPEED") else {}
    path = _deepspeed_file(config, fields)
    if path and in_code is not None:
        raise Refusal(
            f"--deepspeed {path} and the recipe's DeepSpeedPlugin both configure DeepSpeed: a recipe without one, such as "
            "accelerated, takes the file."
        )
    written = read_deepspeed_file(path) if path else in_code
    source = path or "the recipe's DeepSpeedPlugin"
    stage = _zero_stage(
        said_by_setting(config, "zero_stage"),
        _said_by_launcher(fields, "ACCELERATE_DEEPSPEED_ZERO_STAGE", "zero_stage", int),
        said_by_file(written, "zero_optimization.stage", source),
        path,
    )
    offload = _zero_offload(config, fields, written, source)
    for part in OFFLOADED[offload]:
        if look_up(written or {}, f"zero_optimization.{part}.device") == "none":
            raise Refusal(
                f'--offload {offload} contradicts zero_optimization.{part}.device: "none" in {source}: take --offload none, or '
                'write "cpu" there.'
            )
    if offload == "parameters" and stage < 3:
        raise Refusal(
            f"--offload parameters with ZeRO stage {stage}: parameters are sharded from stage 3 on. Take --zero-stage 3, or "
            "--offload optimizer."
        )
    precision = _precision(config, environment, precision_of_file(written, source), engine="ZeRO")
    agreed(said_by_setting(config, "max_grad_norm"),
           _said_by_launcher(fields, "ACCELERATE_GRADIENT_CLIPPING", "gradient_clipping", float))  # fmt: skip
    complete = deepspeed_config(
        config, stage=stage, offload=offload, mixed_precision=precision, written=written, source=source,
        world_size=_world_size(environment),
    )  # fmt: skip
    return EngineChoice("zero", zero_stage=stage, offload=offload, mixed_precision=precision, deepspeed=complete)


_CHOICES: dict[str, Callable[[Any, Mapping[str, str]], EngineChoice]] = {"none": _choose_none, "fsdp": _choose_fsdp}


# -- parts of the choice ---------------------------------------------------------------------------------------------


def _precision(config: Any, environment: Mapping[str, str], *of_file: Said, engine: str = "") -> str:
    """The mixed precision of settings, accelerate config and DeepSpeed file; fp16 only where nothing is sharded."""
    typed = "bf16" if getattr(config, "bf16", False) else "fp16" if getattr(config, "fp16", False) else None
    flags = {"bf16": "--bf16", "fp16": "--fp16", "no": "--no-bf16"}
    launched = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    said = (
        Said(typed, flags.__getitem__),
        # "no" is what `accelerate launch` fills in where nobody said anything
        Said(None if launched == "no" else launched, lambda value: f"mixed_precision: {value}", _THERE),
        *of_file,
    )
    for each in said:
        if engine and each.value == "fp16":
            raise Refusal(f"{each.text} with {engine}: its loss scaling is not proven here yet. Take --bf16.")
    return agreed(*said) or "no"


def _deepspeed_file(config: Any, fields: Mapping[str, str]) -> str | None:
    """The path of the user's DeepSpeed file as it was written."""
    typed = said_by_setting(config, "deepspeed")
    launched = _said_by_launcher(fields, "ACCELERATE_DEEPSPEED_CONFIG_FILE", "deepspeed_config_file", str)
    paths = [said.value for said in (typed, launched) if said.value]
    if len({os.path.realpath(os.path.expanduser(path)) for path in paths}) > 1:
        agreed(typed, launched)
    return paths[0] if paths else None


def _zero_stage(typed: Said, launched: Said, in_file: Said, path: str | None) -> int:
    for said in (launched, in_file):
        if said.value == 0:
            raise Refusal(
                f"{said.text}: that is plain data parallelism. Take stage 1, 2 or 3, or run without DeepSpeed"
                f"{' (remove --deepspeed)' if said is in_file else ''}."
            )
        if said.value not in (None, "auto", 1, 2, 3):
            raise Refusal(f"{said.text}: the stages of ZeRO are 1, 2 and 3.")
    stage = agreed(typed, launched, in_file)
    if stage is None and path:
        raise Refusal(f"{path} says no zero_optimization.stage: write one there, or add --zero-stage 1, 2 or 3.")
    return 2 if stage is None else int(stage)  # Accelerate's default


def _zero_offload(config: Any, fields: Mapping[str, str], written: Mapping[str, Any] | None, source: str) -> str:
    """What is offloaded, by settings, accelerate config and file; the last two must agree on the devices as well."""
    devices = {}
    for part, key in _OFFLOAD_FIELDS.items():
        device = _said_by_launcher(fields, f"ACCELERATE_DEEPSPEED_{key.upper()}", key, str.lower)
        if device.value == "nvme":
            raise Refusal(
                f"{device.text}: accelerate launch does not hand on the path that belongs to it. Write a DeepSpeed file with "
                f'"{part}": {{"device": "nvme", "nvme_path": "/path"}} in zero_optimization, and give it with --deepspeed.'
            )
        agreed(device, said_by_file(written, f"zero_optimization.{part}.device", source))
        devices[part] = device
    optimizer, parameters = (said.value not in SILENT for said in devices.values())
    if parameters and not optimizer:
        raise Refusal(
            f"{devices['offload_param'].text}: parameters are offloaded only together with the optimizer's state. Write "
            "offload_optimizer_device: cpu beside it."
        )
    words = {"optimizer": "offload_optimizer_device: cpu alone", "parameters": "offload_param_device: cpu"}
    launched = Said("parameters" if parameters else "optimizer" if optimizer else None, words.__getitem__, _THERE)
    return agreed(said_by_setting(config, "offload"), launched, offload_of_file(written, source)) or "none"


def _accumulation_of_launcher(environment: Mapping[str, str]) -> Said:
    said = _said_by_launcher(environment, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "gradient_accumulation_steps", int)
    return said._replace(value=None) if said.value == 1 else said  # 1 is what `accelerate config` writes by itself


def _check_compilation(config: Any, environment: Mapping[str, str]) -> None:
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend == "no":
        return
    if not getattr(config, "torch_compile", False):
        raise Refusal(
            f"dynamo_backend: {backend} in the accelerate config contradicts --no-torch-compile: take --torch-compile, or "
            "write dynamo_backend: 'no' in the accelerate config."
        )
    if backend != config.torch_compile_backend:
        raise Refusal(
            f"dynamo_backend: {backend} in the accelerate config: layers are compiled with {config.torch_compile_backend}. "
            "Write that, or take another --torch-compile-backend."
        )


def _refuse_unsupported(environment: Mapping[str, str]) -> None:
    """Refuse what Accelerate can be configured for and the toolkit has not proven."""
    if _is_true(environment, "ACCELERATE_USE_MEGATRON_LM"):
        raise Refusal("Megatron-LM in the accelerate config is not supported yet. Choose DeepSpeed, FSDP or MULTI_GPU there.")
    if environment.get("ACCELERATE_MIXED_PRECISION", "no").lower() not in ("no", "bf16", "fp16"):
        raise Refusal(
            f"mixed_precision: {environment['ACCELERATE_MIXED_PRECISION']} in the accelerate config is not supported yet. "
            "Write bf16 there, or take --bf16."
        )
    if not _is_true(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return
    for key, what in _PARALLELISM.items():
        size = environment.get(f"PARALLELISM_CONFIG_{key.upper()}", "1")
        if size != "1":
            raise Refusal(
                f"parallelism_config_{key}: {size} in the accelerate config: {what} is not supported yet. Remove "
                "parallelism_config there."
            )


_THERE = " in the accelerate config"

_OFFLOAD_FIELDS = {"offload_optimizer": "offload_optimizer_device", "offload_param": "offload_param_device"}

_PARALLELISM = {
    "tp_size": "tensor parallelism",
    "cp_size": "context parallelism",
    "sp_size": "sequence parallelism",
    "dp_replicate_size": "replicating shards (hybrid sharding)",
    "dp_shard_size": "a device mesh of one's own",
}

# FSDP fields with the values that are supported (small letters), their name in the accelerate config, and what to do.
_FSDP_FIELDS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "FSDP_AUTO_WRAP_POLICY": (
        ("transformer_based_wrap",), "fsdp_auto_wrap_policy",
        "layers are wrapped by their class. Write TRANSFORMER_BASED_WRAP",
    ),
    "FSDP_RESHARD_AFTER_FORWARD": (
        ("true", "false"), "fsdp_reshard_after_forward", "FSDP2 takes true or false there. Write true for full sharding",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (
        ("false",), "fsdp_activation_checkpointing_offload", "not supported yet. Write false, or remove it",
    ),
    "FSDP_IGNORED_MODULES": (("", "none"), "fsdp_ignored_modules", "not supported yet. Remove it"),
}  # fmt: skip


def _is_true(environment: Mapping[str, str], variable: str) -> bool:
    return environment.get(variable, "false").lower() in ("true", "1", "yes", "on", "y", "t")


def _world_size(environment: Mapping[str, str]) -> int:
    return int(environment.get("WORLD_SIZE", "1"))


def _said_by_launcher(fields: Mapping[str, str], variable: str, key: str, kind: Callable[[str], Any]) -> Said:
    """What the accelerate config says under a key, from the variable by which its launcher hands it on."""
    raw: Any = fields.get(variable)
    try:
        value = None if raw in SILENT else kind(raw)
    except ValueError:
        raise Refusal(f"{key}: {raw} in the accelerate config: must be a number.") from None
    return Said(value, lambda value: f"{key}: {show_value(value)}", _THERE)
