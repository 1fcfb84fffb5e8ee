"""What of a row the tokens of a model see: whether documents of a packed one are apart, and whether it is both sides."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from toolkit.config import Refusal
from toolkit.models.compat import is_stateful, takes_attention_functions, takes_flash_attention
from toolkit.system.console import first_line
from toolkit.system.evaluation_mode import evaluation_mode

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Model types whose packed gradients are compared with each document's own in tests/models/test_attention.py.
PROVEN = {"bert", "gemma2", "gemma3_text", "gpt2", "llama", "mistral", "modernbert", "qwen2", "qwen3"}

_RECURRENT = "carries one document's state into the next"
_LAYERS = {
    "linear_attention": _RECURRENT, "conv": "mixes neighboring tokens across documents", "hybrid": _RECURRENT,
    "hybrid_sliding": _RECURRENT, "chunked_attention": "cuts its chunks by the position in the row",
    "window_attention": "cuts its windows by the position in the row",
}  # fmt: skip
_RECURRENT_TYPES = re.compile(r"mamba|rwkv|jamba|bamba|zamba|xlstm|recurrent|falcon_h1|nemotron_h|granitemoehybrid|kimi_linear")
_FROM_THE_LEFT = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
_SINKS = {"deepseek_v4", "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class NotPackable(Refusal):
    """A model whose packed rows would not be exact: `what` is, in words, who it is and why."""

    def __init__(self, who: str, reason: str) -> None:
        self.what = f"{who} {reason}"
        super().__init__(f"--packing: {self.what}. Train it on padded rows: --no-packing (pairs: --pair-layout padded).")


def first_exact(layouts: Sequence[str], check: Callable[[str], None], asked: str, flag: str) -> tuple[str, list[NotPackable]]:
    """The first of `layouts` that `check` lets pass, or `padded`, and what is wrong with those before it.

    Raises:
        Refusal: `asked`, which is not `auto`, would not be exact.
    """
    problems: list[NotPackable] = []
    for layout in {"auto": layouts, "padded": ()}.get(asked, (asked,)):
        try:
            check(layout)
        except NotPackable as problem:
            problems.append(problem)
        else:
            return layout, problems
    if asked not in ("auto", "padded"):
        raise Refusal(f"{flag} {asked}: {problems[0].what}. Take {flag} auto.")
    return "padded", problems


def check_packable(model_config: PretrainedConfig, model_class: type | None = None) -> None:
    """Raise NotPackable, with the reason by name, for a model whose packed rows could not be exact.

    What a config and a class show is judged here, before any weight is read; `check_no_contamination` looks at the rest.
    """
    text_config = model_config.get_text_config()
    name = f"model type {model_config.model_type!r}"

    def refuse(reason: str) -> None:
        raise NotPackable(name, reason)

    if model_config.is_encoder_decoder:
        refuse("has an encoder and a decoder, whose rows cannot be packed together")
    if any(getattr(model_config, f"{kind}_config", None) is not None for kind in ("vision", "audio")):
        refuse("takes images or sound, which a packed row of text has no place for")
    layer_types = getattr(text_config, "layer_types", None) or []
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            refuse(f"has layers of type {layer_type}; such a layer {_LAYERS.get(layer_type, 'is not known to be exact')}")
    if layers_from_the_left(model_config, model_class):
        refuse(f"has recurrent layers; such a layer {_RECURRENT}")
    for rope_type in _rope_types(text_config):
        if rope_type in ("dynamic", "longrope"):
            refuse(f"has rope_type {rope_type}: its rotary frequencies depend on the length of the row")
    if getattr(text_config, "output_router_logits", False) and getattr(text_config, "router_aux_loss_coef", 0.0):
        refuse("has an auxiliary loss over the row (output_router_logits with router_aux_loss_coef)")
    if model_config.model_type in _SINKS:
        refuse("has attention sinks, which the packed attention does not have")
    if getattr(text_config, "use_bidirectional_attention", False):
        refuse("is set to use_bidirectional_attention, whose masks are not known to be exact")
    if model_class is not None and not takes_attention_functions(model_class):
        refuse(f"({model_class.__name__}) is not on transformers' attention interface")
    windowed = getattr(text_config, "sliding_window", None) or "sliding_attention" in layer_types
    if model_class is not None and windowed and not takes_flash_attention(model_class):
        refuse(f"({model_class.__name__}) has sliding windows that it does not hand to its attention function")


def layers_from_the_left(model_config: PretrainedConfig, model_class: type | None = None) -> str | None:
    """What layers of a model read a row from left to right whatever its masks are; None where none of them is known to."""
    for layer_type in getattr(model_config.get_text_config(), "layer_types", None) or []:
        if layer_type in _FROM_THE_LEFT:
            return f"layers of type {layer_type}"
    return "recurrent layers" if _RECURRENT_TYPES.search(model_config.model_type) or is_stateful(model_class) else None


def _rope_types(text_config: Any) -> set[str]:
    """Kinds of rotary embedding in a config: one set of parameters, or one for each type of layer."""
    found = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    groups = [found, *(group for group in found.values() if isinstance(group, dict))]
    return {kind for group in groups for key in ("rope_type", "type") if isinstance(kind := group.get(key), str)}


def check_no_contamination(model: PreTrainedModel) -> None:
    """Put two short documents through a model and raise NotPackable when one of them changes with the other.

    It catches what is on no list: a layer that mixes neighbors, positions that are not taken from `position_ids`, bounds
    that do not reach the attention. Compared are the outputs of a document next to two different neighbors (equal bit for
    bit, but for experts, whose batches the neighbors change) and alone (equal up to rounding).
    """
    vocabulary = model.config.get_text_config().vocab_size
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    tokens = torch.randint(0, vocabulary, (4, 9), generator=torch.Generator().manual_seed(0)).to(device)
    first, other_first, second, other_second = tokens[0, :8], tokens[1, :8], tokens[2], tokens[3]
    mixed_batches = any(getattr(model.config.get_text_config(), name, None) for name in EXPERTS)
    rounding = 0.1 if dtype in (torch.bfloat16, torch.float16) else 1e-4
    with evaluation_mode(model):
        together = _packed_output(model, first, second)
        beside_others = _packed_output(model, other_first, second)[8:], _packed_output(model, first, other_second)[:8]
        alone = _output(model, input_ids=second[None])[0]
    scale = together.abs().max()
    changes = (together[8:] - beside_others[0]).abs().max(), (together[:8] - beside_others[1]).abs().max()
    name = f"model type {model.config.model_type!r}"
    if max(changes) > (rounding * scale if mixed_batches else 0):
        raise NotPackable(name, "lets documents of one row see each other")
    if (together[8:] - alone).abs().max() > rounding * scale:
        raise NotPackable(name, "gives a document another result in a row than alone")


def _packed_output(model: Any, *documents: torch.Tensor) -> torch.Tensor:
    lengths = [len(document) for document in documents]
    row = torch.cat(documents)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=row.device)
    positions = torch.cat([torch.arange(length, device=row.device) for length in lengths])
    return _output(
        model, input_ids=row[None], position_ids=positions[None], cu_seq_lens_q=bounds, cu_seq_lens_k=bounds,
        max_length_q=max(lengths), max_length_k=max(lengths),
    )[0]  # fmt: skip


def _output(model: Any, **inputs: Any) -> torch.Tensor:
    """Logits of every token `[1, length, vocabulary]`, or the hidden states of a model without a head."""
    return model(use_cache=False, **inputs)[0]


def make_bidirectional(model: PreTrainedModel) -> None:
    """Let the attention of a model see both sides, whose config has `is_causal` false.

    transformers (5.23) makes its masks by that setting. Where there is nothing to mask it makes none, and its attention
    functions read it of each layer, which stays causal: these are set here.
    """
    for module in model.modules():
        if getattr(module, "is_causal", None) is True:
            module.is_causal = False  # type: ignore[assignment]  # of an attention layer


def check_bidirectional(model: PreTrainedModel, name: str) -> None:
    """Refuse a model some of whose layers are known to read from left to right, as of hybrids, and one whose first token can't
    change with its last one, alone and next to padding.

    The latter catches what is on no list: recurrent layers, convolutions, masks that a model makes in its own way.
    """

    def refuse(why: str) -> Refusal:
        return Refusal(f"--model {name}: {type(model).__name__} {why}. Name another, such as a Llama, Qwen or ModernBERT.")

    if layers := layers_from_the_left(model.config, type(model)):
        raise refuse(f"has {layers}, which look to the left only and can't be made to look to both sides")
    vocabulary, device = model.config.get_text_config().vocab_size, next(model.parameters()).device
    tokens = torch.randint(0, vocabulary, (1, 9), generator=torch.Generator().manual_seed(0)).to(device)
    try:
        with evaluation_mode(model):
            for real in (9, 8):  # without padding, and before one token of it
                other, mask = tokens.clone(), torch.ones_like(tokens)
                other[0, real - 1] = (other[0, real - 1] + 1) % vocabulary
                mask[0, real:] = 0
                first, changed = (_output(model, input_ids=ids, attention_mask=mask)[0, 0] for ids in (tokens, other))
                if torch.equal(first, changed):
                    raise refuse("looks to the left only, and can't be made to look to both sides")
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # a mask that it does not make
        raise refuse(f"can't be made to look to both sides: its forward pass ends in {first_line(error)}") from error
