"""The state of a run whose engine shards it, as the same value that one process has: any layout reads any other's.

Whole tensors go to the main process, one at a time, in the optimizer's own precision. On the way back every rank reads the
file and keeps its pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from toolkit.checkpoint.random_state import capture_random_state
from toolkit.checkpoint.state import (
    State,
    check_optimizer_state,
    compare_shapes,
    digest_of,
    identity_of,
    in_groups,
    refuse_other_base,
)
from toolkit.distributed.engines import engine_of
from toolkit.distributed.engines.engine import Piece
from toolkit.distributed.engines.pieces import whole_tensor

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn


def capture_sharded_state(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any],
    kept: Mapping[str, Any] | None = None, base: dict[str, Any] | None = None,
) -> State | None:  # fmt: skip
    """The state of live objects (unwrapped): on the main process, None on the others. A collective.

    `base`: what `sharded_base_identity` found on every rank, for a model with frozen parameters.
    """
    torch_optimizer = _torch_optimizer(optimizer)
    found, names = _pieces(accelerator, model, optimizer), _names(torch_optimizer)
    tensors, states = {}, {}
    for piece in found:
        tensors[piece.parameter] = whole_tensor(piece, piece.laid_out, accelerator.device)
        states[piece.parameter] = {
            key: whole_tensor(piece, value, accelerator.device) if _is_laid_out(value, piece.owner) else _scalar(value)
            for key, value in torch_optimizer.state.get(piece.owner, {}).items()
        }
    if not accelerator.is_main_process:
        return None
    tensors |= _buffers(model)
    order = [name for group in names for name in group]
    return State(
        model=tensors,  # type: ignore[arg-type]  # on the main process each is there
        optimizer={
            "state": {i: states[name] for i, name in enumerate(order) if states[name]},
            "param_groups": _groups(torch_optimizer, names),
        },
        parameter_names=names,
        run=run,
        kept=dict(kept or {}),
        random=capture_random_state(),
        base=base or {},
    )


@torch.no_grad()
def apply_sharded_state(
    accelerator: Accelerator, state: State, model: nn.Module, optimizer: torch.optim.Optimizer, *, only_model: bool = False
) -> None:
    """Put a loaded state, which every rank has whole, into live objects; everything is compared first.

    Raises:
        Refusal: names, shapes or the order of parameters differ, or the frozen parameters are not those it was trained on.
    """
    engine, torch_optimizer = engine_of(accelerator), _torch_optimizer(optimizer)
    assert engine.put_whole is not None
    found, names, buffers = _pieces(accelerator, model, optimizer), _names(torch_optimizer), _buffers(model)
    shapes = {piece.parameter: tuple(piece.shape) for piece in found}
    live = shapes | {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    compare_shapes(live, {name: tuple(tensor.shape) for name, tensor in state.model.items()})
    if state.base:
        refuse_other_base(state.base, sharded_base_identity(accelerator, model))
    if not only_model:
        state = in_groups(state, names)
        check_optimizer_state(state, _groups(torch_optimizer, names), shapes)
        _put_optimizer(state, found, torch_optimizer)
    for piece in found:
        piece.of(piece.owner).copy_(piece.of_whole(state.model[piece.parameter]))
    engine.put_whole(accelerator, model, {name: state.model[name] for name in shapes})
    for name, buffer in buffers.items():
        buffer.copy_(state.model[name])


def sharded_base_identity(accelerator: Accelerator, model: nn.Module) -> dict[str, Any]:
    """`base_identity` of frozen parameters that are sharded, the same on every rank. A collective."""
    engine = engine_of(accelerator)
    assert engine.whole_parameters is not None
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    parameters = engine.whole_parameters(model)
    return identity_of(model, {name: digest_of(name, whole) for name, whole in parameters if name in frozen})


def _torch_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer that steps: inside Accelerate's and DeepSpeed's wrappers."""
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    inner = getattr(optimizer, "optimizer", None)
    return _torch_optimizer(inner) if inner is not None else optimizer


def _pieces(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Piece]:
    engine = engine_of(accelerator)
    assert engine.pieces is not None
    return engine.pieces(accelerator, model, optimizer)


def _names(torch_optimizer: Any) -> list[list[str]]:
    """Of the parameters of each group, which an engine has put shards in the place of."""
    return [list(group["param_names"]) for group in torch_optimizer.param_groups]


def _groups(torch_optimizer: Any, names: list[list[str]]) -> list[dict[str, Any]]:
    """The groups as torch's state_dict has them, had nothing been sharded."""
    groups, first = [], 0
    for group, members in zip(torch_optimizer.param_groups, names, strict=True):
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({**settings, "params": list(range(first, first + len(members)))})
        first += len(members)
    return groups


def _put_optimizer(state: State, found: list[Piece], torch_optimizer: Any) -> None:
    piece_of, order = {piece.parameter: piece for piece in found}, [name for group in state.parameter_names for name in group]
    torch_optimizer.state.clear()
    for index, moments in state.optimizer["state"].items():
        piece = piece_of[order[index]]
        live = torch_optimizer.state[piece.owner]
        for key, value in moments.items():
            if isinstance(value, torch.Tensor) and value.shape == piece.shape and value.dim():
                laid_out = live.setdefault(key, torch.zeros_like(piece.owner, dtype=value.dtype))
                piece.of(laid_out).copy_(piece.of_whole(value))
            else:
                live[key] = value.clone() if isinstance(value, torch.Tensor) else value
    for group, stored in zip(torch_optimizer.param_groups, state.optimizer["param_groups"], strict=True):
        group.update({key: value for key, value in stored.items() if key not in ("params", "param_names")})
        if group.get("fused") or group.get("capturable"):  # their kernels read the count of steps on the device
            for owner in {id(piece_of[name].owner): piece_of[name].owner for name in group["param_names"]}.values():
                live = torch_optimizer.state.get(owner, {})
                live.update({key: value.to(owner.device) for key, value in live.items() if key == "step"})


def _is_laid_out(value: Any, owner: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == owner.shape and value.dim() > 0


def _scalar(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Persistent ones: the same on every rank."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
