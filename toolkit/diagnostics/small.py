"""A recipe made short: few examples, few steps, a small version of its model, nothing sent anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from toolkit.config import ClassificationConfig, ClassifierDistillationConfig, DataConfig, ModelConfig, Refusal, Settings
from toolkit.config.conditions import is_adapter, is_built_in, is_on_a_server
from toolkit.config.reading import values_of
from toolkit.data.sources.load import load_splits
from toolkit.data.tokenize.labels import label_settings
from toolkit.diagnostics.compat import random_model
from toolkit.diagnostics.wrappers import HELD_OUT
from toolkit.models.fitted_tokenizer import pad_apart_from_end
from toolkit.models.load import load_model, pretrained_config
from toolkit.models.shapes import LAYERS
from toolkit.models.tokenizer import load_tokenizer
from toolkit.models.trained import find_model
from toolkit.system.console import first_line

AnyConfig = TypeVar("AnyConfig", bound=Settings)
GLOBAL_BATCH = 8
ROLLOUTS = {"num_generations": 4, "global_batch_size": 16}  # of recipes that sample: four prompts a step
# What a run does now and then, and where it goes: its steps alone are looked at.
QUIET: dict[str, Any] = {
    "overwrite_output_dir": True, "resume": False, "resume_from": None, "report_to": ["none"], "push_to_hub": False,
    "stop_at_step": None, "stop_deadline": None, "early_stopping_patience": None, "load_best_model_at_end": False,
    "logging_strategy": "steps", "logging_steps": 1, "save_strategy": "no", "async_save": False, "loss_spike": "warn",
}  # fmt: skip
# Also where its numbers are computed, and how.
_PLAIN: dict[str, Any] = {
    **QUIET, "use_cpu": True, "bf16": False, "fp16": False, "fp8": "none", "torch_compile": False,
    "gradient_checkpointing": False, "load_in_4bit": False, "fsdp": False, "zero_stage": None, "offload": "none",
    "deepspeed": None, "dataloader_num_workers": 0, "auto_find_batch_size": False, "rollout_server": None, "num_samples": 0,
    "metrics": [], "predict_with_generate": False, "global_batch_size": None, "eval_delay": 0.0, "save_steps": 10**6,
    "divergence": "warn", "nonfinite": "skip", "rollouts_from": None,
    "group_by_length": False,  # rows of one length have no padding, and a mistake in it is not seen
}  # fmt: skip
_EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_on_start": True}
_FEW = {"max_train_examples": 512, "max_eval_examples": HELD_OUT}
_FEW_FILES = {"max_train_examples": 16, "max_eval_examples": 2}
_NARROW: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
_LENGTHS = ("max_length", "max_prompt_length", "max_target_length")
LONGEST = 256  # tokens
_LOGITS = 0.75  # more would bring the first loss away from that of guessing: by half of its square, at random


def shortened(config: AnyConfig, output_dir: Path, changes: Mapping[str, Any]) -> AnyConfig:
    """The config of a short run; `changes` win. What the recipe has no setting for is left out."""
    values = values_of(config)
    short = {**_PLAIN, "output_dir": str(output_dir)}
    if values.get("eval_strategy") != "no":  # else there may be no row to evaluate on
        short |= _EVALUATED
    few = _FEW_FILES if values.get("sample_by") == "document" else _FEW  # a document is a whole file there
    short |= {name: min(values.get(name) or size, size) for name, size in few.items()}
    short |= {name: min(length, LONGEST) for name, length in lengths_of(config).items()}
    if "num_generations" in values:
        short |= ROLLOUTS
    model = values.get("model")
    if isinstance(model, str) and is_built_in(model):
        short |= {name: size for name, size in _NARROW.items() if values.get(name) is None and name in values}
        if "t5" not in model and "num_attention_heads" in values and values["num_attention_heads"] is None:
            short["num_attention_heads"] = 4
    short |= changes
    return dataclasses.replace(config, **{name: value for name, value in short.items() if name in values})


def lengths_of(config: Settings) -> dict[str, int]:
    """The most tokens of its rows, by setting."""
    values = values_of(config)
    return {name: values[name] for name in _LENGTHS if values.get(name)}


def with_small_model(config: AnyConfig, folder: Path, seed: int = 0) -> AnyConfig:
    """The config with a random model of two narrow layers in place of one that would be loaded; built-in shapes stay.

    Its weights are random and its tokenizer is that of the model.

    Raises:
        Refusal: the model can't be read or made small: an adapter, or a configuration that transformers can't build.
    """
    values = values_of(config)
    name = values.get("model")
    if not isinstance(name, str) or is_built_in(name):
        return config
    if is_adapter(name):
        raise Refusal(f"--model {name}: is an adapter. doctor needs the model below it: name that with --model.")
    made = _write_small_model(config, folder, seed)
    changes: dict[str, Any] = {"model": str(made), "model_revision": None, "tokenizer": values.get("tokenizer") or str(made)}
    return dataclasses.replace(config, **{key: value for key, value in changes.items() if key in values})


def with_small_teacher(config: AnyConfig, folder: Path) -> AnyConfig:
    """The config with a random small teacher, of a recipe that has one: of the kind it names, or of the student's tokens and,
    of a classifier, the classes of the data."""
    values: Any = values_of(config)
    if "teacher" not in values or values.get("self_distillation") is not None:
        return config
    if values["teacher"] is not None and not is_on_a_server(values["teacher"]):
        named: dict[str, Any] = {"model": find_model(values["teacher"]), "model_revision": values["teacher_revision"]}
        named["tokenizer"] = None
        other_seed = 1  # else a teacher of the student's shape would be the student
        teacher = with_small_model(dataclasses.replace(config, **named), folder, other_seed)
        found: dict[str, Any] = {"teacher": values_of(teacher)["model"], "teacher_revision": None}
        return dataclasses.replace(config, **found)
    tokenizer: Any = load_tokenizer(cast(ModelConfig, config))
    labels: dict[str, Any] = {}
    shape, auto_class = "tiny-llama", "AutoModelForCausalLM"
    if isinstance(config, ClassifierDistillationConfig):
        tokenizer = pad_apart_from_end(tokenizer)
        rows = load_splits(cast(DataConfig, shortened(config, folder, {})))
        labels = label_settings(rows, cast(ClassificationConfig, config))
        shape, auto_class = "tiny-bert", "AutoModelForSequenceClassification"
    other = cast(ModelConfig, config).seed + 1  # else a teacher of the student's shape would be the student
    small = ModelConfig(model=shape, num_attention_heads=4, seed=other, **_NARROW)
    load_model(auto_class, small, tokenizer, **labels).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    changes: dict[str, Any] = {"teacher": str(folder)}
    return dataclasses.replace(config, **changes)


def _write_small_model(config: Any, folder: Path, seed: int) -> Path:
    import transformers

    name, model_config, tokenizer = config.model, pretrained_config(config), load_tokenizer(config)
    known = getattr(model_config, "architectures", None) or [""]
    make = getattr(transformers, known[0], None) or transformers.AutoModel
    errors = []
    for narrow in (True, False):
        small = type(model_config).from_dict(_smaller(model_config.to_dict(), narrow))
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = random_model(make, small)
                _scale_head(model)
        except (ValueError, TypeError, RuntimeError, KeyError, IndexError) as error:
            errors.append(first_line(error))
            continue
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder
    raise Refusal(
        f"--model {name}: no small version of it can be made ({errors[-1]}). Try a built-in shape: --model tiny-llama."
    )


def _scale_head(model: Any) -> None:
    """A head of tokens whose logits have the standard deviation _LOGITS: under an adapter it is frozen as it is drawn.

    As random weights are drawn, no hidden state brings a token's logit much further than 1 above the others', and eight
    examples could not be learned by heart; with this, it can be brought 6 above them.
    """
    head = model.get_output_embeddings()
    if head is not None:
        with torch.no_grad():
            head.weight.mul_(_LOGITS / model.eval()(**model.dummy_inputs).logits.std())


def _smaller(fields: dict[str, Any], narrow: bool) -> dict[str, Any]:
    """The fields of a model's config with two layers and, where it is made narrow, 4 heads of 16 numbers."""
    small = {name: value for name, value in fields.items() if name not in ("quantization_config", "transformers_version")}
    for name in LAYERS:
        if isinstance(small.get(name), int):
            small[name] = min(small[name], 2)
    kinds = small.get("layer_types")
    if kinds:
        small["layer_types"] = (list(dict.fromkeys(kinds)) * 2)[:2]
    heads, width = small.get("num_attention_heads"), small.get("hidden_size")
    if narrow and isinstance(heads, int) and isinstance(width, int):
        groups = small.get("num_key_value_heads") or heads
        small |= {"num_attention_heads": 4, "hidden_size": 64}
        if "num_key_value_heads" in small:
            small["num_key_value_heads"] = 4 if groups == heads else max(1, 4 * groups // heads)
        small |= {key: size for key, size in (("head_dim", 16), ("intermediate_size", 128)) if small.get(key)}
    return small
