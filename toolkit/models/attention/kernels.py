"""Attention within each document of a packed row, by whatever the device does best.

Every kernel takes query `[1, heads, tokens, head_dim]`, key and value with the model's key/value heads, and the documents'
bounds int32 `[documents + 1]`, and returns `[tokens, heads, head_dim]`. With `key_bounds` the keys are others than the
queries: of each document the queries are the last tokens, and the keys before them were computed elsewhere in the row.
"""

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import dropout, pad, scaled_dot_product_attention

from toolkit.config import Refusal
from toolkit.models.attention.groups import TINY, grouped_attention, groups_of
from toolkit.models.attention.masks import Masks, masks_of, once_a_row
from toolkit.models.compat import flash_attention
from toolkit.system.devices import chosen_type, is_ampere

CHUNK = 256  # queries handled together where scores are written out: memory is CHUNK x keys, never length squared
BLOCK = 128  # tokens in a block of flex attention, torch's own choice
LEAST_OF_FLEX = 16  # the smallest head dimension that flex attention is compiled for on CUDA


class Rules(NamedTuple):
    """How the tokens of a document attend to each other."""

    causal: bool
    window: int | None  # a token sees window - 1 neighbors before it, and after it where attention is bidirectional
    scaling: float | None  # of the scores; None: 1 / sqrt(head_dim)
    softcap: float | None  # scores become softcap * tanh(scores / softcap)
    dropout: float
    longest: int | None  # tokens of the longest document, if the caller has it


def fastest_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, rules: Rules,
    key_bounds: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch's variable-length flash attention or flex attention on CUDA, else a loop over the documents."""
    if chosen_type(query.device) == "cuda":
        if varlen_computes(query.shape[-1], value.shape[-1], value.dtype, rules) and _is_ampere(query.device):
            return varlen_kernel(query, key, value, bounds, rules, key_bounds)
        # in a plan for CUDA the loop takes the place of flex attention, which has no backward of other tensors
        if query.is_cuda and flex_computes(value.dtype, rules):
            return flex_kernel(query, key, value, bounds, rules, key_bounds)
    return loop_kernel(query, key, value, bounds, rules, key_bounds)


def varlen_computes(head_dim: int, value_dim: int, dtype: torch.dtype, rules: Rules) -> bool:
    """Whether variable-length flash attention computes this, on a device that has it."""
    widest = 192 if rules.dropout else 256  # whose backward every such device has
    return rules.softcap is None and dtype in (torch.bfloat16, torch.float16) and max(head_dim, value_dim) <= widest


def flex_computes(dtype: torch.dtype, rules: Rules) -> bool:
    """The same of compiled flex attention."""
    return not rules.dropout and dtype != torch.float64


@torch.compiler.assume_constant_result  # in a compiled layer: called while it is compiled, and no break in its graph
def _is_ampere(device: torch.device) -> bool:
    return is_ampere(device)


