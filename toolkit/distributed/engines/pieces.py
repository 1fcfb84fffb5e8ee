"""Sharded tensors brought together, and taken apart again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import nn

from toolkit.distributed.engines.engine import Piece

if TYPE_CHECKING:
    from accelerate import Accelerator

# One rank gives an element its bits, all others zeros: a sum of whole numbers keeps them as they are, also those of -0.0.
_BITS = {4: torch.int32, 8: torch.int64}


def whole_tensor(piece: Piece, laid_out: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """A parameter, or a moment of it, of the pieces of all ranks: on the CPU of rank 0, None elsewhere. A collective.

    `laid_out`: the owner, or a tensor laid out like it. `device`: where the ranks can exchange.
    """
    whole = torch.zeros(piece.shape, dtype=laid_out.dtype, device=device)
    piece.of_whole(whole).copy_(piece.of(laid_out))
    add_up(whole, everywhere=False)
    return whole.cpu() if torch.distributed.get_rank() == 0 else None


def whole_state_dict(accelerator: Accelerator | None, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Parameters and persistent buffers by name: trained ones as the optimizer has them, a tied one under its first name.

    Of a sharded model on the CPU of the main process, gathered one by one, and None on the others: a collective. Of any
    other the live tensors, on every rank. `model` is the unwrapped one.
    """
    from toolkit.distributed.engines import engine_of

    engine = engine_of(accelerator) if accelerator else None
    if accelerator is None or engine is None or engine.whole_parameters is None:
        first = {name for name, _ in model.named_parameters()}
        later = {name for name, _ in model.named_parameters(remove_duplicate=False)} - first
        return {name: tensor for name, tensor in model.state_dict().items() if name not in later}
    assert engine.pieces is not None
    keeps, state = accelerator.is_main_process, {}
    trained = {piece.parameter: piece for piece in engine.pieces(accelerator, model, None)}
    for name, piece in trained.items():
        whole = whole_tensor(piece, piece.laid_out, accelerator.device)
        if whole is not None:
            state[name] = whole
    if len(trained) < sum(1 for _ in model.named_parameters()):
        # Copied: what the engine gathered is gone as soon as the next one is.
        frozen = ((name, whole) for name, whole in engine.whole_parameters(model) if name not in trained)
        state |= {name: whole.to("cpu", copy=True) for name, whole in frozen if keeps}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state |= {name: buffer.cpu() for name, buffer in model.state_dict().items() if name not in parameters and keeps}
    return state if keeps else None


def add_up(parts: torch.Tensor, *, everywhere: bool) -> None:
    """Fill in, in place, what other ranks have of a tensor that is zero wherever this rank has nothing."""
    if torch.distributed.get_world_size() == 1:
        return
    bits = parts.view(_BITS.get(parts.element_size(), torch.uint8))
    if everywhere:
        torch.distributed.all_reduce(bits)
    else:
        torch.distributed.reduce(bits, dst=0)


class OfWholeMatrices(Protocol):
    """An optimizer whose update of a matrix needs all of it: it is given how its parameters are cut, once."""

    needs_pieces: bool
    pieces: list[Piece]
    device: torch.device  # where the ranks can exchange


def bring_pieces(optimizer: torch.optim.Optimizer, device: torch.device, find: Callable[[], list[Piece]]) -> None:
    """Give the pieces to an optimizer of whole matrices. Others update element by element."""
    if getattr(optimizer, "needs_pieces", False):
        of_matrices = cast(OfWholeMatrices, optimizer)
        of_matrices.pieces, of_matrices.device, of_matrices.needs_pieces = find(), device, False
