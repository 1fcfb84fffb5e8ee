"""The directory of an adapter as it is read: what is checked, the base model that it belongs on, and how it is put there."""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.config import AdapterConfig, ModelConfig, Refusal
from toolkit.config.conditions import is_adapter
from toolkit.config.json_and_yaml import parse_json, read_text_file
from toolkit.models.compat import renames_old_weights
from toolkit.system.console import as_typed, first_line
from toolkit.system.nonfinite import describe_nonfinite

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

BASE = "base"  # the folder for a base that was made here
# The settings of the adapted model, under a name of its own: with a config.json a directory is taken for a whole model.
MODEL_CONFIG = "model_config.json"
# Of an encoder-decoder, whose targets may begin with a language that its base does not have.
GENERATION_CONFIG = "generation_config.json"
WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
# peft imports bitsandbytes where that is installed, and on a CPU that one recommends a package for inference, of no use here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def is_adapted(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def without_adapter(model: Any) -> Any:
    """The model itself, below an adapter; one without an adapter as it is."""
    return model.get_base_model() if is_adapted(model) else model


def base_of(directory: str | Path) -> tuple[str, str | None]:
    """Name (or directory) and revision of the model that an adapter belongs on.

    Raises:
        Refusal: adapter_config.json cannot be read, or names a directory that is gone.
    """
    directory = Path(os.path.expanduser(directory))
    settings = read_adapter_config(directory)
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not name and (directory / BASE / "config.json").exists():
        return str(directory / BASE), None
    if not name:
        raise Refusal(f"{directory}/adapter_config.json: base_model_name_or_path is empty. Write the base model's name there.")
    for key, value in (("base_model_name_or_path", name), ("revision", revision)):
        if value is not None and not isinstance(value, str):
            raise Refusal(f"{directory}/adapter_config.json: {key} is {value!r}, and must be a text. Correct the file.")
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
    """The message before an adapter is sent to others whose base they haven't: a directory of this machine. None otherwise.

    Args:
        base: base_model_name_or_path of the adapter; empty where the base is sent along.
        model: the adapter's directory.
    """
    if not base or not (os.path.isabs(base) or os.path.isdir(base)):
        return None
    merge = as_typed("toolkit", "merge", model, "--into", "DIR")
    return (
        f"WARNING: the adapter's base is {base}, a directory of this machine: nobody else can load the adapter. Send a whole "
        f"model: {merge}, then toolkit push DIR. Or push the base first, and name it: in "
        "base_model_name_or_path of adapter_config.json, or with --model when you train"
    )


def settings_of_base(config: ModelConfig) -> ModelConfig:
    """A recipe's settings with the base in the place of the adapter that `--model` names.

    Raises:
        Refusal: adapters are not what the settings train, or the base cannot be determined.
    """
    if not (isinstance(config, AdapterConfig) and config.use_peft):
        raise Refusal(
            f"--model {config.model}: is an adapter. Train it further with recipes/lora.py, or make a model of it: "
            + as_typed("toolkit", "merge", config.model, "--into", "DIR")
        )
    name, revision = base_of(config.model)
    check_adapter(config.model)
    return dataclasses.replace(config, model=name, model_revision=revision)


def check_adapter(directory: str | Path) -> None:
    """Read an adapter's files to their end, before its base is loaded.

    Raises:
        Refusal: settings that peft can't read or that load more than this directory; no weights, pickled or damaged ones; a
            tensor that holds a number which is not finite.
    """
    from peft import PeftConfig

    directory = Path(os.path.expanduser(directory))
    settings = read_adapter_config(directory)
    path = directory / "adapter_config.json"
    for name in _LOADING_MORE:
        if settings.get(name):
            raise Refusal(f"{path}: {name} has peft load what is not in this directory. Remove it.")
    try:
        PeftConfig.from_pretrained(str(directory))
    except Exception as error:  # whatever peft raises of a kind or a field that it doesn't have
        raise Refusal(f"{path}: is not the settings of an adapter: {first_line(error)}") from error
    weights = directory / WEIGHTS
    if not weights.is_file():
        if (directory / PICKLED).exists():
            how = _conversion(directory)
            raise Refusal(f"{directory / PICKLED}: is pickled, and nothing is unpickled here. Convert it: {how}")
        raise Refusal(f"{directory}: there is no {WEIGHTS} in it. Copy it there; it belongs to adapter_config.json.")
    if found := describe_nonfinite(_tensors_of(weights)):
        raise Refusal(f"{weights}: {found}. The run that made it diverged, or the file is damaged: use an earlier one.")


