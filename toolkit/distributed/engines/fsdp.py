"""FSDP2: parameters, gradients and the optimizer's state as DTensors, sharded by rows over the ranks."""

from collections.abc import Iterator
from typing import Any

import torch

from toolkit.distributed.engines.engine import Engine, Piece, local_part
from toolkit.distributed.engines.pieces import bring_pieces
from toolkit.distributed.engines.plain import accumulating, backward, squared_norm


@torch.no_grad()
def clip_and_update(
    accelerator: Any, model: Any, optimizer: Any, loss: torch.Tensor, max_grad_norm: float
) -> dict[str, torch.Tensor]:
    """The norm is over all shards; every rank gets the same one."""
    plain = getattr(optimizer, "optimizer", optimizer)
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    squares = squared_norm(gradients).to(accelerator.device)
    torch.distributed.all_reduce(squares)
    norm = squares.sqrt()
    finite = torch.isfinite(norm) & torch.isfinite(loss)
    if bool(finite):
        share = max_grad_norm / (float(norm) + 1e-6)  # torch's own clipping has this 1e-6, and so has DeepSpeed's
        if max_grad_norm > 0 and share < 1:
            torch._foreach_mul_(gradients, share)
        bring_pieces(plain, accelerator.device, lambda: pieces(accelerator, model, optimizer))
        plain.step()
    model.zero_grad(set_to_none=True)
    return {"grad_norm": norm.float(), "applied": finite.float(), "nonfinite": (~finite).float()}


def pieces(accelerator: Any, model: Any, optimizer: Any) -> list[Piece]:
    """The rows of each parameter that are this rank's."""
    return [_piece_of(name, parameter) for name, parameter in _sharded_parameters(model) if parameter.requires_grad]


def _sharded_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """The parameters as shards: after a forward pass without a backward, FSDP2 leaves some of them gathered."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    yield from model.named_parameters()


def _piece_of(name: str, parameter: Any) -> Piece:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # no public name (torch 2.13)

    shape, first = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    row = parameter.shape[1:].numel()
    count = torch.Size(shape).numel()
    return Piece(name, parameter.shape, first[0] * row if count else 0, parameter, 0, count)


def whole_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """One at a time."""
    for name, parameter in _sharded_parameters(model):
        yield name, parameter.detach().full_tensor()


@torch.no_grad()
def put_whole(accelerator: Any, model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Every rank has the whole tensors, and takes its own rows."""
    for name, parameter in _sharded_parameters(model):
        if name in tensors:
            piece = _piece_of(name, parameter)
            piece.of(parameter).copy_(piece.of_whole(tensors[name]))


ENGINE = Engine("fsdp", backward, accumulating, clip_and_update, pieces, whole_parameters, put_whole)
