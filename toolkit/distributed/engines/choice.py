"""Which engine shards a run: chosen by the settings, by `accelerate launch`, or by a DeepSpeed configuration of the user's own.

A value that one of them names is taken. A value that two of them name differently is refused: no source outranks another.
The names of the launcher's variables are Accelerate's own (1.15: utils/launch.py, utils/dataclasses.py, state.py). Nothing
here imports a heavy library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.config import Refusal, RunConfig
from toolkit.config.reading import values_of
from toolkit.distributed.engines.deepspeed_config import complete_deepspeed, read_deepspeed_file
from toolkit.distributed.engines.named import OFFLOADED, SILENT, Named, accumulation, agreed, in_file, in_settings, look_up


@dataclass(frozen=True)
class FsdpChoice:
    """The settings of FSDP2, without the offload."""

    reshard_after_forward: bool = True  # free a layer's gathered parameters between its forward and its backward
    wrapped_layers: tuple[str, ...] = ()  # class names of the layers to shard one by one; none: the model's own list


@dataclass(frozen=True)
class EngineChoice:
    """What shards a run, and how."""

    name: Literal["plain", "zero", "fsdp"]  # plain: one device, or DDP
    zero_stage: int | None = None  # 1, 2, 3 for zero
    offload: str = "none"  # "none", "optimizer", "parameters"
    mixed_precision: str = "no"  # "no", "bf16", "fp16"
    deepspeed: dict[str, Any] | None = None  # for zero: the complete DeepSpeed configuration, no "auto" left in it
    fsdp: FsdpChoice | None = None

    @property
    def title(self) -> str:
        """For messages: ZeRO-2, FSDP2, plain."""
        return {"zero": f"ZeRO-{self.zero_stage}", "fsdp": "FSDP2"}.get(self.name, self.name)


def choose_engine(
    config: RunConfig, environment: Mapping[str, str] = os.environ, in_code: Mapping[str, Any] | None = None,
    precision: str = "no",
) -> EngineChoice:  # fmt: skip
    """The engine of a run.

    Args:
        config: a recipe's settings; groups other than RunConfig may be absent.
        environment: the variables of this rank, as `accelerate launch`, torchrun or nobody set them.
        in_code: a DeepSpeed configuration that the recipe itself made, in place of a file.
        precision: where none of them names one: "no", "bf16", or "fp16", which an engine that shards leaves out.

    Raises:
        Refusal: two of the sources name different values, or one requests what is not supported.
    """
    settings = values_of(config)
    _refuse_unsupported(environment)
    launched = _Launched(environment)
    by_zero = {
        f"--zero-stage {config.zero_stage}": config.zero_stage is not None,
        f"--deepspeed {config.deepspeed}": config.deepspeed is not None,
        "the recipe's DeepSpeedPlugin": in_code is not None,
        "DeepSpeed in the accelerate config": launched.zero,
    }
    by_fsdp = {"--fsdp": config.fsdp, "FSDP in the accelerate config": launched.fsdp}
    zero, fsdp = (next((text for text, asks in by.items() if asks), None) for by in (by_zero, by_fsdp))
    if zero and fsdp:
        raise Refusal(f"{zero} and {fsdp} are two ways to shard one run: take one of the two.")
    agreed(accumulation(settings, launched.world_size), launched.accumulation())
    _check_compilation(settings, launched)
    if zero:
        return _choose_zero(config, settings, launched, in_code, precision)
    if fsdp:
        return _choose_fsdp(config, settings, launched, precision)
    if config.offload != "none":
        raise Refusal(
            f"--offload {config.offload} has no effect where nothing is sharded: leave it out, or add --zero-stage 2 or --fsdp "
            "(which takes --offload parameters)."
        )
    return EngineChoice("plain", mixed_precision=agreed(_precision(config), launched.precision()) or precision)


# -- one engine each -------------------------------------------------------------------------------------------------


def _choose_fsdp(config: RunConfig, settings: Mapping[str, Any], launched: _Launched, precision: str) -> EngineChoice:
    fields = launched.fields if launched.fsdp else {"FSDP_VERSION": "2"}
    for variable, supported in _FSDP_FIELDS.items():
        value = fields.get(variable, "1" if variable == "FSDP_VERSION" else supported[0])
        if value.lower() not in supported:
            instead = f"write {supported[0]}" if supported[0] else "remove it"
            raise Refusal(f"{variable.lower()}: {value} in the accelerate config is not supported: {instead}.")
    if _is_true(fields, "FSDP_ACTIVATION_CHECKPOINTING") and not settings.get("gradient_checkpointing"):
        raise Refusal(
            "fsdp_activation_checkpointing: true in the accelerate config contradicts --no-gradient-checkpointing: take "
            "--gradient-checkpointing, or write false there."
        )
    if config.offload == "optimizer":
        raise Refusal(
            "--offload optimizer with FSDP: FSDP2 moves parameters, gradients and the optimizer's state together. "
            "Take --offload parameters, or --zero-stage 2 for the state alone."
        )
    layers = fields.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    return EngineChoice(
        "fsdp",
        offload="parameters" if config.offload == "parameters" or _is_true(fields, "FSDP_OFFLOAD_PARAMS") else "none",
        mixed_precision=_sharded_precision("FSDP", precision, _precision(config), launched.precision()),
        fsdp=FsdpChoice(
            reshard_after_forward=_is_true(fields, "FSDP_RESHARD_AFTER_FORWARD", default="true"),
            wrapped_layers=tuple(name.strip() for name in layers.split(",") if name.strip()),
        ),
    )


def _choose_zero(
    config: RunConfig, settings: Mapping[str, Any], launched: _Launched, in_code: Mapping[str, Any] | None, precision: str
) -> EngineChoice:
    there = launched.text("ACCELERATE_DEEPSPEED_CONFIG_FILE", "deepspeed_config_file") if launched.zero else None
    files = in_settings(settings, "deepspeed"), there
    agreed(*(each and each._replace(value=os.path.realpath(os.path.expanduser(each.value))) for each in files))
    path = next((each.value for each in files if each), None)
    if path and in_code is not None:
        raise Refusal(f"{path} and the recipe's DeepSpeedPlugin both configure DeepSpeed: take one of the two.")
    source = path or "the recipe's DeepSpeedPlugin"
    written = read_deepspeed_file(path) if path else dict(in_code or {})
    stage = agreed(
        in_settings(settings, "zero_stage"),
        _of_stage(launched.number("ACCELERATE_DEEPSPEED_ZERO_STAGE", "zero_stage", int)),
        _of_stage(in_file(written, "zero_optimization.stage", source)),
    )
    if stage is None and path:
        raise Refusal(f"{path} has no zero_optimization.stage: write one there, or add --zero-stage 1, 2 or 3.")
    stage = stage or 2  # Accelerate's default
    offload = _zero_offload(config, launched, written, source)
    if offload == "parameters" and stage < 3:
        raise Refusal(
            f"--offload parameters with ZeRO stage {stage}: parameters are sharded from stage 3 on. Take --zero-stage 3, or "
            "--offload optimizer."
        )
    half, brain = in_file(written, "fp16.enabled", source), in_file(written, "bf16.enabled", source)
    precision = _sharded_precision(
        "ZeRO", precision, _precision(config), launched.precision(), half and half.value and half._replace(value="fp16"),
        brain and brain._replace(value="bf16" if brain.value else "no"),
    )  # fmt: skip
    agreed(in_settings(settings, "max_grad_norm"), launched.number("ACCELERATE_GRADIENT_CLIPPING", "gradient_clipping", float))
    complete = complete_deepspeed(
        settings, stage=stage, offload=offload, mixed_precision=precision, written=written, source=source,
        world_size=launched.world_size,
    )  # fmt: skip
    return EngineChoice("zero", zero_stage=stage, offload=offload, mixed_precision=precision, deepspeed=complete)


def _of_stage(named: Named | None) -> Named | None:
    if named and named.value not in (1, 2, 3):
        raise Refusal(
            f"{named.text}: the stages of ZeRO are 1, 2 and 3; for 0, plain data parallelism, run without DeepSpeed (remove "
            "--deepspeed)."
        )
    return named


def _zero_offload(config: RunConfig, launched: _Launched, written: Mapping[str, Any], source: str) -> str:
    """What is offloaded; where accelerate config and file both name the devices, these must be the same."""
    there = {part: launched.device(part) for part in OFFLOADED["parameters"]}
    in_there = {part: in_file(written, f"zero_optimization.{part}.device", source) for part in OFFLOADED["parameters"]}
    for part, device in there.items():
        agreed(device, in_there[part])
    typed = Named(config.offload, f"--offload {config.offload}") if config.offload != "none" else None
    offload = agreed(typed, _offload_of(there), _offload_of(in_there)) or "none"
    for part in OFFLOADED[offload]:
        if look_up(written, f"zero_optimization.{part}.device") == "none":
            raise Refusal(f'--offload {offload} contradicts zero_optimization.{part}.device: "none" in {source}: remove one.')
    return offload


def _offload_of(devices: Mapping[str, Named | None]) -> Named | None:
    """What one source offloads, in the words of --offload, whatever the devices."""
    named = [each for each in devices.values() if each]
    if devices["offload_param"] and not devices["offload_optimizer"]:
        raise Refusal(
            f"{named[0].text}: parameters are offloaded only together with the optimizer's state. Name a device for "
            "offload_optimizer next to it."
        )
    text = " and ".join(each.text for each in named)
    return Named("parameters" if devices["offload_param"] else "optimizer", text) if named else None


def _precision(config: RunConfig) -> Named | None:
    if config.fp16:
        return Named("fp16", "--fp16")
    if config.bf16 is None:  # float8 takes the place of products in bfloat16
        in_float8 = in_settings(values_of(config), "fp8")
        return in_float8 and in_float8._replace(value="bf16")
    return Named("bf16", "--bf16") if config.bf16 else Named("no", "--no-bf16")


def _sharded_precision(engine: str, unnamed: str, *sources: Named | None) -> str:
    for named in sources:
        if named and named.value == "fp16":
            raise Refusal(f"{named.text} with {engine}: its loss scaling is not proven here yet. Take --bf16.")
    return agreed(*sources) or ("no" if unnamed == "fp16" else unnamed)


# -- what the launcher has set ---------------------------------------------------------------------------------------


class _Launched:
    """What `accelerate launch` has set; the variables of an engine that is off are ignored."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.fields = environment
        self.zero, self.fsdp = (_is_true(environment, f"ACCELERATE_USE_{name}") for name in ("DEEPSPEED", "FSDP"))
        self.world_size = int(environment.get("WORLD_SIZE", "1"))

    def text(self, variable: str, key: str) -> Named | None:
        value = self.fields.get(variable)
        return None if value in SILENT else Named(value, f"{key}: {value} in the accelerate config")

    def number(self, variable: str, key: str, kind: Callable[[str], float]) -> Named | None:
        found = self.text(variable, key) if self.zero or variable == _ACCUMULATION else None
        try:
            return found and found._replace(value=kind(found.value))
        except ValueError:
            raise Refusal(f"{found and found.text}: must be a number.") from None

    def accumulation(self) -> Named | None:
        found = self.number(_ACCUMULATION, "gradient_accumulation_steps", int)
        return None if found and found.value == 1 else found  # 1 is what `accelerate config` writes by itself

    def precision(self) -> Named | None:
        found = self.text("ACCELERATE_MIXED_PRECISION", "mixed_precision")
        # "no" is what `accelerate launch` fills in where the file names none
        return None if found is None or found.value.lower() == "no" else found._replace(value=found.value.lower())

    def device(self, part: str) -> Named | None:
        found = self.text(f"ACCELERATE_DEEPSPEED_{part.upper()}_DEVICE", f"{part}_device") if self.zero else None
        if found and found.value == "nvme":
            raise Refusal(
                f"{found.text}: accelerate launch does not hand on the path that belongs to it. Write a DeepSpeed file with "
                f'"{part}": {{"device": "nvme", "nvme_path": "/path"}} in zero_optimization, and give it with --deepspeed.'
            )
        return found


