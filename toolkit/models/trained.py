"""A model that was trained: from a run, a directory or the Hub, an adapter with its base; ready to be used, not trained."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from toolkit.config import ModelConfig, Refusal
from toolkit.config.conditions import is_adapter, is_built_in
from toolkit.models.adapter_files import (
    MODEL_CONFIG,
    WEIGHTS,
    base_of,
    check_adapter,
    put_adapter,
    read_adapter_config,
    read_object,
)
from toolkit.models.loaded import loaded
from toolkit.models.not_loadable import OFFLINE
from toolkit.models.shapes import positions_of
from toolkit.models.tokenizer import load_tokenizer
from toolkit.system.allocator import keep_few_primitives
from toolkit.system.console import as_typed, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# By what the name of a model's class ends with, and by peft's name of the task.
AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForMultipleChoice": "AutoModelForMultipleChoice",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "MTModel": "AutoModelForSeq2SeqLM",
    "Model": "AutoModel",  # the last one: of a MarianMTModel it is the end too
}
CLASSES_BY_TASK = {
    "CAUSAL_LM": "AutoModelForCausalLM", "SEQ_CLS": "AutoModelForSequenceClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering", "TOKEN_CLS": "AutoModelForTokenClassification",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
}  # fmt: skip


def find_model(written: str) -> str:
    """The model's directory where a run's output directory was given; else what was written.

    Raises:
        Refusal: a built-in shape, whose weights are random, or a directory without a model.
    """
    if is_built_in(written):
        first = as_typed("toolkit", "train", "pretrain", "--model", written)
        raise Refusal(f"{written}: is a shape with random weights. Train it first, as with: {first}")
    directory = Path(os.path.expanduser(written))
    if directory.is_dir() and not any((directory / name).exists() for name in ("config.json", "adapter_config.json")):
        inside = directory / "model"
        if not inside.is_dir():
            unfinished = ""
            if (directory / "checkpoints").is_dir() or directory.parent.name == "checkpoints":
                unfinished = f" A model of its checkpoint is made by: {as_typed('toolkit', 'export', written)}"
            raise Refusal(
                f"{written}: there is no model in it (config.json or adapter_config.json, here or in model/).{unfinished}"
            )
        return str(inside)
    return written


def auto_class_of(config: ModelConfig) -> str:
    """What the model was trained as, one of AUTO_CLASSES: transformers' class by task, such as "AutoModelForCausalLM".

    Raises:
        Refusal: it can't be read, or is none of them.
    """
    if is_adapter(config.model):
        settings = read_adapter_config(Path(os.path.expanduser(config.model)))
        if auto_class := class_of_adapter(settings):
            return auto_class
        task = settings.get("task_type")
        raise Refusal(f"{config.model}: an adapter for {task}; what can be evaluated are {' and '.join(CLASSES_BY_TASK)}.")
    architectures = list(published_config(config).architectures or [])
    if auto_class := next(filter(None, map(auto_class_named, architectures)), None):
        return auto_class
    raise Refusal(
        f"{config.model}: its config.json names {', '.join(architectures) or 'no architecture'}; what can be used here are "
        f"models {', '.join('...' + ending for ending in AUTO_CLASSES)}."
    )


def class_of_adapter(settings: Mapping[str, Any]) -> str | None:
    """transformers' class by task of an adapter, None where it's none of these.

    A task that peft has no name for, such as multiple choice, is known by the class of the model, which the adapter names.
    """
    if auto_class := CLASSES_BY_TASK.get(str(settings.get("task_type"))):
        return auto_class
    name = str((settings.get("auto_mapping") or {}).get("base_model_class"))
    return auto_class_named(name)


def auto_class_named(name: str) -> str | None:
    """transformers' class by task of a model whose class has this name, None where it's none of AUTO_CLASSES."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if name in CAUSAL.values():  # Gemma 3 ends as encoder-decoders do
        return "AutoModelForCausalLM"
    return next((auto_class for ending, auto_class in AUTO_CLASSES.items() if name.endswith(ending)), None)


