"""Muon's step, for matrices of one shape together, as many at a time as a bounded memory holds."""

from collections import Counter
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch

from toolkit.distributed.compat import settled_precision
from toolkit.distributed.engines.engine import Piece
from toolkit.distributed.engines.pieces import add_up
from toolkit.system.devices import chosen_type, is_faster_in_bf16

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
ITERATIONS = 5
State = MutableMapping[torch.Tensor, dict[str, Any]]  # an optimizer's

AT_ONCE = 2**26  # elements of matrices that are worked on at a time, and that every rank holds whole where they are sharded


def muon_step(parameters: list[torch.Tensor], state: State, learning_rate: float, momentum: float, weight_decay: float) -> None:
    """Nesterov momentum, orthogonalized, at the size of an AdamW update (Moonshot, https://arxiv.org/abs/2502.16982, 2.2).

    `parameters`: matrices with gradients. `state[p]["momentum_buffer"]` is made here. The mathematics is that of
    `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, which takes the matrices one by one and always in bfloat16: on a
    processor without bfloat16 units that is a quarter of a small model's training time.
    """
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for parameter in parameters:
        by_shape.setdefault(parameter.shape, []).append(parameter)
    for (rows, columns), matrices in by_shape.items():
        rate, at_once = _rate(learning_rate, rows, columns), _at_once(rows, columns)
        for start in range(0, len(matrices), at_once):
            together = matrices[start : start + at_once]
            updates = torch.stack([_nesterov(matrix, state, momentum) for matrix in together])
            for matrix, update in zip(together, orthogonalized(updates), strict=True):
                matrix.mul_(1 - learning_rate * weight_decay).add_(update.to(matrix.dtype), alpha=-rate)


def sharded_muon_step(
    pieces: list[Piece], state: State, learning_rate: float, momentum: float, weight_decay: float, device: torch.device
) -> None:
    """The same of matrices that lie in pieces over the ranks: momentum stays cut, what is orthogonalized comes together.

    `pieces`: of every matrix, in one order on all ranks. `device`: where the ranks can exchange. A collective.
    """
    owners = {id(piece.owner): piece.owner for piece in pieces}
    moved = {key: _moved_momentum(owner, state, momentum) for key, owner in owners.items()}
    by_shape: dict[torch.Size, list[Piece]] = {}
    for piece in pieces:
        by_shape.setdefault(piece.shape, []).append(piece)
    for (rows, columns), alike in by_shape.items():
        at_once = _at_once(rows, columns)
        for start in range(0, len(alike), at_once):
            together = alike[start : start + at_once]
            whole = torch.zeros(len(together), rows, columns, device=device)
            for matrix, piece in zip(whole, together, strict=True):
                assert piece.owner.grad is not None
                # piece by piece, so that no second shard is made
                piece.of_whole(matrix).copy_(piece.of(piece.owner.grad).lerp(piece.of(moved[id(piece.owner)]), momentum))
            add_up(whole, everywhere=True)
            rate = _rate(learning_rate, rows, columns)
            for update, piece in zip(orthogonalized(whole), together, strict=True):
                mine = piece.of(piece.owner)
                mine.mul_(1 - learning_rate * weight_decay).add_(piece.of_whole(update).to(mine), alpha=-rate)


def workspace(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes that `muon_step` needs for a while, next to parameters, gradients and momentum: those of its largest group.

    For each of the group's numbers: two in the gradients' type (one of each matrix, one of the stack), then four in that of
    Newton and Schulz's iteration, and three for each number of the products of the shorter side.
    """
    counts = Counter((parameter.shape, parameter.dtype, parameter.device) for parameter in parameters)
    largest = 0
    for ((rows, columns), dtype, device), count in counts.items():
        together = min(count, _at_once(rows, columns))
        inside = 4 * rows * columns + 3 * min(rows, columns) ** 2
        computing = _computing(dtype, device)
        largest = max(largest, together * (2 * rows * columns * dtype.itemsize + inside * computing.itemsize))
    return largest


def _at_once(rows: int, columns: int) -> int:
    return max(1, AT_ONCE // (rows * columns))


def _computing(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """On a GPU as torch's Muon does, where bfloat16 is faster; on a CPU only in a run that computes in bfloat16 too."""
    wide = torch.promote_types(dtype, torch.float32)
    in_half = chosen_type(device) != "cpu" or settled_precision() == "bf16"
    return torch.bfloat16 if in_half and wide == torch.float32 and is_faster_in_bf16(device) else wide


def _nesterov(parameter: torch.Tensor, state: State, momentum: float) -> torch.Tensor:
    """The gradient of a parameter, looked ahead from its momentum, which is moved on."""
    assert parameter.grad is not None
    return parameter.grad.lerp(_moved_momentum(parameter, state, momentum), momentum)


def _moved_momentum(parameter: torch.Tensor, state: State, momentum: float) -> torch.Tensor:
    """The parameter's momentum, moved on in place; element by element, so a shard's is that of its elements."""
    assert parameter.grad is not None
    buffer = state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
    return buffer.lerp_(parameter.grad, 1 - momentum)


def _rate(learning_rate: float, rows: int, columns: int) -> float:
    return learning_rate * 0.2 * max(rows, columns) ** 0.5


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Each of the matrices `[count, rows, columns]` with its singular values brought near 1, by Newton and Schulz."""
    a, b, c = COEFFICIENTS
    x = matrices.to(_computing(matrices.dtype, matrices.device))
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
