"""Models for masked diffusion: a mask token, attention to both sides, and what a saved model's config has of them.

`config.json` keeps both: `is_causal` false, by which transformers makes masks of both sides, and `diffusion`, by which the
toolkit can sample from the model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from toolkit.config import DiffusionConfig, ModelConfig, Refusal
from toolkit.config.conditions import is_adapter, is_built_in
from toolkit.distributed.engines import unwrapped
from toolkit.models.adapter_files import MODEL_CONFIG, read_object
from toolkit.models.attention.packable import NotPackable
from toolkit.models.load import load_model
from toolkit.models.tokenizer import load_tokenizer
from toolkit.models.trained import auto_class_of, published_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

MASK = "<|mask|>"
KINDS = ("AutoModelForCausalLM", "AutoModelForMaskedLM")


class Diffusion(NamedTuple):
    """What sampling from a masked-diffusion model needs of it."""

    mask_token_id: int
    shift_logits: bool  # a token is predicted at its left neighbor
    answer_length: int  # tokens that answers were filled up to


def load_diffusion_tokenizer(config: ModelConfig) -> PreTrainedTokenizerFast:
    """`load_tokenizer`, with a mask token, its own or a new one, `<|mask|>`; an encoder's texts end with its `[SEP]`."""
    return with_mask_token(load_tokenizer(config))


def with_mask_token(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer with a mask token; `load_diffusion_tokenizer`."""
    if tokenizer.mask_token_id is None:
        tokenizer.add_special_tokens({"mask_token": MASK})
    if tokenizer.eos_token_id is None and tokenizer.sep_token_id is not None:  # BERT, ModernBERT
        tokenizer.eos_token = tokenizer.sep_token
    return tokenizer


def load_diffusion_model(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, packed: bool = False
) -> PreTrainedModel:  # fmt: skip
    """A model whose every token attends to both sides: a masked language model, or a causal one made bidirectional.

    As `load_model`; `config` holds the settings of DiffusionConfig too. The model's `config.diffusion` has what `Diffusion`
    holds, and is saved with it.

    Raises:
        Refusal: what `load_model` refuses; an architecture whose attention stays causal; --shift-logits where nothing is
            predicted so; --attention-annealing of a model that never was causal; packing or annealing of a causal one with
            sliding windows.
    """
    if not isinstance(config, DiffusionConfig):
        raise TypeError("masked diffusion needs the settings of DiffusionConfig next to those of ModelConfig")
    kind, known = kind_of(config), diffusion_in(config)
    from_causal = known is None and kind == "AutoModelForCausalLM" and not is_built_in(config.model)
    shift = known["shift_logits"] if known else from_causal if config.shift_logits is None else config.shift_logits
    if known and config.shift_logits not in (None, shift):
        own = "--shift-logits" if shift else "--no-shift-logits"
        raise Refusal(f"--model {config.model}: was trained with {own} and can't be changed to the other. Remove the setting.")
    if shift and kind == "AutoModelForMaskedLM":
        raise Refusal(
            f"--shift-logits: {config.model} is a masked language model, which predicts each token at its own place. Remove it."
        )
    if config.attention_annealing and not from_causal:
        raise Refusal(
            f"--attention-annealing {config.attention_annealing:g}: is for a run that begins from a causal model, and "
            f"{config.model} is none. Remove it."
        )
    if tokenizer.mask_token_id is None:
        raise Refusal("The tokenizer has no mask token: load it with load_diffusion_tokenizer.")
    both_sides: dict[str, Any] = {"is_causal": False} if kind == "AutoModelForCausalLM" else {}
    model = load_model(kind, config, tokenizer, packed=packed, **both_sides)
    if both_sides and _has_windows(model.config):
        name = f"model type {model.config.model_type!r}"
        if packed:
            raise NotPackable(name, "has sliding windows, which reach one token further to both sides than in its layers")
        if config.attention_annealing:
            raise Refusal(
                f"--attention-annealing {config.attention_annealing:g}: {name} has sliding windows, which it would lose "
                "meanwhile. Remove it."
            )
    model.config.diffusion = Diffusion(tokenizer.mask_token_id, bool(shift), config.answer_length)._asdict()
    return model


def _has_windows(config: PretrainedConfig) -> bool:
    text_config: Any = config.get_text_config()
    kinds = getattr(text_config, "layer_types", None)
    return "sliding_attention" in kinds if kinds else bool(getattr(text_config, "sliding_window", None))


def diffusion_of(model: nn.Module) -> Diffusion | None:
    """What a model's config has of masked diffusion; None of any other model."""
    found = getattr(unwrapped(model).config, "diffusion", None)
    return Diffusion(**found) if found else None


def diffusion_in(config: ModelConfig) -> dict[str, Any] | None:
    """What the files of the model that is named have of masked diffusion; None where they have nothing."""
    if is_built_in(config.model):
        return None
    if is_adapter(config.model):
        path = Path(os.path.expanduser(config.model)) / MODEL_CONFIG
        if path.exists():
            return read_object(path).get("diffusion")
    found: dict[str, Any] | None = getattr(published_config(config), "diffusion", None)
    return found


def of_both_sides(config: ModelConfig) -> dict[str, Any]:
    """The `head_settings` by which `load_model` loads a trained masked-diffusion model as one; none for any other."""
    known = diffusion_in(config)
    if not known:
        return {}
    return {"diffusion": known} | ({"is_causal": False} if kind_of(config) == "AutoModelForCausalLM" else {})


def kind_of(config: ModelConfig) -> str:
    """transformers' class by task of a model that can be trained so, one of KINDS.

    Raises:
        Refusal: it is another.
    """
    if is_built_in(config.model):
        kind = "AutoModelForMaskedLM" if "-bert" in config.model else "AutoModelForCausalLM"
    else:
        kind = auto_class_of(config)
    if kind not in KINDS:
        raise Refusal(
            f"--model {config.model}: is for {kind}. Masked diffusion begins from a causal or a masked language model: name "
            "one, such as tiny-llama."
        )
    return kind
