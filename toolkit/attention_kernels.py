"""Attention within each document of a packed row, by whatever the device does best.

Every kernel takes query `[1, heads, tokens, head_dim]`, key and value with the model's key/value heads, and the documents'
bounds int32 `[documents + 1]`, and returns `[tokens, heads, head_dim]`. With `key_bounds` the keys are others than the
queries: of each document the queries are the last tokens, and the keys before them were computed elsewhere in the row.
"""

import functools
import importlib.util
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import dropout, scaled_dot_product_attention

from toolkit.attention_groups import groups_of, with_grouped_backward
from toolkit.config import Refusal

CHUNK = 256  # queries handled together where scores are written out: memory is CHUNK x keys, never length squared


class Rules(NamedTuple):
    """How the tokens of a document attend to each other."""

    causal: bool
    window: int | None  # a token sees window - 1 neighbours before it, and after it where attention is bidirectional
    scaling: float | None  # of the scores; None: 1 / sqrt(head_dim)
    softcap: float | None  # scores become softcap * tanh(scores / softcap)
    dropout: float
    longest: int | None  # tokens of the longest document, if the caller knows


def fastest_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, rules: Rules,
    key_bounds: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch's variable-length flash attention or flex attention on CUDA, else a loop over the documents."""
    if query.is_cuda and not rules.dropout:  # neither of the two has dropout
        half = value.dtype in (torch.bfloat16, torch.float16)
        if half and rules.softcap is None and query.shape[-1] == value.shape[-1] <= 256 and _varlen_is_there(query.device):
            return varlen_kernel(query, key, value, bounds, rules, key_bounds)
        if value.dtype != torch.float64:
            return flex_kernel(query, key, value, bounds, rules, key_bounds)
    return loop_kernel(query, key, value, bounds, rules, key_bounds)


@functools.cache
def _varlen_is_there(device: torch.device) -> bool:
    there = importlib.util.find_spec("torch.nn.attention.varlen") is not None and torch.version.cuda is not None
    return there and torch.cuda.get_device_capability(device) >= (8, 0)


