"""Configurations of models: those of the built-in shapes, with settings for their dimensions, and what any of them allows."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from toolkit.config import ModelConfig, Refusal
from toolkit.config.json_and_yaml import parse_json, read_text_file

if TYPE_CHECKING:
    from transformers import BertModel, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DIMENSIONS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "max_position_embeddings", "hidden_act",
)  # fmt: skip
# What the configs of all kinds of models call the number of their layers, and the most that one may have: transformers makes
# one after another, for years where a digit too many got in.
LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
MOST_LAYERS = 2**10
DEFAULT_VOCAB_SIZE = 4096
SLIDING_WINDOW = 256  # tokens a sliding layer of the gemma3 shapes sees; every fourth layer and the last one see everything

# Decoders by size. medium has the width, layers and heads of GPT-2 small, large those of GPT-2 medium; a gated feed-forward
# layer of 8/3 the width has as many weights as theirs of 4 times.
_SIZES = {
    "nano": (64, 4, 2, 1, 192, 1024),
    "tiny": (128, 4, 4, 2, 384, 1024),
    "small": (256, 4, 4, 2, 768, 1024),
    "medium": (768, 12, 12, 12, 2048, 1024),
    "large": (1024, 24, 16, 16, 2816, 2048),
}
_ACTIVATIONS = {"llama": "silu", "qwen3": "silu", "gemma3": "gelu_pytorch_tanh"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    **{
        f"{size}-{family}": dict(zip(DIMENSIONS, (*dimensions, activation), strict=True))
        for size, dimensions in _SIZES.items()
        for family, activation in _ACTIVATIONS.items()
    },
    "nano-bert": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256,
        "max_position_embeddings": 512, "hidden_act": "gelu",
    },
    "tiny-bert": {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512,
        "max_position_embeddings": 512, "hidden_act": "gelu",
    },
    # Their tokenizer has words in lower case, and their first weights compare them. The small one is little more than a bag of
    # words that one layer weighs, which is enough for embeddings that are learned from nothing.
    "tiny-bert-uncased": {
        "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256,
        "max_position_embeddings": 512, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.08,  # about 1 / sqrt(hidden_size)
    },
    "small-bert-uncased": {
        "hidden_size": 384, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 384,
        "max_position_embeddings": 512, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
    "tiny-t5": {
        "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 384,
        "hidden_act": "gelu_new",
    },
}  # fmt: skip


def built_in_config(config: ModelConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> PretrainedConfig:
    """The transformers config of a built-in shape: a vocabulary of `len(tokenizer)`, its special tokens, our dimensions.

    Raises Refusal for a name that is no shape, a dimension that the shape does not have, and dimensions that do not divide.
    """
    dimensions = _dimensions(config)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    vocab_size = len(tokenizer) if tokenizer is not None else config.vocab_size or DEFAULT_VOCAB_SIZE
    return _MAKERS[config.model.split("-")[1]]({**dimensions, **special, "vocab_size": vocab_size})


def check_config_files(directory: Path, shown: str) -> None:
    """Refuse a directory with a config.json or generation_config.json that no model can have; `shown` begins the message."""
    for name in ("config.json", "generation_config.json"):  # transformers (5.23) passes over a broken latter
        file, where = directory / name, f"{shown}: {name}"
        if not file.exists():
            continue
        content = parse_json(read_text_file(file, where), where, is_file=True)
        if not isinstance(content, dict):
            raise Refusal(f"{where}: must be one JSON object. Bring the file back from a copy.")
        for part in (content, *(value for value in content.values() if isinstance(value, dict))):
            for key in LAYERS:
                if isinstance(layers := part.get(key), int) and layers > MOST_LAYERS:
                    raise Refusal(f"{where}: {key} is {layers}; at most {MOST_LAYERS:,} are made. Correct the file.")


def check_context(model_config: PretrainedConfig, max_length: int, is_default: bool = False) -> None:
    """Refuse examples longer than the positions a model has; `is_default`: nobody may have typed that length."""
    longest = positions_of(model_config)
    if longest is not None and max_length > longest:
        raise Refusal(
            f"--max-length {max_length}{' (the default)' if is_default else ''}: the model has {longest} positions "
            f"(max_position_embeddings). Take --max-length {longest}, or another model."
        )


def positions_of(model_config: PretrainedConfig) -> int | None:
    """How many tokens an example may have; None where the model has no limit in its config."""
    text_config = model_config.get_text_config()
    longest: int | None = getattr(text_config, "max_position_embeddings", None)
    if longest is not None and model_config.model_type in _POSITIONS_AFTER_PADDING:
        longest -= text_config.pad_token_id + 1
    return longest


def set_dropout(model_config: PretrainedConfig, dropout: float | None, attention_dropout: float | None) -> None:
    """Set the rates that a model's config has under one name or another; None leaves them as they are."""
    text_config = model_config.get_text_config()
    for flag, rate, pattern in (
        ("--dropout", dropout, _DROPOUT_FIELD), ("--attention-dropout", attention_dropout, _ATTENTION_DROPOUT_FIELD),
    ):  # fmt: skip
        fields = [field for field in text_config.to_dict() if pattern.search(field)]
        if rate is not None and not fields:
            what = flag[2:].replace("-", " ")
            raise Refusal(f"{flag} {rate:g}: model type {model_config.model_type!r} has no {what}. Remove it.")
        for field in fields if rate is not None else ():
            setattr(text_config, field, rate)


