"""Muon's step, for all matrices of one shape together."""

from typing import Any

import torch

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
ITERATIONS = 5


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
        updates = []
        for matrix in matrices:
            assert matrix.grad is not None
            buffer = state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
            buffer.lerp_(matrix.grad, 1 - momentum)
            updates.append(matrix.grad.lerp(buffer, momentum))
        rate = learning_rate * 0.2 * max(rows, columns) ** 0.5
        for matrix, update in zip(matrices, orthogonalised(torch.stack(updates)), strict=True):
            matrix.mul_(1 - learning_rate * weight_decay).add_(update.to(matrix.dtype), alpha=-rate)


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