def longest_example(config: ModelConfig) -> int | None:
    """How many tokens an example may have for the model; None where its config has no limit."""
    return positions_of(published_config(config))


def load_trained(
    auto_class: str, config: ModelConfig, device: torch.device, *, packed: bool = False, **head_settings: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model, on `device` and in evaluation mode, and tokenizer. An adapter is put on its base, from wherever that is.

    `packed`: whether it will see packed rows; `head_settings`: fields of the model's config; both as in `load_model`.

    Raises:
        Refusal: what `load_model` refuses; a part of the model that was never trained.
    """
    from toolkit.models.load import load_model
    from toolkit.models.pooling import load_encoder

    keep_few_primitives()
    with _for_a_trained_model():
        tokenizer = load_tokenizer(config, is_fast=auto_class != "AutoModelForSeq2SeqLM")
        if is_adapter(config.model):
            model = _adapted(auto_class, config, tokenizer, packed, head_settings)
        else:
            model = (
                load_encoder(config, tokenizer)
                if auto_class == "AutoModel"
                else load_model(auto_class, config, tokenizer, packed=packed, **head_settings)
            )
            untrained = loaded(model).new_modules
            if untrained:
                raise Refusal(f"{config.model}: has no trained head for this ({', '.join(untrained)}): train it first.")
    return cast(Any, model).to(device).eval(), tokenizer


_HEADS = (".score", ".classifier", ".out_proj", ".qa_outputs")
_OF_THE_TASK = ("id2label", "label2id", "problem_type", "pad_token_id", "is_causal", "diffusion")


def settings_of_the_task(adapter: Path) -> dict[str, Any]:
    """What the adapted model's config has of its task; of an adapter from elsewhere, the size of its head."""
    path = adapter / MODEL_CONFIG
    if path.exists():
        written = read_object(path)
        found = {name: written[name] for name in _OF_THE_TASK if name in written}
        return found | ({"id2label": {int(k): v for k, v in found["id2label"].items()}} if found.get("id2label") else {})
    from safetensors import safe_open

    with safe_open(adapter / WEIGHTS, framework="pt") as tensors:
        heads = [name for name in tensors.keys() if name.rpartition(".")[0].endswith(_HEADS)]  # noqa: SIM118 - not a dictionary
        return {"num_labels": tensors.get_slice(heads[0]).get_shape()[0]} if heads else {}


def best_device(wanted: str | None) -> torch.device:
    """The requested device, else an accelerator where there is one.

    Raises:
        Refusal: torch does not have it or can't reach it.
    """
    if wanted is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        device = torch.device(wanted)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise Refusal(f"--device {wanted}: {first_line(error)}") from error
    return device


def _adapted(
    auto_class: str, config: ModelConfig, tokenizer: PreTrainedTokenizerBase, packed: bool, head_settings: dict[str, Any]
) -> PreTrainedModel:  # fmt: skip
    from toolkit.models.load import load_model

    directory = Path(os.path.expanduser(config.model))
    base, revision = base_of(directory)
    check_adapter(directory)
    settings = head_settings | (settings_of_the_task(directory) if auto_class != "AutoModelForCausalLM" else {})
    config = dataclasses.replace(config, model=base, model_revision=revision)
    model = load_model(auto_class, config, tokenizer, packed=packed, **settings)
    return cast("PreTrainedModel", put_adapter(model, directory))


def published_config(config: ModelConfig) -> PretrainedConfig:
    """The configuration of a trained model; of an adapter that of its base.

    Raises:
        Refusal: it can't be read.
    """
    from toolkit.models.load import pretrained_config

    if is_adapter(config.model):
        base, revision = base_of(Path(os.path.expanduser(config.model)))
        config = dataclasses.replace(config, model=base, model_revision=revision)
    with _for_a_trained_model():
        return pretrained_config(config)


@contextlib.contextmanager
def _for_a_trained_model() -> Iterator[None]:
    """Refusals of the functions that load any model, without a setting's name and the advice to begin with a shape."""
    try:
        yield
    except Refusal as refusal:
        raise Refusal(str(refusal).removeprefix("--model ").replace(OFFLINE, "or give a directory")) from refusal
