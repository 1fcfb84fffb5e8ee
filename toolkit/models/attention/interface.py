"""Exact attention over packed rows, through transformers' attention interface, for any model that is on it.

A packed row reaches the model with the bounds of its documents (`cu_seq_lens_q`, transformers' own name), which travel
through the keyword arguments of its layers to the function registered here. No mask of the row's length squared is built.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from toolkit.config import Refusal
from toolkit.models.attention.kernels import Rules, fastest_kernel, flex_kernel, masked_attention
from toolkit.models.attention.masks import band, once_a_row
from toolkit.models.attention.packable import NotPackable, check_packable
from toolkit.models.compat import number_documents_without_waiting, takes_sdpa

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DOCUMENTS = "toolkit_documents"  # the fastest exact kernel for the device
FLEX = "toolkit_flex"  # the same, by flex attention
ATTENTION_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")  # its names in the configs

# Keyword arguments of transformers that reach an attention function and change nothing in it.
_HARMLESS = {
    "cache_position", "deterministic", "layer_idx", "logits_to_keep", "max_length_k", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "output_router_logits", "position_embeddings", "position_ids", "return_dict",
    "token_type_ids", "use_cache",
}  # fmt: skip


def register_attention() -> None:
    """Make `toolkit_documents` and `toolkit_flex` names that transformers models take as their attn_implementation.

    With document bounds in the call, attention is exact for each document. Without them it is transformers' sdpa, so that
    padding, generation and caches work as ever, with soft-capping, which sdpa itself refuses.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, kernel in ((DOCUMENTS, fastest_kernel), (FLEX, flex_kernel)):
        AttentionInterface.register(name, functools.partial(_attend, kernel=kernel))
        AttentionMaskInterface.register(name, _document_mask)
    number_documents_without_waiting({DOCUMENTS, FLEX})


def choose_attention(
    model_config: PretrainedConfig, requested: str, packed: bool, device: str | torch.device, model_class: type | None = None
) -> str | None:
    """The attn_implementation for a model's config and the setting --attn-implementation; registers ours when it is chosen.

    None leaves it to transformers: sdpa, or eager for a model without sdpa. Raises Refusal for a backend that is missing
    or has no effect, and for one, or a model, that would not be exact on packed rows.
    """
    device, flag = torch.device(device).type, f"--attn-implementation {requested}"
    text_config = model_config.get_text_config()
    softcap = getattr(text_config, "attn_logit_softcapping", None)
    if packed:
        check_packable(model_config, model_class)
    if requested in ("sdpa", "eager") and packed:
        raise Refusal(
            f"{flag}: with --packing it needs a mask of the row's length squared in every layer. "
            "Use --attn-implementation auto, which is exact and faster, or --no-packing."
        )
    if requested == "sdpa" and softcap:
        raise Refusal(f"{flag}: has no soft-capping, which model type {model_config.model_type!r} needs. Use auto or eager.")
    if requested == "varlen" and not packed:
        raise Refusal(f"{flag}: is for packed rows, and these are padded. Add --packing, or use auto.")
    if requested == "flash_attention_2" and (device != "cuda" or importlib.util.find_spec("flash_attn") is None):
        raise Refusal(f"{flag}: needs a CUDA device and the package flash-attn (pip install flash-attn). Or use auto.")
    if requested == "flex_attention" and device in ("cpu", "mps"):
        raise Refusal(f"{flag}: torch has no backward for it on {device}. Use auto.")
    if requested == "flex_attention" and any(getattr(text_config, name, None) for name in ATTENTION_DROPOUTS):
        raise Refusal(
            f"{flag}: has no attention dropout, which the model's config sets. Use auto, or --attention-dropout 0."
        )
    chosen = {"auto": DOCUMENTS if packed or softcap else None, "varlen": DOCUMENTS}.get(requested, requested)
    chosen = FLEX if packed and requested == "flex_attention" else chosen
    if chosen in (DOCUMENTS, FLEX):
        register_attention()
    return chosen


def take_attention_of_padded_rows(model: PreTrainedModel, requested: str, problem: NotPackable) -> None:
    """Give a model that turned out not to be packable transformers' own attention.

    Ours would refuse it in every forward pass over rows without padding, those of a sample or of an evaluation as well.
    """
    check_not_varlen(requested, problem)
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    own = "sdpa" if takes_sdpa(type(model)) and not softcap else "eager"
    model.set_attn_implementation(requested if requested == "flex_attention" else own)


def check_not_varlen(requested: str, problem: NotPackable) -> None:
    """Raise Refusal where attention for packed rows alone was requested, with the reason why there are none."""
    if requested == "varlen":
        raise Refusal(f"--attn-implementation varlen: is for packed rows, and {problem.what}. Use auto.")


