"""DeepSpeed ZeRO: the optimizer's state, gradients (stage 2) and parameters (stage 3) sharded over the ranks.

Written against DeepSpeed 0.19, whose optimizers have no public accessors: `single_partition_of_fp32_groups` (stages 1 and 2),
`grad_position` and `fp32_partitioned_groups_flat` (stage 3), and the `ds_` attributes of parameters (stage 3).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.config import Refusal
from toolkit.distributed.compat import fragment_of, infinite_norm
from toolkit.distributed.engines.engine import Engine, Exchanged, Piece
from toolkit.distributed.engines.pieces import bring_pieces

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer


def backward(accelerator: Accelerator, model: nn.Module, loss: torch.Tensor, last: bool) -> None:
    """DeepSpeed averages over the ranks; it is configured not to divide by an accumulation of its own."""
    engine = accelerator.deepspeed_engine_wrapped.engine
    engine.set_gradient_accumulation_boundary(last)
    engine.backward(loss, scale_wrt_gas=False)


def accumulating(accelerator: Accelerator, model: nn.Module, last: bool) -> contextlib.AbstractContextManager[None]:
    """Stage 1 exchanges gradients at the boundary only; stages 2 and 3 must in each micro-batch, to keep only shards."""
    return contextlib.nullcontext()


def clip_and_update(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, loss: torch.Tensor, max_grad_norm: float
) -> dict[str, torch.Tensor]:
    """DeepSpeed's own step takes the norm, clips, updates and clears; a norm that is not finite makes it skip the update."""
    engine = accelerator.deepspeed_engine_wrapped.engine
    engine.optimizer.clip_grad = max_grad_norm
    bring_pieces(engine.optimizer.optimizer, accelerator.device, lambda: pieces(accelerator, model, optimizer))
    # A loss may not be finite though its gradient is.
    with contextlib.nullcontext() if bool(torch.isfinite(loss)) else infinite_norm(engine.optimizer):
        engine.step()
    norm = torch.as_tensor(engine.get_global_grad_norm(), dtype=torch.float32, device=loss.device)
    finite = torch.isfinite(norm) & torch.isfinite(loss)
    return {"grad_norm": norm.detach(), "applied": finite.float(), "nonfinite": (~finite).float()}


def pieces(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer | None) -> list[Piece]:
    """Of the float32 masters."""
    engine = accelerator.deepspeed_engine_wrapped.engine
    groups = engine.optimizer.optimizer.param_groups
    group_of = {name: number for number, group in enumerate(groups) for name in group["param_names"]}
    trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    find = _piece_of_shard if engine.zero_optimization_stage() == 3 else _piece_of_fragment
    return [find(engine.optimizer, name, parameter, group_of[name]) for name, parameter in trained]


def _piece_of_fragment(sharded: Any, name: str, parameter: Any, group: int) -> Piece:
    start, offset, count = fragment_of(parameter) or (0, 0, 0)  # all of it may be in other ranks' partitions
    return Piece(name, parameter.shape, start, sharded.single_partition_of_fp32_groups[group], offset, count)


def _piece_of_shard(sharded: Any, name: str, parameter: Any, _: int) -> Piece:
    group, offset, length = sharded.grad_position[sharded.get_param_id(parameter)]
    start = torch.distributed.get_rank(parameter.ds_process_group) * length
    count = max(0, min(length, parameter.ds_numel - start))  # the last shards are padded
    owner = sharded.fp32_partitioned_groups_flat[group]
    if owner.numel() == 0:
        raise Refusal("the optimizer's state is on NVMe, where no checkpoint can read it: take the device cpu.")
    return Piece(name, parameter.ds_shape, start, owner, offset, count)


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """As the forward pass sees them; stage 3 gathers one at a time."""
    import deepspeed

    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach()
        else:
            yield name, parameter.detach()


@torch.no_grad()
def put_whole(accelerator: Accelerator, model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
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


def label(accelerator: Accelerator) -> str:
    zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    moved = [part for part in ("offload_param", "offload_optimizer") if (zero.get(part) or {}).get("device", "none") != "none"]
    offload = {"offload_param": ", parameters on the CPU", "offload_optimizer": ", optimizer on the CPU"}
    return f"ZeRO-{zero['stage']}" + (offload[moved[0]] if moved else "")


def exchanged(accelerator: Accelerator) -> Exchanged:
    of_stage: dict[int, Exchanged] = {1: "nothing", 2: "gradients", 3: "weights"}
    return of_stage[accelerator.state.deepspeed_plugin.zero_stage]


def place_frozen(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Under stage 3 in an engine of its own; whole on every rank under stages 1 and 2."""
    if not ENGINE.shards_weights(accelerator):
        return model.to(accelerator.device)
    import deepspeed

    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    settings = {name: value for name, value in settings.items() if name not in ("optimizer", "scheduler")}
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    engine.eval()
    return engine


ENGINE = Engine(label, backward, accumulating, clip_and_update, place_frozen, exchanged, pieces, whole_parameters, put_whole)
