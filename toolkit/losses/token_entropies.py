"""Log-probability of the target and entropy of rows of logits, in blocks that stay in a CPU's cache; in backward the gradient
takes the place of the logits. Of logits z at a temperature T, q = softmax(z / T) and H = -sum(q log q):

    d log q_target / dz = (onehot - q) / T,        dH / dz = -q (log q + H) / T
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from toolkit.losses.token_losses import rows_of_a_block, runs_as_kernel

_LEAST = -1000.0  # of a log-probability: its exp is 0, so that 0 log 0 is 0, and it stays finite times a scaled gradient


def logps_and_entropies(logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """`[rows, 2]`, nats, float32 or wider, of logits `[rows, V]`, of which no graph is made, and targets `[rows]`."""
    values = logits.new_empty(len(logits), 2, dtype=torch.promote_types(logits.dtype, torch.float32))
    if _is_for_the_kernel(logits):
        if logits.is_cuda:  # no fake tensors
            from toolkit.losses.token_entropies_gpu import values_into

            values_into(values, logits, targets, temperature)
        return values
    size = rows_of_a_block(logits)
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        for start in range(0, len(logits), size):
            block = slice(start, start + size)
            log_q = _at(temperature, logits[block].to(values.dtype)).log_softmax(-1)
            values[block, :1] = log_q.gather(1, targets[block, None])
            q = log_q.exp()
            values[block, 1] = -torch.linalg.vecdot(q, log_q.clamp_min_(_LEAST))
    return values


class LogpsAndEntropies(torch.autograd.Function):
    """`logps_and_entropies` with a graph, of the entropies where they are to have one. `gradient` is the room for that of the
    logits `[rows, V]`; it may be the logits themselves."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float, of_entropies: bool, gradient: torch.Tensor
    ) -> torch.Tensor:
        values = logps_and_entropies(logits, targets, temperature)
        ctx.temperature, ctx.of_entropies = temperature, of_entropies
        ctx.save_for_backward(logits, targets, values, gradient)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_values: torch.Tensor) -> Any:
        logits, targets, values, gradient = ctx.saved_tensors  # a second time torch refuses: the logits were changed in place
        _gradient_into(gradient, logits, targets, values, of_values[0], ctx.temperature, ctx.of_entropies)
        return gradient, None, None, None, None


def _gradient_into(
    gradient: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, values: torch.Tensor, of_values: torch.Tensor,
    temperature: float, of_entropies: bool,
) -> None:  # fmt: skip
    if _is_for_the_kernel(logits):
        if logits.is_cuda:
            from toolkit.losses.token_entropies_gpu import gradient_into

            gradient_into(gradient, logits, targets, values, of_values, temperature, of_entropies)
        return
    size = rows_of_a_block(logits)
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        for start in range(0, len(logits), size):
            block = slice(start, start + size)
            scores = _at(temperature, logits[block].to(values.dtype))
            of_logps, of_entropy = (of_values[block] / temperature).to(values.dtype).split(1, dim=1)
            q = scores.softmax(-1)
            if of_entropies:
                log_q = scores.log_softmax(-1).clamp_min_(_LEAST)
                slope = log_q.add_(values[block, 1:]).mul_(of_entropy).add_(of_logps).mul_(q).neg_()
            else:
                slope = q.mul_(-of_logps)
            gradient[block] = slope.scatter_add_(1, targets[block, None], of_logps)


def _at(temperature: float, scores: torch.Tensor) -> torch.Tensor:
    return scores if temperature == 1.0 else scores / temperature


def _is_for_the_kernel(logits: torch.Tensor) -> bool:
    return runs_as_kernel(logits.device, logits.dtype) and logits.stride(-1) == 1 and len(logits) > 0