def varlen_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, rules: Rules,
    key_bounds: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.attention.varlen: bfloat16 and float16 on CUDA, Ampere or later."""
    from torch.nn.attention.varlen import varlen_attn

    key_bounds = bounds if key_bounds is None else key_bounds
    longest = rules.longest if rules.longest is not None else int(key_bounds.diff().max())
    before = -1 if rules.window is None else rules.window - 1
    # Norms on q and k (Qwen3) return float32 under autocast, which a custom operator does not cast back.
    q, k, v = query[0].transpose(0, 1).to(value.dtype), key[0].transpose(0, 1).to(value.dtype), value[0].transpose(0, 1)
    output = varlen_attn(
        q, k, v, bounds, key_bounds, longest, longest, scale=rules.scaling, window_size=(before, 0 if rules.causal else before),
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(output, torch.Tensor)  # a pair only when more is asked for
    return output


def flex_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, rules: Rules,
    key_bounds: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.attention.flex_attention, which also has soft-capping and float32. torch has no backward for it on a CPU."""
    if rules.dropout:
        raise Refusal("--attn-implementation flex_attention: has no attention dropout. Use auto, or --dropout 0.")
    softcap = rules.softcap

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap) if softcap is not None else score

    block_mask = _block_mask(bounds, key_bounds, query.shape[2], key.shape[2], rules)
    output = _flex_attention(query.is_cuda)(
        query.to(value.dtype), key.to(value.dtype), value, block_mask=block_mask,
        scale=rules.scaling, score_mod=None if softcap is None else capped, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return output[0].transpose(0, 1)


@functools.cache
def _flex_attention(compiled: bool) -> Callable[..., torch.Tensor]:
    """Compiled where it trains; uncompiled it is a slow reference, enough to check the masks on a CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention  # type: ignore[return-value]  # overloads


_block_masks: dict[tuple[int | None, bool], tuple[weakref.ref[torch.Tensor], Any]] = {}


@torch.compiler.disable  # it looks at the identity of a tensor
def _block_mask(
    bounds: torch.Tensor, key_bounds: torch.Tensor | None, length: int, key_length: int, rules: Rules
) -> Any:
    """Flex attention's block mask of a row: made by the first layer of each kind, kept for the others and for the backward."""
    from torch.nn.attention.flex_attention import create_block_mask

    kind = (rules.window, rules.causal)
    kept = _block_masks.get(kind)
    if kept is not None and kept[0]() is bounds:
        return kept[1]
    key_bounds = bounds if key_bounds is None else key_bounds
    document = torch.bucketize(torch.arange(length, device=bounds.device), bounds[1:], right=True)
    document_of_key = torch.bucketize(torch.arange(key_length, device=bounds.device), key_bounds[1:], right=True)
    place = (torch.arange(length, device=bounds.device) - bounds[1:][document]) + key_bounds[1:][document]  # among the keys

    def sees(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        visible = document[q] == document_of_key[k]
        if rules.causal:
            visible = visible & (k <= place[q])
        if rules.window is not None:
            visible = visible & ((place[q] - k).abs() < rules.window)
        return visible

    made = create_block_mask(sees, None, None, length, key_length, device=bounds.device, _compile=bounds.is_cuda)
    _block_masks[kind] = (weakref.ref(bounds), made)
    return made


@torch.compiler.disable  # the number of documents is data: a graph of the loop would fit one row
def loop_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, rules: Rules,
    key_bounds: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """One call for each document: any device, any type, dropout. The backward of short ones in bfloat16 on a CPU is in groups.

    Split, not sliced: the backward of a slice fills a tensor of the whole row, which made 431 documents of 19 tokens 11 to
    30 times slower. Batching documents of equal or rounded length was no faster either.
    """
    if query.device.type == "mps":  # no grouped heads under a mask there before torch 2.13
        key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (key, value))
    lengths = bounds.diff().tolist()
    key_lengths = lengths if key_bounds is None else key_bounds.diff().tolist()

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        documents = zip(query.split(lengths, 2), key.split(key_lengths, 2), value.split(key_lengths, 2), strict=True)
        return torch.cat([_one_document(*document, rules) for document in documents], dim=2)[0].transpose(0, 1)

    plain = rules.softcap is None and not rules.dropout
    if query.device.type == "cpu" and value.dtype == torch.bfloat16 and plain and torch.is_grad_enabled():
        groups = groups_of(bounds, key_bounds, query.shape[1], rules.causal, rules.window)
        if groups is not None:
            return with_grouped_backward(attend, query, key, value, groups, rules.scaling)
    return attend(query, key, value)


def _one_document(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: Rules) -> torch.Tensor:
    length, window = query.shape[2], rules.window
    before = key.shape[2] - length  # keys before the first query's own
    if window is not None and window >= before + length:
        window = None
    if window is None and rules.softcap is None and not rules.dropout and not before:
        return scaled_dot_product_attention(query, key, value, is_causal=rules.causal, scale=rules.scaling, enable_gqa=True)
    outputs = []
    for start in range(0, length, CHUNK):
        end = min(start + CHUNK, length)
        places = range(before + start, before + end)
        first = 0 if window is None else max(0, places.start - window + 1)
        last = key.shape[2] if window is None else min(key.shape[2], places.stop + window - 1)
        seen = band(places, range(first, places.stop if rules.causal else last), window, rules.causal, query.device)
        states = query[:, :, start:end], key[:, :, first : first + seen.shape[1]], value[:, :, first : first + seen.shape[1]]
        outputs.append(masked_attention(*states, seen, rules))
    return torch.cat(outputs, dim=2)


def band(queries: range, keys: range, window: int | None, causal: bool, device: torch.device) -> torch.Tensor:
    """Which keys of a document which queries see: bool `[queries, keys]`."""
    distance = torch.arange(queries.start, queries.stop, device=device)[:, None]
    distance = distance - torch.arange(keys.start, keys.stop, device=device)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor | None, rules: Rules
) -> torch.Tensor:
    """Attention under a mask (True: seen); soft-capped, its softmax is in float32 at least, as in transformers' Gemma 2."""
    if rules.softcap is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=seen, dropout_p=rules.dropout, scale=rules.scaling, enable_gqa=True
        )
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (rules.scaling if rules.scaling is not None else query.shape[-1] ** -0.5)
    scores = rules.softcap * torch.tanh(scores / rules.softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return dropout(weights, p=rules.dropout) @ value
