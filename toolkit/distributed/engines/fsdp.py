"""FSDP2: parameters, gradients and the optimizer's state as DTensors, sharded by rows over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit.distributed.compat import layer_classes, local_shape_and_offset, scale_together
from toolkit.distributed.engines.engine import Engine, Piece, local_part
from toolkit.distributed.engines.pieces import bring_pieces
from toolkit.distributed.engines.plain import accumulating, backward, squared_norm

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed.tensor import DTensor
    from torch.optim import Optimizer


@torch.no_grad()
def clip_and_update(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, loss: torch.Tensor, max_grad_norm: float
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
            scale_together(gradients, share)
        bring_pieces(plain, accelerator.device, lambda: pieces(accelerator, model, optimizer))
        plain.step()
    model.zero_grad(set_to_none=True)
    return {"grad_norm": norm.float(), "applied": finite.float(), "nonfinite": (~finite).float()}


def pieces(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer | None) -> list[Piece]:
    """The rows of each parameter that are this rank's."""
    return [_piece_of(name, parameter) for name, parameter in _sharded_parameters(model) if parameter.requires_grad]


def _sharded_parameters(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """The parameters as shards: after a forward pass without a backward, FSDP2 leaves some of them gathered."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    yield from model.named_parameters()  # type: ignore[misc]  # fully_shard has made DTensors of them


def _piece_of(name: str, parameter: DTensor) -> Piece:
    shape, first = local_shape_and_offset(parameter)
    row, count = parameter.shape[1:].numel(), shape.numel()
    return Piece(name, parameter.shape, first[0] * row if count else 0, parameter, 0, count)


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """One at a time."""
    for name, parameter in _sharded_parameters(model):
        yield name, parameter.full_tensor().detach()


@torch.no_grad()
def put_whole(accelerator: Accelerator, model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Every rank has the whole tensors, and takes its own rows."""
    for name, parameter in _sharded_parameters(model):
        if name in tensors:
            piece = _piece_of(name, parameter)
            piece.of(parameter).copy_(piece.of_whole(tensors[name]))


def label(accelerator: Accelerator) -> str:
    from torch.distributed.fsdp import CPUOffloadPolicy

    offloads = isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    return "FSDP2, parameters on the CPU" if offloads else "FSDP2"


def place_frozen(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Sharded layer by layer, like the model that is trained."""
    from torch.distributed.fsdp import fully_shard

    model, layers = model.to(accelerator.device), layer_classes(model)
    for module in model.modules():
        if type(module).__name__ in layers:
            fully_shard(module)
    fully_shard(model)
    return model


ENGINE = Engine(
    label, backward, accumulating, clip_and_update, place_frozen, lambda accelerator: "weights", pieces, whole_parameters,
    put_whole,
)  # fmt: skip