def pass_on_inputs(adapted: nn.Module) -> None:
    """Let token types and positions reach a model that answers questions: peft's (0.21.2) class for it names them in its
    forward and passes them no further, so that an adapter was trained without them and merged into a model that has them."""
    if type(adapted).__name__ != "PeftModelForQuestionAnswering":
        return
    held: dict[str, Any] = {}

    def take(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        held.update({name: kwargs.pop(name) for name in ("token_type_ids", "position_ids") if name in kwargs})
        return args, kwargs

    def give(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kwargs = kwargs | held
        held.clear()
        return args, kwargs

    adapted.register_forward_pre_hook(take, with_kwargs=True)
    inner = adapted.base_model
    assert isinstance(inner, nn.Module)
    inner.register_forward_pre_hook(give, with_kwargs=True)


def put_adapter(model: PreTrainedModel, directory: str | Path, *, is_trainable: bool = False) -> PeftModel:
    """The model with the adapter of a directory on it. `check_adapter` comes first.

    Raises:
        Refusal: the adapter was made for other modules or shapes than the model has.
    """
    from peft import PeftModel, get_peft_model_state_dict

    directory = Path(os.path.expanduser(directory))
    if model.config.is_encoder_decoder and (directory / GENERATION_CONFIG).exists():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(directory)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")  # peft 0.21.2 and transformers 5.23
        warnings.filterwarnings("ignore", message="Found missing adapter keys")  # refused below
        try:
            adapted = PeftModel.from_pretrained(model, str(directory), is_trainable=is_trainable)
        except Exception as error:  # whatever peft can raise; the cause stays attached
            raise Refusal(f"{directory}: can't be put on its base {_base_name(model)}: {first_line(error)}") from error
        wanted = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    pass_on_inputs(adapted)
    if renames_old_weights(model):
        return adapted
    there = {name for name, _ in _tensors_of(directory / WEIGHTS)}
    missing = sorted(wanted - there)
    unused = sorted(there - wanted - adapted.state_dict().keys())
    if missing or unused:
        what = f"{missing[0]} is not in the file" if missing else f"{unused[0]} has no place in the model"
        raise Refusal(
            f"{directory / WEIGHTS}: does not fit its base {_base_name(model)} and adapter_config.json: {what} "
            f"({len(missing):,} missing, {len(unused):,} unused). Is base_model_name_or_path the model that it was trained on?"
        )
    return adapted


def check_no_adapter_inside(model: str, revision: str | None) -> None:
    """Refuse a model with an adapter next to it: transformers (5.23) puts that on the model unasked, pickled or not."""
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(model, revision=revision) is not None:
        raise Refusal(
            f"--model {model}: holds config.json and adapter_config.json, a whole model and an adapter. For the adapter on its "
            "base, take config.json out of a copy of it; for the model alone, adapter_config.json."
        )


# Settings of peft 0.21.2 that import a module, or read a file which may be pickled.
_LOADING_MORE = ("megatron_config", "prompt_tuning_init_state_dict_path")


def _tensors_of(weights: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an adapter by name, one at a time."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="pt") as tensors:
            names = list(tensors.keys())
            if not names:
                raise Refusal(f"{weights}: holds no tensor.")
            for name in names:
                yield name, tensors.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as error:
        raise Refusal(f"{weights}: is damaged, or no safetensors file. Copy it again. ({first_line(error)})") from error


def _conversion(directory: Path) -> str:
    """What to type for the same weights in safetensors; torch reads tensors only, no code."""
    code = (
        'import sys, torch, safetensors.torch as s; d = sys.argv[1]; '
        f't = torch.load(d + "/{PICKLED}", "cpu", weights_only=True); '
        f's.save_file({{k: v.clone().contiguous() for k, v in t.items()}}, d + "/{WEIGHTS}")'
    )
    return as_typed("python", "-c", code, directory)


def _base_name(model: PreTrainedModel) -> str:
    return model.config.name_or_path or type(model).__name__


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """adapter_config.json as it is."""
    return read_object(directory / "adapter_config.json")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file of an adapter's directory holds.

    Raises:
        Refusal: it holds none, or can't be read.
    """
    settings = parse_json(read_text_file(path, str(path)), str(path), is_file=True)
    if not isinstance(settings, dict):
        raise Refusal(f"{path}: holds no JSON object.")
    return settings