def dropout_fields(model_config: Iterable[str]) -> list[str]:
    """The names of the dropout rates among those of a model's config."""
    return [name for name in model_config if _DROPOUT_FIELD.search(name)]


def highest_dropout(model: PreTrainedModel) -> float:
    """Of its modules, and of its config, where some models (OPT) keep the rate that they call the function with."""
    from torch.nn import Dropout

    rates = [module.p for module in model.modules() if isinstance(module, Dropout)]
    fields = model.config.get_text_config().to_dict()
    rates += [fields[name] or 0.0 for name in dropout_fields(fields) if not _OF_A_HEAD.search(name)]
    return float(max(rates, default=0.0))


_OF_A_HEAD = re.compile("classif|summary|qa_")  # a head's dropout is a module where the model has that head
_DROPOUT_FIELD = re.compile(r"(^|_)(dropout|pdrop)(_|$)")
_ATTENTION_DROPOUT_FIELD = re.compile(r"^att(n|ention)_(\w+_)?(dropout|pdrop)(_|$)")
# Learned positions that begin after the padding index (fairseq's way), so that a few of the table are never used.
_POSITIONS_AFTER_PADDING = {"camembert", "data2vec-text", "roberta", "xlm-roberta", "xlm-roberta-xl", "xmod"}


def _dimensions(config: ModelConfig) -> dict[str, Any]:
    if config.model not in _DEFAULTS:
        close = difflib.get_close_matches(config.model, _DEFAULTS, n=1) or [", ".join(_DEFAULTS)]
        raise Refusal(f"--model {config.model}: is neither a directory nor a built-in shape. Did you mean {close[0]}?")
    chosen = dict(_DEFAULTS[config.model])
    for name in DIMENSIONS:
        given = getattr(config, name)
        if given is not None and name not in chosen:
            raise Refusal(f"{_flag(name)} {given}: {config.model} has no such dimension. Remove it, or take another --model.")
        chosen |= {} if given is None else {name: given}
    _check_division(chosen, "hidden_size", "num_attention_heads")
    if "num_key_value_heads" in chosen:
        if config.num_key_value_heads is None and chosen["num_attention_heads"] % chosen["num_key_value_heads"]:
            chosen["num_key_value_heads"] = chosen["num_attention_heads"]
        _check_division(chosen, "num_attention_heads", "num_key_value_heads")
        if chosen["hidden_size"] // chosen["num_attention_heads"] % 2:
            width = chosen["hidden_size"] // chosen["num_attention_heads"]
            raise Refusal(
                f"--hidden-size {chosen['hidden_size']} over --num-attention-heads {chosen['num_attention_heads']} gives heads "
                f"of width {width}; rotary positions need an even width. Change one of the two."
            )
    _check_activation(chosen["hidden_act"])
    return chosen