def _document_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None, attention_mask: torch.Tensor | None = None, **kwargs: Any,
) -> torch.Tensor | None:  # fmt: skip
    """What transformers calls once a forward for each kind of layer: sdpa's mask, except where that would be quadratic.

    For a row that attends to itself without padding it returns the documents' numbers `[batch, length]`, as flash kernels
    get a two-dimensional mask: int64 for full attention, int32 for a sliding window, so that `_attend` notices when a
    model's mask and its call disagree about the window.
    """
    from transformers.masking_utils import sdpa_mask

    assert mask_function is not None
    square = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset == 0
    if square and attention_mask is None and not kwargs.get("use_vmap") and not torch.compiler.is_compiling():
        parts = dict(_parts_of(mask_function))
        windowed = not parts.keys().isdisjoint(_WINDOWS)
        packed = parts.get("packed_sequence_mask_function")
        if parts.keys() <= _UNDERSTOOD and (packed or windowed):
            shape, device = (batch_size, q_length), kwargs.get("device", "cpu")
            numbers = packed["packed_sequence_mask"] if packed else torch.zeros(shape, dtype=torch.int64, device=device)
            return numbers.int() if windowed else numbers
    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, **kwargs,
    )  # fmt: skip


_WINDOWS = {"sliding_window_overlay", "sliding_window_bidirectional_overlay"}
_UNDERSTOOD = _WINDOWS | {"causal_mask_function", "bidirectional_mask_function", "packed_sequence_mask_function"}


def _parts_of(mask_function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The conditions that a mask function of transformers combines, each as its maker's name and the values it encloses.

    Written for masking_utils of transformers 5.23. Whatever is built otherwise has a name that is not in `_UNDERSTOOD` and
    gets sdpa's dense mask: slow, never wrong.
    """
    cells = mask_function.__closure__ or ()
    enclosed = {name: cell.cell_contents for name, cell in zip(mask_function.__code__.co_freevars, cells, strict=True)}
    maker = mask_function.__qualname__.split(".")[0]
    if maker == "and_masks":
        for part in enclosed["mask_functions"]:
            yield from _parts_of(part)
    elif maker == "remap_positions_for_packed_sequence":
        yield from _parts_of(enclosed["mask_function"])
    else:
        yield maker, enclosed


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    *, kernel: Callable[..., torch.Tensor], dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    sliding_window: int | None = None, softcap: float | None = None, cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None, shared_keys: torch.Tensor | None = None, max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention of one layer as transformers calls it: query `[batch, heads, length, head_dim]`, key and value with the
    model's key/value heads; returns `[batch, length, heads, head_dim]`.

    With `shared_keys`, indices into the row, documents share tokens: their keys and values, bounded by `cu_seq_lens_k`, are
    the row's at these places, and `cu_seq_lens_q` bounds the tokens that are a document's own, its last ones.
    """
    who = type(module).__name__
    if kwargs.get("s_aux") is not None:
        raise NotPackable(who, "has attention sinks, which the packed attention does not have")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    rules = Rules(causal, sliding_window, scaling, softcap, dropout, longest=max_length_q)
    numbers = attention_mask if attention_mask is not None and attention_mask.ndim == 2 else None
    if cu_seq_lens_q is None and numbers is None:
        if softcap is not None:
            return _attend_softcapped(query, key, value, attention_mask, rules), None
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=causal, **kwargs
        )
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _HARMLESS)
    if unknown or key.shape[2] != query.shape[2]:
        what = f"uses {', '.join(unknown)}" if unknown else "attends to another sequence than its own"
        raise NotPackable(who, f"{what}, which is not known to be exact on packed rows")
    if numbers is not None and (numbers.dtype == torch.int32) != (sliding_window is not None):
        raise NotPackable(who, "and its mask disagree about its sliding window")
    bounds = cu_seq_lens_q if cu_seq_lens_q is not None else _bounds_of(cast(torch.Tensor, numbers))
    batch, heads, length, _ = query.shape
    query, key, value = (_as_one_row(states) for states in (query, key, value))
    if shared_keys is not None:
        key, value = key.index_select(2, shared_keys), value.index_select(2, shared_keys)
    output = kernel(query, key, value, bounds, rules, None if shared_keys is None else cu_seq_lens_k)
    return output.reshape(batch, length, heads, -1).contiguous(), None


def _attend_softcapped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rules: Rules
) -> torch.Tensor:
    """Soft-capped attention over padded rows or a cache, under sdpa's mask, where None means the plain causal one."""
    if mask is None and rules.causal and query.shape[2] > 1:
        # Aligned to the first key, like sdpa's own flag: a static cache is longer than what was written into it.
        mask = band(range(query.shape[2]), range(key.shape[2]), None, True, query.device)
    return masked_attention(query, key, value, mask, rules).transpose(1, 2).contiguous()


def _as_one_row(states: torch.Tensor) -> torch.Tensor:
    """`[batch, heads, length, head_dim]` to `[1, heads, batch * length, head_dim]`."""
    return states if states.shape[0] == 1 else states.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)


@once_a_row
def _bounds_of(numbers: torch.Tensor) -> torch.Tensor:
    """Bounds of documents `[documents + 1]` from their numbers `[batch, length]`; the end of a row ends one."""
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    found = starts.flatten().nonzero().flatten()
    return torch.cat([found, found.new_tensor([numbers.numel()])]).int()
