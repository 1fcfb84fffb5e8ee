"""Losses and log-probabilities of tokens over chunks of positions: never more than a chunk's logits in memory.

A sum of token losses takes its gradient on the way (`sums_in_chunks`). How much a token's log-probability counts may be known
only later, when the answers of a pair are compared: those make the logits of a chunk again in backward (`values_in_chunks`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from toolkit.data.loading.batch import precise
from toolkit.losses.token_losses import TokenLogps, runs_as_kernel, token_losses
from toolkit.metrics.metric import precise_sum
from toolkit.system.devices import chosen_type

Logits = Callable[[torch.Tensor], torch.Tensor]
Sums = tuple[torch.Tensor, torch.Tensor]
SumsAndGradients = tuple[torch.Tensor, Sequence[Any]]  # tensors, and None for what is not in the graph
GradientsOf = Callable[[slice, torch.Tensor, Sequence[torch.Tensor]], SumsAndGradients]  # of a piece, its rows, what is wanted
SumsOf = Callable[[slice, torch.Tensor, torch.Tensor | None], torch.Tensor]  # of a piece, its logits, room for their gradient
ValuesOf = SumsOf
OfChunk = Callable[[slice, torch.Tensor], torch.Tensor]  # of a piece of the positions and its rows


def rows_in_a_chunk(vocabulary: int, device: torch.device) -> int:
    """How many positions have their logits in memory at a time.

    Each chunk adds to the head's gradient once, so few large chunks cost least: 1 GiB of float32 on an accelerator (1,766 rows
    for Qwen3's 152 k tokens, at most 4,096), a quarter of that on a CPU (2,048 rows for 32 k tokens: 2 to 5 % over all at
    once). With a small vocabulary on a CPU the head fits its cache, and so should the logits (1,024 rows for 4 k tokens: 0.6
    to 0.75 of the time of all at once, for 8,192 and 2,048 rows).
    """
    if chosen_type(device) != "cpu":
        return min(4096, max(256, 2**28 // vocabulary))
    return 2**22 // vocabulary if vocabulary <= 8192 else max(256, 2**26 // vocabulary)


def sums_in_chunks(
    logits_of: Logits,
    parameters: Sequence[nn.Parameter],
    rows: torch.Tensor,
    targets: torch.Tensor,
    vocabulary: int,
    label_smoothing_factor: float = 0.0,
    z_loss: float = 0.0,
    weights: torch.Tensor | None = None,
) -> Sums:
    """Loss and correct predictions summed over positions, 0-d, never with more than a chunk's logits in memory.

    `rows` `[P, width]`, of which `logits_of` makes logits `[P, vocabulary]` with the help of `parameters`; `targets` `[P]`;
    `weights` `[P]`, what each position counts in both sums. The gradient reaches rows and parameters.
    """

    def sums_of(piece: slice, logits: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        of_piece, correct = None if weights is None else weights[piece], torch.empty_like(targets[piece], dtype=torch.bool)
        losses = token_losses(logits, targets[piece], label_smoothing_factor, z_loss, of_piece, gradient, correct)
        return torch.stack([precise_sum(losses), precise_sum(correct if of_piece is None else correct * of_piece)])

    loss, correct = added_in_chunks(sums_of, logits_of, parameters, rows, vocabulary, copied=False)
    return loss, correct


def added_in_chunks(
    sums_of: SumsOf,
    logits_of: Logits,
    parameters: Sequence[nn.Parameter],
    rows: torch.Tensor,
    vocabulary: int,
    copied: bool = True,
) -> torch.Tensor:
    """The sums that `sums_of(piece, logits, gradient)`, `[n]`, makes of a piece of the positions, added over all pieces: `[n]`.

    The first is a loss, whose gradient reaches rows and parameters; the others have none. `rows` `[P, width]`, of which
    `logits_of` makes logits `[P, vocabulary]`, a chunk at a time. `sums_of` gets them without a graph, and fills `gradient`,
    where it is given, with that of the loss; mostly it is the logits themselves. `copied`: whether it makes more as large.
    """

    def gradients_of(piece: slice, chunk: torch.Tensor, wanted: Sequence[torch.Tensor]) -> SumsAndGradients:
        logits, gradient = _logits_and_room(logits_of, chunk)
        sums = sums_of(piece, logits.detach(), gradient)
        return sums, _gradients(logits, wanted, gradient)

    pieces = _pieces(rows, vocabulary, copied)
    if torch.is_grad_enabled() and (rows.requires_grad or parameters):
        loss, *others = _SumsWithGradients.apply(gradients_of, pieces, rows, *parameters)
        return torch.stack([loss, *others])
    return torch.stack([sums_of(piece, logits_of(rows[piece]), None) for piece in pieces]).sum(0)


def _pieces(rows: torch.Tensor, vocabulary: int, copied: bool = True) -> list[slice]:
    """Chunks of the positions: one, empty, where there are none, so that sums and gradients are zeros.

    Logits of which no copy in float32 is made may be twice as many.
    """
    size = rows_in_a_chunk(vocabulary, rows.device)
    kind = rows.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
    if not copied and dtype.itemsize == 2 and runs_as_kernel(rows.device, dtype):
        size = min(4096, 2 * size)
    return [slice(start, start + size) for start in range(0, max(len(rows), 1), size)]


def _logits_and_room(logits_of: Logits, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of rows, and memory for their gradient: their own, unless something else needs them.

    That is a head whose backward does (one with a soft-cap in it), or logits that are the rows. A linear head's does not.
    """
    needed = {StorageWeakRef(rows.untyped_storage())}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        needed.add(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        logits = logits_of(rows)
    is_free = StorageWeakRef(logits.untyped_storage()) not in needed
    return logits, logits.detach() if is_free else torch.empty_like(logits)


def _gradients(
    of: torch.Tensor, wanted: Sequence[torch.Tensor], gradient: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, ...]:
    """Backward in the types of forward, not in those that autocast would choose for its operations."""
    with torch.autocast(of.device.type, enabled=False):
        return torch.autograd.grad(of, wanted, gradient, allow_unused=True)


class _SumsWithGradients(torch.autograd.Function):
    """A sum over chunks that takes its gradient while the logits of a chunk are there.

    The same products as keeping the logits for backward, in less memory; making them again in backward would be one matrix
    product more on three. (The idea of Liger's fused linear cross-entropy, arXiv:2410.10989, with autograd's own gradient,
    so that any head works.) These are gradients of a sum, of order one at each position: fp16 needs no scale for them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gradients_of: GradientsOf,
        pieces: list[slice],
        rows: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        of_rows = torch.empty_like(rows) if rows.requires_grad else None
        of_parameters: list[torch.Tensor | None] = [None] * len(parameters)
        sums = []
        for piece in pieces:
            chunk = rows[piece].detach().requires_grad_(rows.requires_grad)
            wanted = (chunk, *parameters) if chunk.requires_grad else parameters
            each, gradients = gradients_of(piece, chunk, wanted)
            if of_rows is not None:
                of_rows[piece] = gradients[0]
            _add(of_parameters, gradients[len(wanted) - len(parameters) :])
            sums.append(each)
        ctx.gradients = [of_rows, *(g if g is None else g.to(p.dtype) for g, p in zip(of_parameters, parameters, strict=True))]
        loss, *others = (total.clone() for total in torch.stack(sums).sum(0))
        ctx.mark_non_differentiable(*others)
        return loss, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_sums: torch.Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("The gradient of this loss was taken before: it is kept for one backward only.")
        # in place: a copy of the head's gradient could be the largest tensor of the step
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *(g if g is None else g.mul_(of_sums[0]) for g in gradients)


def _add(total: list[torch.Tensor | None], terms: Sequence[torch.Tensor | None]) -> None:
    """Add in place, in float32 or wider: small terms would vanish in a bfloat16 sum."""
    for i, term in enumerate(terms):
        before = total[i]
        if term is None:
            continue
        if before is not None:
            before.add_(term)
            continue
        term = precise(term).contiguous()
        # autograd may hand one tensor to two parameters that are added to each other
        shared = any(other is not None and other.data_ptr() == term.data_ptr() for other in total)
        total[i] = term.clone() if shared else term


def logps_in_chunks(
    logits_of: Logits, parameters: Sequence[nn.Parameter], rows: torch.Tensor, targets: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """Log-probability of the target at each position `[P]`, float32 or wider: `values_in_chunks` of cross-entropy."""

    def logps(piece: slice, logits: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        if gradient is None:
            return -token_losses(logits, targets[piece])
        return TokenLogps.apply(logits, targets[piece], gradient)

    return values_in_chunks(logps, logits_of, parameters, rows, vocabulary)


def values_in_chunks(
    values_of: ValuesOf, logits_of: Logits, parameters: Sequence[nn.Parameter], rows: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """What `values_of(piece, logits, gradient)` makes of the logits of a piece of the positions, `[P]` or `[P, n]` in all.

    `rows` `[P, width]`, of which `logits_of` makes logits `[P, vocabulary]`; `gradient` is room for their gradient, mostly they
    themselves, and None where there is to be none. Where these are more than a chunk, each chunk's are made again in backward:
    a third more work in the head, and never more than a chunk of them in memory.
    """

    def of_chunk(piece: slice, chunk: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return values_of(piece, logits_of(chunk), None)
        return values_of(piece, *_logits_and_room(logits_of, chunk))

    pieces = _pieces(rows, vocabulary, copied=False)
    if len(pieces) == 1:
        return of_chunk(pieces[0], rows)
    if torch.is_grad_enabled() and (rows.requires_grad or parameters):
        return _ValuesRecomputed.apply(of_chunk, pieces, rows, *parameters)
    return torch.cat([of_chunk(piece, rows[piece]) for piece in pieces])


class _ValuesRecomputed(torch.autograd.Function):
    """Values, as log-probabilities, whose logits live for a chunk, in forward and again in backward.

    Unlike a sum of losses, how much each token counts is known only when the answers of a pair have been compared, so the
    gradient can't be taken on the way. The second time the head draws the random numbers of the first: an adapter on it may
    have dropout.
    """

    @staticmethod
    def forward(
        ctx: Any, of_chunk: OfChunk, pieces: list[slice], rows: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.of_chunk, ctx.pieces, ctx.parameters = of_chunk, pieces, parameters
        ctx.save_for_backward(rows)
        kind = rows.device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.autocast = {"device_type": kind, "dtype": dtype, "enabled": enabled}
        ctx.random_states = _random_states(rows.device)
        return torch.cat([of_chunk(piece, rows[piece]) for piece in pieces])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_values: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        of_rows = torch.empty_like(rows) if rows.requires_grad else None
        of_parameters = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in ctx.parameters]
        with _drawing_again(ctx.random_states, rows.device):
            for piece in ctx.pieces:
                chunk = rows[piece].detach().requires_grad_(rows.requires_grad)
                with torch.enable_grad(), torch.autocast(**ctx.autocast):
                    values = ctx.of_chunk(piece, chunk)
                wanted = (chunk, *ctx.parameters) if rows.requires_grad else ctx.parameters
                gradients = list(torch.autograd.grad(values, wanted, of_values[0][piece], allow_unused=True))
                if of_rows is not None:
                    of_rows[piece] = gradients.pop(0)
                for total, term in zip(of_parameters, gradients, strict=True):
                    if term is not None:
                        total.add_(term)
        given = [total.to(p.dtype) for total, p in zip(of_parameters, ctx.parameters, strict=True)]
        return None, None, of_rows, *given


def _random_states(device: torch.device) -> list[torch.Tensor]:
    """States of the generators that a module on `device` may draw from: the CPU's and the device's own."""
    own = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *own]


@contextmanager
def _drawing_again(states: list[torch.Tensor], device: torch.device) -> Iterator[None]:
    """The generators as they were when `states` were taken; afterwards as they are now."""
    own = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(own, device_type=device.type):
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.get_device_module(device).set_rng_state(state, device)
        yield
