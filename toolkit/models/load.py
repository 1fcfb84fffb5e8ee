"""Models: from the Hub, from a directory, or a built-in shape made from scratch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.config import AdapterConfig, DataConfig, DeviceConfig, ModelConfig, Refusal, changed_settings
from toolkit.config.conditions import is_adapter, is_built_in
from toolkit.distributed.compat import settled_precision
from toolkit.distributed.ranks import say_once
from toolkit.models.adapter_files import check_no_adapter_inside, settings_of_base
from toolkit.models.attention.interface import check_not_varlen, choose_attention, take_attention_of_padded_rows
from toolkit.models.attention.packable import (
    PROVEN,
    NotPackable,
    check_bidirectional,
    check_no_contamination,
    check_packable,
    make_bidirectional,
)
from toolkit.models.compat import commit_of, set_commit
from toolkit.models.dropout import take_fast_dropout
from toolkit.models.float8 import multiply_in_float8
from toolkit.models.layers import check_compiler, checkpoint_layers, compile_layers
from toolkit.models.loaded import Loaded, note_loaded
from toolkit.models.not_loadable import check_direction, check_ends, directory_or_name, explained, model_class_of
from toolkit.models.quantization import in_4_bits, keep_gradients, pack_shapes
from toolkit.models.shapes import DIMENSIONS, begin_with_words, built_in_config, check_config_files, check_context, set_dropout
from toolkit.models.tokenizer import UNCASED, commit_in_cache
from toolkit.models.without_weights import builds_without_weights
from toolkit.system.console import first_of
from toolkit.system.imports import imported_to_stay
from toolkit.system.network import stay_offline_without_network
from toolkit.system.nonfinite import describe_nonfinite

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HEADS_OF_ROWS = re.compile("Classification|QuestionAnswering|MultipleChoice")


def load_model(
    auto_class: str, config: ModelConfig | str, tokenizer: PreTrainedTokenizerBase | None = None, *,
    packed: bool | None = False, **head_settings: Any,
) -> PreTrainedModel:  # fmt: skip
    """The model that the settings name, on the CPU, ready for `accelerator.prepare`.

    Weights that are made here, all of a built-in shape or a new head, are a function of `config.seed` alone. What loading finds
    out, it is in `loaded(model)`.

    Args:
        auto_class: transformers' class by task, such as "AutoModelForCausalLM".
        config: a ModelConfig, or a model's name. A recipe's has more groups, which also set how long examples are
            (max_length), on which device the model will be (use_cpu), and whether it is held in 4 bits.
        tokenizer: gives a built-in shape its vocabulary, and any model its pad token; a larger one than the model's
            embedding enlarges the embedding.
        packed: whether the model will see packed rows; then it is made sure that each document gets what it has alone. None:
            it gets the attention for packed rows where they are exact for it, and its user decides (see
            `choose_pair_layout`, `choose_row_layout`).
        head_settings: fields of the model's config that the task decides: num_labels, id2label, problem_type ...; is_causal,
            false, lets a causal architecture see both sides.

    Raises:
        Refusal: an unknown or unreachable model, one of another kind, settings that it cannot have.
    """
    import transformers

    config = ModelConfig(model=config) if isinstance(config, str) else config
    adapter = config.model if is_adapter(config.model) else None
    if adapter:
        config = settings_of_base(config)
    built_in = is_built_in(config.model)
    with imported_to_stay():
        auto = getattr(transformers, auto_class, None) if isinstance(auto_class, str) else None
        if auto is None:
            raise Refusal(f"auto_class {auto_class!r}: must be the name of a class of transformers, as AutoModelForCausalLM.")
        model_config = built_in_config(config, tokenizer) if built_in else pretrained_config(config)
        for name, value in head_settings.items():
            setattr(model_config, name, value)
        set_dropout(model_config, config.dropout, config.attention_dropout)
        if isinstance(config, DataConfig):
            check_context(model_config, config.max_length, "max_length" not in changed_settings(config))
        model_class = model_class_of(auto, auto_class, model_config, config)
    if auto_class == "AutoModelForSequenceClassification" and model_config.is_encoder_decoder:
        check_ends(tokenizer, config)
    is_undecided, packed = packed is None, _may_be_packed(model_config, model_class, config) if packed is None else packed
    attention = choose_attention(model_config, config.attn_implementation, packed, _device(config), model_class)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if builds_without_weights():
            model, new_modules = _shapes(auto, config, model_config, attention)
        elif built_in:  # made in float32 and rounded after, so that --dtype changes the rounding and nothing else
            model = auto.from_config(model_config, attn_implementation=attention, dtype=torch.float32)
            if model_config.model_type == "bert" and config.model.endswith(UNCASED):
                begin_with_words(model)
            model = model.to(getattr(torch, "float32" if config.dtype == "auto" else config.dtype))
            new_modules = _modules_with_random_weights(model)
        else:
            model, new_modules = _pretrained_model(auto, config, model_config, attention)
        new_modules += _fit_to_tokenizer(model, tokenizer)
    if getattr(model.config, "is_causal", True) is False:
        make_bidirectional(model)
    if "is_causal" not in head_settings:
        check_direction(model, auto_class, config)
    elif not builds_without_weights():
        check_bidirectional(model, config.model)
    if getattr(model_config.get_text_config(), "output_router_logits", False):
        say_once(
            f"WARNING: {config.model}: its auxiliary loss of the router (output_router_logits) is not part of the loss here."
        )
    without = builds_without_weights()
    is_tried = is_undecided and _HEADS_OF_ROWS.search(auto_class)  # by choose_row_layout, with its head
    if packed and not (without or is_tried) and model_config.model_type not in PROVEN and attention != "flash_attention_2":
        try:
            check_no_contamination(model)
        except NotPackable as problem:
            if not is_undecided:
                raise
            say_once(f"{problem.what}: its rows are padded")
            take_attention_of_padded_rows(model, config.attn_implementation, problem)
    if (in_float8 := getattr(config, "fp8", "none")) != "none":
        multiply_in_float8(model, in_float8, _device(config))
    if config.torch_compile:
        check_compiler(config.torch_compile_backend, _device(config))
        compile_layers(model, config.gradient_checkpointing, config.torch_compile_backend)
    elif config.gradient_checkpointing:
        checkpoint_layers(model)
    take_fast_dropout(model)
    note_loaded(model, Loaded(config.seed, config.model_revision, adapter, tokenizer, tuple(new_modules)))
    return model.train()  # also what from_pretrained made, which would train without dropout


def _may_be_packed(model_config: PretrainedConfig, model_class: type | None, config: ModelConfig) -> bool:
    try:
        check_packable(model_config, model_class)
    except NotPackable as problem:
        check_not_varlen(config.attn_implementation, problem)
        return False
    return config.attn_implementation not in ("sdpa", "eager")


def pretrained_config(config: ModelConfig) -> PretrainedConfig:
    """The configuration of a model that --model names, of a directory or the Hub.

    Raises:
        Refusal: there is none, it can't be read, or settings of a built-in shape were given with it.
    """
    from transformers import AutoConfig

    flag, directory = f"--model {config.model}", Path(os.path.expanduser(config.model))
    for name in (*DIMENSIONS, "vocab_size"):
        if getattr(config, name) is not None:
            setting = f"--{name.replace('_', '-')} {getattr(config, name)}"
            raise Refusal(f"{setting}: is for the built-in shapes, and {config.model} has its own. Remove it.")
    if directory.is_dir():
        if config.model_revision is not None:
            raise Refusal(f"--model-revision {config.model_revision}: has no effect on a directory ({directory}). Remove it.")
        if not (directory / "config.json").exists():
            raise Refusal(f"{flag}: the directory holds no config.json. Save a model there (save_pretrained), or name another.")
        check_config_files(directory, flag)
    elif config.trust_remote_code and not _COMMIT.fullmatch(config.model_revision or ""):
        raise Refusal(
            f"--trust-remote-code runs code of {config.model}: pin the commit that you have read with --model-revision (all 40 "
            f"digits; they are at https://huggingface.co/{config.model}/commits)"
        )
    if not directory.is_dir():
        stay_offline_without_network()
    with explained(config):
        found = AutoConfig.from_pretrained(
            directory_or_name(config), revision=config.model_revision, trust_remote_code=config.trust_remote_code
        )
    if not directory.is_dir():
        set_commit(found, commit_in_cache(config.model, config.model_revision, ["config.json"]))
    return found


def _shapes(
    auto: Any, config: ModelConfig, model_config: PretrainedConfig, attention: str | None
) -> tuple[PreTrainedModel, list[str]]:
    """The model on the meta device, in the type that its weights would have, and the modules whose weights would be new."""
    dtype = getattr(model_config, "dtype", None) or torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    with torch.device("meta"):
        model = auto.from_config(model_config, attn_implementation=attention, dtype=torch.float32).to(dtype)
    if quantization := _in_4_bits(config):
        pack_shapes(model, quantization)
    if is_built_in(config.model):
        return model, _modules_with_random_weights(model)
    if type(model).__name__ in (model_config.architectures or []):
        return model, []
    return model, sorted({name.rpartition(".")[0] for name, _ in model.named_parameters() if not _is_in_body(model, name)})


def _in_4_bits(config: ModelConfig) -> dict[str, Any]:
    computed_in = {"bf16": "bfloat16", "fp16": "float16"}.get(settled_precision() or "no", "float32")
    return in_4_bits(config, _device(config), computed_in) if isinstance(config, AdapterConfig) else {}


def _pretrained_model(
    auto: Any, config: ModelConfig, model_config: PretrainedConfig, attention: str | None
) -> tuple[PreTrainedModel, list[str]]:
    """The model, in the commit that the config came from, and its modules with new weights; what is left out is printed."""
    quantization = _in_4_bits(config)
    check_no_adapter_inside(directory_or_name(config), config.model_revision)
    with explained(config, auto.__name__):
        model, report = auto.from_pretrained(
            directory_or_name(config), config=model_config, revision=commit_of(model_config) or config.model_revision,
            dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype), attn_implementation=attention,
            trust_remote_code=config.trust_remote_code, use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=True, **quantization,
        )  # fmt: skip
    keep_gradients(model)
    check_finite(model, f"--model {config.model}")
    _keep_untied(model, config)
    mismatched = {name for name, *_ in report["mismatched_keys"]}
    in_body = sorted(name for name in mismatched | set(report["missing_keys"]) if _is_in_body(model, name))
    if mismatched.intersection(in_body):
        worst = sorted(mismatched.intersection(in_body))[0]
        raise Refusal(f"--model {config.model}: the weights do not have the shapes in its config.json ({worst}).")
    new_head = sorted((mismatched | set(report["missing_keys"])).difference(in_body))
    if new_head:
        say_once(f"{config.model}: new, random weights (seed {config.seed}) for the head: {first_of(new_head, 3)}")
    if in_body:
        say_once(
            f"WARNING: {config.model} lacks {len(in_body)} tensors of its body, which are random now: {first_of(in_body, 3)}"
        )
    if report["unexpected_keys"]:
        say_once(f"{config.model}: not used by {type(model).__name__}: {first_of(sorted(report['unexpected_keys']), 3)}")
    return model, sorted({name.rpartition(".")[0] for name in new_head})


def _keep_untied(model: PreTrainedModel, config: ModelConfig) -> None:
    """Warn where config.json ties what differs in the files. transformers (5.23) takes them as they are, to tie them again when
    the vocabulary grows, and whoever reads what is saved would tie them too."""
    untied = sorted(model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys.keys())
    if untied:
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
        say_once(
            f"WARNING: {config.model}: config.json ties {first_of(untied, 3)} to other weights, and the files hold different "
            "numbers for both. They stay apart, and are saved with tie_word_embeddings false."
        )


def check_finite(model: nn.Module, name: str) -> None:
    """Refuse a model with a number that is not finite, which training would blame on its data; `name` begins the message.

    In a buffer infinity may be meant, as in a mask; NaN never is.
    """
    persistent = model.state_dict().keys()
    buffers = ((key, torch.isnan(each)) for key, each in model.named_buffers() if key in persistent and not each.is_meta)
    spoiled = next((f"the buffer {key} holds NaN" for key, is_nan in buffers if bool(is_nan.any())), None)
    found = describe_nonfinite(model.named_parameters()) or spoiled
    if found:
        raise Refusal(f"{name}: {found}. The run that made it diverged, or a file is damaged: use another, or copy it again.")


def _modules_with_random_weights(model: PreTrainedModel) -> list[str]:
    """Of a built-in shape: embeddings and what is outside the body. Its layers are random too, but get the adapter."""
    body = "" if model.base_model is model else f"{model.base_model_prefix}."
    outside = [name for name, _ in model.named_parameters() if not name.startswith(body) or "pooler" in name.split(".")]
    embeddings = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
    return sorted({name.rpartition(".")[0] for name in outside} | embeddings)


def _is_in_body(model: PreTrainedModel, name: str) -> bool:
    """Whether a tensor belongs to what a model shares with every head; a pooler is counted with the heads."""
    return name.startswith(f"{model.base_model_prefix}.") and ".pooler." not in name


def _fit_to_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """Give the model the tokenizer's pad token and a row of the embedding for each token; the names of enlarged modules."""
    embedding: Any = model.get_input_embeddings()
    enlarged: list[str] = []
    if tokenizer is not None:
        if len(tokenizer) > embedding.num_embeddings:
            say_once(
                f"The tokenizer has {len(tokenizer)} tokens, the model {embedding.num_embeddings}: its embedding is enlarged."
            )
            has_values = not embedding.weight.is_meta  # a plan's model has none, of which no mean can be taken
            model.resize_token_embeddings(len(tokenizer), mean_resizing=has_values)
            embedding = model.get_input_embeddings()
            ends = (embedding, model.get_output_embeddings())
            enlarged = [name for name, module in model.named_modules() if any(module is each for each in ends)]
        for settings in (model.config, model.config.get_text_config(), getattr(model, "generation_config", None)):
            if settings is not None:
                settings.pad_token_id = tokenizer.pad_token_id
    # torch gives the token of `padding_idx` no gradient. Where an end of text pads, that would cost it its training; the
    # masks alone mark what is padding.
    embedding.padding_idx = None
    return enlarged


def _device(config: ModelConfig) -> str:
    """The kind of device that training will be on; --use-cpu is another group's setting."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None or (isinstance(config, DeviceConfig) and config.use_cpu) else accelerator.type
