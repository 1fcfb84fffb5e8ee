"""Cross-entropy of rows of logits, in blocks that stay in a CPU's cache; its gradient takes the place of the logits.

Autograd would hold three tensors as large as the logits: them in float32, their log-probabilities, and the gradient. On a CPU
most of that time is memory, taken anew from the system for each chunk. Here the only one is the logits themselves.
"""

import functools
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from toolkit.system.devices import chosen_type, is_ampere

_BLOCK_BYTES = 2**21  # a block, and what is made of it, should stay in a CPU's cache
_BLOCK_BYTES_ELSEWHERE = 2**27  # several are made of it: few in one go, next to a chunk of 1 GiB


def token_losses(
    logits: torch.Tensor,
    targets: torch.Tensor,
    label_smoothing_factor: float = 0.0,
    z_loss: float = 0.0,
    weights: torch.Tensor | None = None,
    gradient: torch.Tensor | None = None,
    correct: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss of each row `[rows]`, in float32 or wider; the formula is at `causal_lm_loss`.

    Logits `[rows, V]`, of which no graph is made; targets `[rows]`; `weights` `[rows]`, what each loss counts. `gradient`
    `[rows, V]` is filled with that of the sum of all losses; it may be the logits themselves. `correct` `[rows]` is filled
    with whether each target is the most probable token.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses = logits.new_empty(len(logits), dtype=wide)
    if runs_as_kernel(logits.device, logits.dtype) and logits.stride(-1) == 1 and len(logits):
        if logits.is_cuda:  # no fake tensors
            from toolkit.losses.token_losses_gpu import token_losses_into

            token_losses_into(losses, logits, targets, label_smoothing_factor, z_loss, weights, gradient, correct)
        return losses if weights is None else losses * weights
    vocabulary, size = logits.shape[-1], rows_of_a_block(logits)
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        for start in range(0, len(logits), size):
            block = slice(start, start + size)
            scores, target = logits[block].to(wide), targets[block, None]
            largest, of_target = scores.amax(-1, keepdim=True), scores.gather(1, target)
            p = scores.softmax(-1)
            log_of_largest = p.amax(-1, keepdim=True).log()
            loss = largest - of_target - log_of_largest
            if label_smoothing_factor:
                loss += label_smoothing_factor * (of_target - scores.mean(-1, keepdim=True))
            if z_loss:
                log_z = largest - log_of_largest
                loss += z_loss * log_z.square()
            losses[block] = loss[:, 0]
            if correct is not None:
                correct[block] = _is_first_largest(scores, largest, target)[:, 0]
            if gradient is None:
                continue
            if z_loss:
                p *= 1 + 2 * z_loss * log_z
            if label_smoothing_factor:
                p -= label_smoothing_factor / vocabulary
            p.scatter_add_(1, target, torch.full_like(of_target, label_smoothing_factor - 1))
            gradient[block] = p if weights is None else p.mul_(weights[block, None])
    return losses if weights is None else losses * weights


def rows_of_a_block(logits: torch.Tensor) -> int:
    """How many rows of logits are raised to float32 and gone over together."""
    size = _BLOCK_BYTES if chosen_type(logits.device) == "cpu" else _BLOCK_BYTES_ELSEWHERE
    return max(1, size // (logits.shape[-1] * max(4, logits.dtype.itemsize)))


def runs_as_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `token_losses` of logits of this type is one kernel, in Triton, without copies of them in float32."""
    is_there = device.type != "cuda" or _triton_is_there()  # a plan for CUDA has its tensors elsewhere
    return chosen_type(device) == "cuda" and dtype != torch.float64 and is_ampere(device) and is_there


@functools.cache
def _triton_is_there() -> bool:
    """With what it compiles its own launcher with."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return importlib.util.find_spec("triton") is not None and compiler is not None and headers.exists()


def _is_first_largest(scores: torch.Tensor, largest: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Whether `scores.argmax(-1) == target`, `[rows, 1]`: the first one where several are the largest."""
    if chosen_type(scores.device) != "cpu":
        return scores.argmax(-1, keepdim=True) == target
    # a CPU's argmax looks at one number at a time (torch 2.13), four times as slow as these passes; exact up to 2^24 tokens
    vocabulary = scores.shape[-1]
    countdown = torch.arange(vocabulary, 0, -1, dtype=scores.dtype)
    first = torch.eq(scores, largest, out=torch.empty_like(scores)).mul_(countdown).amax(-1, keepdim=True)
    return first == vocabulary - target


class TokenLogps(torch.autograd.Function):
    """Log-probability of the target of each row `[rows]`. `gradient` is the room for that of the logits, as above."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        losses = token_losses(logits, targets, gradient=gradient)
        ctx.save_for_backward(gradient)
        return losses.neg_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_logps: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors  # a second time torch refuses: it was changed in place
        return gradient.mul_(of_logps[0][:, None].neg()), None, None
