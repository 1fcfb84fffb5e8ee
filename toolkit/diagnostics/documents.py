"""Attention of many documents on fake tensors: the first and the last one are computed, the others hold as many bytes.

An operation on a fake tensor takes a tenth of a millisecond, and attention is computed document by document. What one keeps for
its backward depends on its shape, so that it is measured once for all layers. The first and the last document have their own
temporary tensors: in the forward pass the last one on top of what all others keep, in the backward the first one on top of all
gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from toolkit.models.attention.masks import Masks
from toolkit.system.devices import chosen_type

if TYPE_CHECKING:
    from toolkit.diagnostics.ledger import Ledger
    from toolkit.models.attention.kernels import Rules

Shape = tuple[Any, ...]
Kept = dict[Shape, tuple[int, tuple[Any, ...]]]  # of a document: bytes, and the masks that it shares with others


def first_and_last(
    ledger: Ledger, kept: Kept, original: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, lengths: list[int], key_lengths: list[int], rules: Rules, masks: Masks,
) -> torch.Tensor:  # fmt: skip
    """In the place of `one_by_one` of toolkit/models/attention/kernels.py; `kept` holds what was measured before."""
    if len(lengths) < 4:
        return original(query, key, value, lengths, key_lengths, rules, masks)
    whole = (query, key, value)

    def measured(length: int, keys: int) -> tuple[int, tuple[Any, ...]]:
        """Bytes that one such document keeps, without its output and its masks; and what masks those are."""
        states = [each[:, :, : length if each is query else keys] for each in whole]
        before, own = ledger.total, Masks(masks.device)
        # Not seen by layers that are recomputed, which count what is saved.
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
            output = original(*states, [length], [keys], rules, own)
        shared = sum(mask.nbytes for mask in own.values())
        return ledger.total - before - shared - output.untyped_storage().nbytes(), tuple(own)

    settings = (
        *((each.shape[1], each.shape[3], each.dtype, each.requires_grad) for each in whole),
        rules._replace(longest=None), torch.is_grad_enabled(), chosen_type(query.device),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
    )  # fmt: skip
    sizes = list(zip(lengths, key_lengths, strict=True))
    for size in sizes[1:-1]:
        if (*settings, size) not in kept:
            kept[(*settings, size)] = measured(*size)
    middle = sum(kept[(*settings, size)][0] for size in sizes[1:-1])
    for mask in {mask for size in set(sizes[1:-1]) for mask in kept[(*settings, size)][1]}:
        masks[mask]  # made where this row has none yet
    parts = [
        each.split([counts[0], sum(counts[1:-1]), counts[-1]], 2)
        for each, counts in ((query, lengths), (key, key_lengths), (value, key_lengths))
    ]
    first, others, last = zip(*parts, strict=True)
    one = original(*first, lengths[:1], key_lengths[:1], rules, masks).transpose(0, 1)[None]
    rest = _Kept.apply(_Others.apply(*others, one.dtype), middle)
    outputs = [one, rest]
    outputs.append(original(*last, lengths[-1:], key_lengths[-1:], rules, masks).transpose(0, 1)[None])
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


class _Others(torch.autograd.Function):
    """The outputs of documents that are not computed, and gradients of their queries, keys and values."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:  # fmt: skip
        ctx.inputs = [(states.shape, states.dtype) for states in (query, key, value)]
        return query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*(gradient.new_empty(shape, dtype=dtype) for shape, dtype in ctx.inputs), None)


class _Kept(torch.autograd.Function):
    """What such documents keep for their backward, a node of its own: it is gone before there are gradients."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, count: int) -> torch.Tensor:
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(output.new_empty(count, dtype=torch.uint8))
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
