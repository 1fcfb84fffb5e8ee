"""The directory of an adapter: what is written into it, and the base model that it belongs on."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit.config import Refusal
from toolkit.config.conditions import is_adapter

BASE = "base"  # the folder for a base that stands nowhere else
# The settings of the adapted model, under a name of its own: with a config.json a directory is taken for a whole model.
MODEL_CONFIG = "model_config.json"
_PREFIX = "base_model.model."
# peft imports bitsandbytes where that is installed, and on a CPU that one recommends a package for inference, of no use here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def is_adapted(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def save_adapter(model: Any, directory: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write what was trained, in the form that goes on top of the base as it was published.

    A base that was made here, which no one could load, is written into the folder `base` of the directory.

    Args:
        model: peft's.
        state: all its tensors by name, whole; a tied one under its first name.
    """
    state = {**state, **_tied(model, state)}
    model.save_pretrained(directory, state_dict=dict(state), save_embedding_layers=False)
    model.config.to_json_file(directory / MODEL_CONFIG)
    initial = getattr(model, "initial_adapter", {})
    if initial:
        _add_initial(directory, initial)
    if not model.peft_config["default"].base_model_name_or_path:
        model.get_base_model().save_pretrained(directory / BASE, state_dict=_base_state(model, state, initial))


def base_of(directory: str | Path) -> tuple[str, str | None]:
    """Name (or directory) and revision of the model that an adapter belongs on.

    Raises:
        Refusal: adapter_config.json cannot be read, or names a directory that is gone.
    """
    directory = Path(directory).expanduser()
    settings = read_adapter_config(directory)
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not name and (directory / BASE / "config.json").exists():
        return str(directory / BASE), None
    if not name:
        raise Refusal(f"{directory}/adapter_config.json: base_model_name_or_path is empty. Write the base model's name there.")
    if os.path.isabs(name) and not os.path.isdir(name):
        raise Refusal(
            f"{directory}: its base model was {name}, which is gone. Put it back, or write its new place into "
            "base_model_name_or_path of adapter_config.json."
        )
    return name, None if os.path.isdir(name) else revision


def base_of_adapter(model: str | None) -> dict[str, str | None] | None:
    """For a run card: name and revision of the base, where `model` is the directory of an adapter; None where it isn't."""
    if not model or not is_adapter(model):
        return None
    name, revision = base_of(model)
    return {"name": name, "revision": revision}


def warning_of_base(base: str | None, model: str | Path) -> str | None:
    """What to say before an adapter is sent to others whose base they haven't: a directory of this machine. None otherwise.

    Args:
        base: base_model_name_or_path of the adapter; empty where the base is sent along.
        model: the adapter's directory.
    """
    if not base or not (os.path.isabs(base) or os.path.isdir(base)):
        return None
    return (
        f"WARNING: the adapter's base is {base}, a directory of this machine: nobody else can load the adapter. Send a whole "
        f"model: toolkit merge {model} --into DIR, then toolkit push DIR. Or push the base first, and name it: in "
        "base_model_name_or_path of adapter_config.json, or with --model when you train"
    )


def settings_of_base(config: Any) -> Any:
    """A recipe's settings with the base in the place of the adapter that `--model` names.

    Raises:
        Refusal: adapters are not what the settings train, or the base cannot be told.
    """
    if not getattr(config, "use_peft", False):
        raise Refusal(
            f"--model {config.model}: is an adapter. Train it further with recipes/lora.py, or make a model of it: "
            f"toolkit merge {config.model} --into DIR"
        )
    name, revision = base_of(config.model)
    return dataclasses.replace(config, model=name, model_revision=revision)


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """adapter_config.json as it stands."""
    path = directory / "adapter_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}: can't be read: {error}") from error
    if not isinstance(settings, dict):
        raise Refusal(f"{path}: holds no JSON object.")
    return settings


def _tied(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under the other names of tied parameters, which peft looks for too."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {
        name: state[first[id(parameter)]] for name, parameter in every if name not in state and first[id(parameter)] in state
    }


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


def _base_state(model: Any, state: Mapping[str, torch.Tensor], initial: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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


def _taken_out(model: Any, stem: str, initial: Mapping[str, torch.Tensor]) -> torch.Tensor:
    layer = model.get_submodule(stem)
    a, b = (initial[f"{stem}.lora_{part}.default.weight"] for part in "AB")
    update = layer.scaling["default"] * b @ a
    return update.T if layer.fan_in_fan_out else update