def _check_division(chosen: dict[str, Any], whole: str, parts: str) -> None:
    if chosen[whole] % chosen[parts]:
        fitting = [n for n in range(1, chosen[whole] + 1) if chosen[whole] % n == 0 and n <= 2 * chosen[parts]]
        raise Refusal(
            f"{_flag(whole)} {chosen[whole]} is not a multiple of {_flag(parts)} {chosen[parts]}. "
            f"What fits: {_flag(parts)} {fitting[-1]}, or {_flag(whole)} {-(-chosen[whole] // chosen[parts]) * chosen[parts]}."
        )


def _check_activation(name: str) -> None:
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        close = difflib.get_close_matches(name, ACT2FN, n=3) or sorted(ACT2FN)
        raise Refusal(f"--hidden-act {name}: no such activation. Did you mean: {', '.join(close)}?")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _llama(dimensions: dict[str, Any]) -> PretrainedConfig:
    from transformers import LlamaConfig

    return LlamaConfig(**dimensions, tie_word_embeddings=True)


def _qwen3(dimensions: dict[str, Any]) -> PretrainedConfig:
    from transformers import Qwen3Config

    return Qwen3Config(**dimensions, head_dim=_head_dim(dimensions), tie_word_embeddings=True)


def _gemma3(dimensions: dict[str, Any]) -> PretrainedConfig:
    from transformers import Gemma3TextConfig

    layers, head_dim = dimensions["num_hidden_layers"], _head_dim(dimensions)
    everything = [i % 4 == 3 or i == layers - 1 for i in range(layers)]
    activation = dimensions.pop("hidden_act")
    return Gemma3TextConfig(
        **dimensions, head_dim=head_dim, query_pre_attn_scalar=head_dim, hidden_activation=activation, tie_word_embeddings=True,
        layer_types=["full_attention" if full else "sliding_attention" for full in everything], sliding_window=SLIDING_WINDOW,
    )  # fmt: skip


def _bert(dimensions: dict[str, Any]) -> PretrainedConfig:
    from transformers import BertConfig

    return BertConfig(**dimensions)


def _t5(dimensions: dict[str, Any]) -> PretrainedConfig:
    """As many layers in the decoder as in the encoder, and feed-forward layers that are gated, as in T5 1.1."""
    from transformers import T5Config

    width, heads = dimensions["hidden_size"], dimensions["num_attention_heads"]
    return T5Config(
        vocab_size=dimensions["vocab_size"], d_model=width, d_kv=width // heads, d_ff=dimensions["intermediate_size"],
        num_layers=dimensions["num_hidden_layers"], num_heads=heads, feed_forward_proj=f"gated-{dimensions['hidden_act']}",
        eos_token_id=dimensions["eos_token_id"], pad_token_id=dimensions["pad_token_id"],
        **{"decoder_start_token_id": dimensions["pad_token_id"]},
    )  # fmt: skip


def _head_dim(dimensions: dict[str, Any]) -> int:
    return dimensions["hidden_size"] // dimensions["num_attention_heads"]


_MAKERS = {"llama": _llama, "qwen3": _qwen3, "gemma3": _gemma3, "bert": _bert, "t5": _t5}


PLACE_SCALE = 0.1  # of positions and segments, next to words


def begin_with_words(model: PreTrainedModel) -> None:
    """Change the random weights of a BERT in place, so that words count most, and equal words attend to each other.

    Positions and segments are scaled down: with the usual weights a word is a third of what is added up for a token, and texts
    with the same words at other places are far apart until training has found out that places hardly matter. Where a second
    layer can read what the first has found, the first layer's keys are its queries, so that the logits of attention are
    largest between tokens of the same word: the mimetic initialization of Trockman and Kolter
    (https://arxiv.org/abs/2305.09828), for one layer. A pretrained encoder has learned that.
    """
    bert = cast("BertModel", model.base_model)
    with torch.no_grad():
        for table in (bert.embeddings.position_embeddings, bert.embeddings.token_type_embeddings):
            table.weight *= PLACE_SCALE
        if len(bert.encoder.layer) > 1:
            first = bert.encoder.layer[0].attention.self
            first.key.weight.copy_(first.query.weight)