def _check_compilation(settings: Mapping[str, Any], launched: _Launched) -> None:
    backend = launched.fields.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    chosen = settings.get("torch_compile_backend") if settings.get("torch_compile") else "no"
    if backend not in ("no", chosen):
        ours = f"--torch-compile-backend {chosen}" if chosen != "no" else "--no-torch-compile"
        raise Refusal(
            f"{ours} contradicts dynamo_backend: {backend} in the accelerate config: write 'no' there, or take --torch-compile "
            f"--torch-compile-backend {backend}."
        )


def _refuse_unsupported(environment: Mapping[str, str]) -> None:
    """Refuse what Accelerate can be configured for and the toolkit has not proven."""
    if _is_true(environment, "ACCELERATE_USE_MEGATRON_LM"):
        raise Refusal("Megatron-LM in the accelerate config is not supported yet. Choose DeepSpeed, FSDP or MULTI_GPU there.")
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", "bf16", "fp16"):
        also = ", and take --fp8 rowwise" if precision == "fp8" else ""
        raise Refusal(f"mixed_precision: {precision} in the accelerate config is not supported yet. Write bf16 there{also}.")
    if _is_true(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        for variable, size in environment.items():
            if variable.startswith("PARALLELISM_CONFIG_") and variable.endswith("_SIZE") and size != "1":
                raise Refusal(
                    f"{variable.lower()}: {size} in the accelerate config: tensor, context and sequence parallelism and device "
                    "meshes are not supported yet. Remove parallelism_config there."
                )


_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"

# FSDP fields with the values that are supported, in small letters.
_FSDP_FIELDS = {
    "FSDP_VERSION": ("2",),
    "FSDP_AUTO_WRAP_POLICY": ("transformer_based_wrap",),
    "FSDP_RESHARD_AFTER_FORWARD": ("true", "false"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("false",),
    "FSDP_IGNORED_MODULES": ("", "none"),
}


def _is_true(environment: Mapping[str, str], variable: str, default: str = "false") -> bool:
    return environment.get(variable, default).lower() in ("true", "1", "yes", "on", "y", "t")
