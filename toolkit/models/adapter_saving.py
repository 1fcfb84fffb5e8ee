"""The directory of an adapter as it is written: on top of the base as it was published, or with a base that was made here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.config.conditions import STARTS_ON_THE_BASE
from toolkit.models.adapter_files import BASE, MODEL_CONFIG, read_adapter_config
from toolkit.models.loaded import loaded

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

_PREFIX = "base_model.model."


def save_adapter(model: PeftModel, directory: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write what was trained, in the form that goes on top of the base as it was published.

    A base that was made here, which no one could load, is written into the folder `base` of the directory.

    Args:
        model: peft's.
        state: all its tensors by name, whole; a tied one under its first name.
    """
    state = {**state, **_tied(model, state)}
    model.save_pretrained(str(directory), state_dict=dict(state), save_embedding_layers=False)
    model.config.to_json_file(directory / MODEL_CONFIG)
    base: Any = model.get_base_model()
    if base.config.is_encoder_decoder and base.can_generate():
        base.generation_config.save_pretrained(directory)
    _in_one_order(directory, model.peft_config["default"])
    initial = loaded(model).initial_adapter
    if initial:
        _add_initial(directory, initial)
    if not model.peft_config["default"].base_model_name_or_path:
        base.save_pretrained(directory / BASE, state_dict=_base_state(model, state, initial))


def initial_adapter(adapted: PeftModel, init_lora_weights: str) -> dict[str, torch.Tensor]:
    """Copies of the first A and B where they were taken out of the frozen weights, which are others since then.

    PiSSA (https://arxiv.org/abs/2404.02948) and OLoRA (https://arxiv.org/abs/2406.01775) leave W - s B0 A0 of a weight W.
    """
    if init_lora_weights in STARTS_ON_THE_BASE:
        return {}
    parts = (".lora_A.default.weight", ".lora_B.default.weight")
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in adapted.named_parameters() if name.endswith(parts)}


def _tied(model: PeftModel, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under the other names of tied parameters, which peft looks for too."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {
        name: state[first[id(parameter)]] for name, parameter in every if name not in state and first[id(parameter)] in state
    }


def _in_one_order(directory: Path, settings: PeftConfig) -> None:
    """Sort what peft (0.21.2) keeps as sets, which it writes in the order of the process: the same adapter, the same file."""
    written = read_adapter_config(directory)
    sets = {name for name, value in vars(settings).items() if isinstance(value, set)}
    written |= {name: sorted(written[name]) for name in sets.intersection(written)}
    (directory / "adapter_config.json").write_text(json.dumps(written, indent=2, sort_keys=True), encoding="utf-8")


def _add_initial(directory: Path, initial: Mapping[str, torch.Tensor]) -> None:
    """Make an adapter of W - s B0 A0 one of W: W - s B0 A0 + s B A = W + s [B, -B0] [A; A0], of twice the rank.

    With alpha twice as large (sqrt(2) times for rsLoRA) s stays what it was.
    """
    from safetensors.torch import load_file, save_file

    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, first in initial.items():
        key = name.replace(".default.", ".")
        is_a, first = ".lora_A." in name, first.to(tensors[key].dtype)
        tensors[key] = torch.cat([tensors[key], first if is_a else -first], dim=0 if is_a else 1).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    settings = read_adapter_config(directory)
    factor = math.sqrt(2) if settings["use_rslora"] else 2
    settings |= {"r": 2 * settings["r"], "lora_alpha": factor * settings["lora_alpha"], "init_lora_weights": True}
    settings["rank_pattern"] = {pattern: 2 * rank for pattern, rank in settings["rank_pattern"].items()}
    settings["alpha_pattern"] = {pattern: factor * alpha for pattern, alpha in settings["alpha_pattern"].items()}
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")


def _base_state(
    model: PeftModel, state: Mapping[str, torch.Tensor], initial: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of the base before the adapter, under their own names."""
    plain = {}
    for name, tensor in state.items():
        own = any(part in name for part in (".lora_", ".modules_to_save.", ".token_adapter."))
        if name.startswith(_PREFIX) and not own:
            short = name.removeprefix(_PREFIX)
            if f"{_PREFIX}{short.replace('.base_layer.weight', '.lora_A.default.weight')}" in initial:
                stem = name.removesuffix(".base_layer.weight")
                tensor = tensor + _taken_out(model, stem, initial).to(tensor)
            plain[short.replace(".base_layer.", ".").replace(".original_module.", ".")] = tensor
    return plain


def _taken_out(model: PeftModel, stem: str, initial: Mapping[str, torch.Tensor]) -> torch.Tensor:
    layer: Any = model.get_submodule(stem)
    a, b = (initial[f"{stem}.lora_{part}.default.weight"] for part in "AB")
    update = layer.scaling["default"] * b @ a
    return update.T if layer.fan_in_fan_out else update
