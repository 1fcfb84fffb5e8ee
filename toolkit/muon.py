"""Muon's step, for all matrices of one shape together."""

from typing import Any

import torch

from toolkit.engines.engine import Piece
from toolkit.engines.pieces import add_up

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
ITERATIONS = 5
GATHERED_AT_ONCE = 2**26  # elements of sharded matrices that every rank holds whole at a time


def muon_step(parameters: list[torch.Tensor], state: Any, learning_rate: float, momentum: float, weight_decay: float) -> None:
    """Nesterov momentum, orthogonalised, at the size of an AdamW update (Moonshot, https://arxiv.org/abs/2502.16982, 2.2).

    `parameters`: matrices with gradients. `state[p]["momentum_buffer"]` is made here. The mathematics is that of
    `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, which takes the matrices one by one and always in bfloat16: on a
    processor without bfloat16 units that is a quarter of a small model's training time.
    """
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for parameter in parameters:
        by_shape.setdefault(parameter.shape, []).append(parameter)
    for (rows, columns), matrices in by_shape.items():
        updates = [_nesterov(matrix, state, momentum) for matrix in matrices]
        rate = _rate(learning_rate, rows, columns)
        for matrix, update in zip(matrices, orthogonalised(torch.stack(updates)), strict=True):
            matrix.mul_(1 - learning_rate * weight_decay).add_(update.to(matrix.dtype), alpha=-rate)


def sharded_muon_step(
    pieces: list[Piece], state: Any, learning_rate: float, momentum: float, weight_decay: float, device: torch.device
) -> None:
    """The same of matrices that lie in pieces over the ranks: momentum stays cut, what is orthogonalised comes together.

    `pieces`: of every matrix, in one order on all ranks. `device`: where the ranks can exchange. A collective.
    """
    owners = {id(piece.owner): piece.owner for piece in pieces}
    updates = {key: _nesterov(owner, state, momentum) for key, owner in owners.items()}
    by_shape: dict[torch.Size, list[Piece]] = {}
    for piece in pieces:
        by_shape.setdefault(piece.shape, []).append(piece)
    for (rows, columns), alike in by_shape.items():
        at_once = max(1, GATHERED_AT_ONCE // (rows * columns))
        for start in range(0, len(alike), at_once):
            together = alike[start : start + at_once]
            whole = torch.zeros(len(together), rows, columns, device=device)
            for matrix, piece in zip(whole, together, strict=True):
                piece.of_whole(matrix).copy_(piece.of(updates[id(piece.owner)]))
            add_up(whole, everywhere=True)
            rate = _rate(learning_rate, rows, columns)
            for update, piece in zip(orthogonalised(whole), together, strict=True):
                mine = piece.of(piece.owner)
                mine.mul_(1 - learning_rate * weight_decay).add_(piece.of_whole(update).to(mine), alpha=-rate)


def _nesterov(parameter: torch.Tensor, state: Any, momentum: float) -> torch.Tensor:
    """The parameter's momentum, moved on and looked ahead from; element by element, so a shard's is that of its elements."""
    assert parameter.grad is not None
    buffer = state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
    buffer.lerp_(parameter.grad, 1 - momentum)
    return parameter.grad.lerp(buffer, momentum)


def _rate(learning_rate: float, rows: int, columns: int) -> float:
    return learning_rate * 0.2 * max(rows, columns) ** 0.5


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Each of the matrices `[count, rows, columns]` with its singular values brought near 1, by Newton and Schulz."""
    a, b, c = COEFFICIENTS
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.promote_types(matrices.dtype, torch.float32))
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
