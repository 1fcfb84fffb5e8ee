"""DeepSpeed ZeRO: the optimizer's state, gradients (stage 2) and parameters (stage 3) sharded over the ranks.

Written against DeepSpeed 0.19; what has no public accessor is named where it is read.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from toolkit.config import Refusal
from toolkit.distributed.engines.engine import Engine, Piece
from toolkit.distributed.engines.pieces import bring_pieces


def backward(accelerator: Any, model: Any, loss: torch.Tensor, last: bool) -> None:
    """DeepSpeed averages over the ranks and, told so, doesn't divide by an accumulation of its own."""
    engine = accelerator.deepspeed_engine_wrapped.engine
    engine.set_gradient_accumulation_boundary(last)
    engine.backward(loss, scale_wrt_gas=False)


def accumulating(accelerator: Any, model: Any, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Stage 1 exchanges gradients at the boundary only; stages 2 and 3 must in each micro-batch, to keep only shards."""
    return contextlib.nullcontext()


def clip_and_update(
    accelerator: Any, model: Any, optimizer: Any, loss: torch.Tensor, max_grad_norm: float
) -> dict[str, torch.Tensor]:
    """DeepSpeed's own step takes the norm, clips, updates and clears; a norm that is not finite makes it skip the update."""
    engine = accelerator.deepspeed_engine_wrapped.engine
    engine.optimizer.clip_grad = max_grad_norm
    bring_pieces(engine.optimizer.optimizer, accelerator.device, lambda: pieces(accelerator, model, optimizer))
    with contextlib.nullcontext() if bool(torch.isfinite(loss)) else _infinite_norm(engine.optimizer):
        engine.step()
    norm = torch.as_tensor(engine.get_global_grad_norm(), dtype=torch.float32, device=loss.device)
    finite = torch.isfinite(norm) & torch.isfinite(loss)
    return {"grad_norm": norm.detach(), "applied": finite.float(), "nonfinite": (~finite).float()}


@contextlib.contextmanager
def _infinite_norm(sharded: Any) -> Iterator[None]:
    """While open, the step takes the gradient's norm for infinite: for a loss that is not finite though its gradient is."""
    infinite = torch.tensor(float("inf"))
    replaced = {"scaled_global_norm": lambda *_: infinite, "_get_norm_groups": lambda *_: [infinite]}
    for name, function in replaced.items():
        setattr(sharded, name, function)
    try:
        yield
    finally:
        for name in replaced:
            delattr(sharded, name)


def pieces(accelerator: Any, model: Any, optimizer: Any) -> list[Piece]:
    """Of the float32 masters: `_hp_mapping` of a parameter (stages 1 and 2), `grad_position` of the optimizer (stage 3)."""
    engine = accelerator.deepspeed_engine_wrapped.engine
    groups = engine.optimizer.optimizer.param_groups
    group_of = {name: number for number, group in enumerate(groups) for name in group["param_names"]}
    trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    find = _piece_of_shard if engine.zero_optimization_stage() == 3 else _piece_of_fragment
    return [find(engine.optimizer, name, parameter, group_of[name]) for name, parameter in trained]


def _piece_of_fragment(sharded: Any, name: str, parameter: Any, group: int) -> Piece:
    owner, fragment = sharded.single_partition_of_fp32_groups[group], parameter._hp_mapping
    if fragment is None:  # it lies in other ranks' partitions
        return Piece(name, parameter.shape, 0, owner, 0, 0)
    there, here = fragment.lp_fragment_address, fragment.hp_fragment_address
    return Piece(name, parameter.shape, there.start, owner, here.start, there.numel)


def _piece_of_shard(sharded: Any, name: str, parameter: Any, _: int) -> Piece:
    group, offset, length = sharded.grad_position[sharded.get_param_id(parameter)]
    start = torch.distributed.get_rank(parameter.ds_process_group) * length
    count = max(0, min(length, parameter.ds_numel - start))  # the last shards are padded
    owner = sharded.fp32_partitioned_groups_flat[group]
    if owner.numel() == 0:
        raise Refusal("the optimizer's state is on NVMe, where no checkpoint can read it: take the device cpu.")
    return Piece(name, parameter.ds_shape, start, owner, offset, count)


def whole_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """As the forward pass sees them; stage 3 gathers one at a time."""
    import deepspeed

    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach()
        else:
            yield name, parameter.detach()


@torch.no_grad()
def put_whole(accelerator: Any, model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Every rank has the whole tensors: it takes its own shard of each, and the whole of those that it keeps whole."""
    for name, parameter in accelerator.deepspeed_engine_wrapped.engine.module.named_parameters():
        if name not in tensors:
            continue
        whole = tensors[name].reshape(-1)
        if not hasattr(parameter, "ds_tensor"):
            parameter.data.copy_(tensors[name])
            continue
        shard = parameter.ds_tensor.data.view(-1)
        start = torch.distributed.get_rank(parameter.ds_process_group) * shard.numel()
        mine = whole[start : start + shard.numel()]
        shard[: mine.numel()].copy_(mine)
        if parameter.data.numel() == whole.numel():  # small ones stay gathered between the steps
            parameter.data.view(-1).copy_(whole)


ENGINE = Engine("zero", backward, accumulating, clip_and_update, pieces, whole_parameters, put_whole)