def varlen_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, rules: Rules,
    key_bounds: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch's flash attention of variable lengths: bfloat16 and float16 on CUDA, Ampere or later."""
    key_bounds = bounds if key_bounds is None else key_bounds
    longest = rules.longest if rules.longest is not None else max(lengths_of(key_bounds))
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    width = -(-max(head_dim, value_dim) // 8) * 8  # one for all three, and a multiple of 8
    # Norms on q and k (Qwen3) return float32 under autocast, which the operator does not cast back.
    q, k, v = (_widened(states.squeeze(0).to(value.dtype), width).transpose(0, 1) for states in (query, key, value))
    scale = head_dim**-0.5 if rules.scaling is None else rules.scaling
    output = flash_attention(q, k, v, bounds, key_bounds, longest, rules.causal, rules.window, scale, rules.dropout)
    return output if width == value_dim else output[..., :value_dim]


def _widened(states: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros behind the last dimension, which change no score and are cut off the output."""
    return states if states.shape[-1] >= width else pad(states, (0, width - states.shape[-1]))


def flex_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, rules: Rules,
    key_bounds: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.attention.flex_attention, which also has soft-capping and float32. torch has no backward for it on a CPU."""
    if rules.dropout:
        raise Refusal("--attn-implementation flex_attention: has no attention dropout. Use auto, or --attention-dropout 0.")
    block_mask = _block_mask(bounds, key_bounds, query.shape[2], key.shape[2], rules.causal, rules.window)
    scale = query.shape[-1] ** -0.5 if rules.scaling is None else rules.scaling
    q, k, v = (_widened(states.to(value.dtype), LEAST_OF_FLEX) for states in (query, key, value))
    output = _flex_attention(query.is_cuda)(
        q, k, v, block_mask=block_mask, scale=scale, score_mod=None if rules.softcap is None else _capped(rules.softcap),
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return output[0].transpose(0, 1)[..., : value.shape[-1]]


_capping: dict[float, Callable[..., torch.Tensor]] = {}


@torch.compiler.assume_constant_result
def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    """Soft-capping of scores, with the number in the function's code.

    torch.compile (2.13) makes a variable of a number that a function encloses, which flex attention doesn't take; and one that
    is a default value it takes for that of every other such function.
    """
    if softcap not in _capping:
        _capping[softcap] = eval(f"lambda score, *_: {softcap!r} * tanh(score / {softcap!r})", {"tanh": torch.tanh})
    return _capping[softcap]


@functools.cache
def _flex_attention(compiled: bool) -> Callable[..., torch.Tensor]:
    """Compiled where it trains; uncompiled it is a slow reference, enough to check the masks on a CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention  # type: ignore[return-value]  # overloads


_block_masks: dict[tuple[bool, int | None], tuple[weakref.ref[torch.Tensor], Any]] = {}


@torch.compiler.disable  # it looks at the identity of a tensor
def _block_mask(
    bounds: torch.Tensor, key_bounds: torch.Tensor | None, length: int, key_length: int, causal: bool, window: int | None
) -> Any:
    """Flex attention's block mask of a row: made by the first layer of each kind, kept for the others and for the backward.

    What a token sees is a range of keys, so that blocks can be judged by the ends of their tokens' ranges: torch's (2.13)
    `create_block_mask` writes out a mask of the row's length squared, or is compiled for it.
    """
    from torch.nn.attention.flex_attention import BlockMask

    kept = _block_masks.get((causal, window))
    if kept is not None and kept[0]() is bounds:
        return kept[1]
    key_bounds = bounds if key_bounds is None else key_bounds
    tokens = torch.arange(length, dtype=torch.int32, device=bounds.device)
    document = torch.bucketize(tokens, bounds[1:], right=True)
    place = tokens - bounds[1:][document] + key_bounds[1:][document]  # among the keys
    first, end = key_bounds[:-1][document], place + 1 if causal else key_bounds[1:][document]
    if window is not None:
        first, end = torch.maximum(first, place - window + 1), torch.minimum(end, place + window)

    def sees(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (first[q] <= k) & (k < end[q])

    some, whole = _blocks(first, end, key_length)
    lists = [_as_lists(some & ~whole), _as_lists(whole)]
    made = BlockMask.from_kv_blocks(*lists[0], *lists[1], BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, key_length))
    _block_masks[causal, window] = (weakref.ref(bounds), made)
    return made


def _blocks(first: torch.Tensor, end: torch.Tensor, key_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which blocks of keys some token of a block of tokens may see, and which all of them see whole: bool `[blocks, blocks]`.

    `first`, `end` `[tokens]`: the range of keys that each token sees. Where ranges leave a gap between them, a block in it is
    among the first, as its tokens are looked at one by one anyway.
    """
    missing = -len(first) % BLOCK  # tokens that fill the last block: they see nothing
    firsts = pad(first, (0, missing), value=key_length).view(-1, BLOCK)
    ends = pad(end, (0, missing), value=0).view(-1, BLOCK)
    begins = torch.arange(0, key_length, BLOCK, device=first.device)
    some = (firsts.amin(1)[:, None] < begins + BLOCK) & (ends.amax(1)[:, None] > begins)
    return some, (firsts.amax(1)[:, None] <= begins) & (ends.amin(1)[:, None] >= begins + BLOCK)


def _as_lists(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As flex attention takes them: how many blocks of keys each block of tokens has, and which, these first."""
    return blocks.sum(1).int()[None, None], blocks.int().argsort(dim=1, descending=True, stable=True).int()[None, None]


@once_a_row
def lengths_of(bounds: torch.Tensor) -> list[int]:
    """Lengths of the documents between bounds."""
    lengths: list[int] = bounds.diff().tolist()
    return lengths


@torch.compiler.disable  # the number of documents is data: a graph of the loop would fit one row
def loop_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, rules: Rules,
    key_bounds: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """One call for each document: any device, any type, dropout. On a CPU groups: of tiny ones, of short ones in
    bfloat16 or under dropout.

    Split, not sliced: the backward of a slice fills a tensor of the whole row, which made 431 documents of 19 tokens 11 to
    30 times slower. Groups of documents that are not tiny are no faster: in float32 from about 20 tokens and 8 heads on.
    """
    if query.device.type == "mps":  # no grouped heads under a mask there before torch 2.13
        key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (key, value))
    lengths = lengths_of(bounds)
    key_lengths = lengths if key_bounds is None else lengths_of(key_bounds)
    masks = masks_of(bounds)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return one_by_one(query, key, value, lengths, key_lengths, rules, masks)

    if chosen_type(query.device) == "cpu" and rules.softcap is None and value.dtype in (torch.bfloat16, torch.float32):
        in_half, drops = value.dtype == torch.bfloat16, rules.dropout > 0
        tiny = query.shape[1] * sum(map(operator.mul, lengths, key_lengths)) <= TINY * len(lengths)
        if tiny or drops or (in_half and torch.is_grad_enabled()):
            groups = groups_of(bounds, key_bounds, query.shape[1], rules.causal, rules.window)
            if groups is not None:
                whole = None if tiny or drops else attend
                return grouped_attention(query, key, value, groups, rules.scaling, whole, rules.dropout)
    return attend(query, key, value)


def one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], key_lengths: list[int], rules: Rules,
    masks: Masks,
) -> torch.Tensor:  # fmt: skip
    """Attention of each document of the row, `[tokens, heads, head_dim]`."""
    documents = zip(query.split(lengths, 2), key.split(key_lengths, 2), value.split(key_lengths, 2), strict=True)
    return torch.cat([_one_document(*document, rules, masks) for document in documents], dim=2)[0].transpose(0, 1)


def _one_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: Rules, masks: Masks
) -> torch.Tensor:
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
        keys = slice(first, places.stop if rules.causal else last)
        mask = masks[places.start - first, end - start, keys.stop - first, window, rules.causal, query.dtype]
        outputs.append(masked_attention(query[:, :, start:end], key[:, :, keys], value[:, :, keys], mask, rules))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rules: Rules
) -> torch.Tensor:
    """Attention under a mask, of booleans (True: seen) or of numbers added to the scores.

    Soft-capped, its softmax is in float32 at least, as in transformers' Gemma 2.
    """
    if rules.softcap is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=rules.dropout, scale=rules.scaling, enable_gqa=True
        )
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (rules.scaling if rules.scaling is not None else query.shape[-1] ** -0.5)
    scores = rules.softcap * torch.tanh(scores / rules.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return dropout(weights, p=rules.dropout) @ value
