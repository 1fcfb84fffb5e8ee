"""Dropout on a CPU in a third of torch's time: of 16 random bits for each number, and one byte kept for the backward pass.

torch (2.13) draws each number's fate by `bernoulli_`, and keeps it as a number of the activations' type. Of 3,000 tokens of 384
forward and backward take 2.8 ms in place of 9.6 in float32, 2.3 in place of 5.9 in bfloat16 (one AVX512-BF16 core).
"""

from typing import Any

import torch
from torch import nn

from toolkit.system.devices import chosen_type


class FastDropout(nn.Dropout):
    """torch's Dropout, but for tensors on a CPU, which take other random numbers, at a rate to 1/65,536."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        is_on_cpu = chosen_type(input.device) == "cpu" and not torch.compiler.is_compiling()
        if not (is_on_cpu and self.training and 0 < self.p < 1) or self.inplace:
            return super().forward(input)
        output: torch.Tensor = _Dropout.apply(input, self.p)
        return output


def take_fast_dropout(model: nn.Module) -> None:
    """Put a FastDropout in the place of each Dropout of a model."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, FastDropout(child.p, child.inplace).train(child.training))


def keep_mask(numbers: torch.Tensor, rate: float) -> torch.Tensor:
    """1 for each number that dropout leaves, else 0, uint8, which becomes bfloat16 in an eighth of a boolean's time.

    Of 16 random bits each: torch (2.13) draws those in a fifth of the time of `bernoulli_`.
    """
    bits = numbers.new_empty(-(-numbers.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    found = bits.view(torch.int16)[: numbers.numel()] >= round(rate * 2**16) - 2**15
    return found.view(numbers.shape).view(torch.uint8)


def kept_share(rate: float) -> float:
    """The probability with which `keep_mask` is 1."""
    return 1 - round(rate * 2**16) / 2**16


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, rate: float) -> torch.Tensor:
        is_kept = keep_mask(numbers, rate)
        ctx.save_for_backward(is_kept)
        ctx.share = kept_share(rate)
        return _scaled(numbers, is_kept, ctx.share)

    @staticmethod
    def backward(ctx: Any, *of_output: torch.Tensor) -> Any:
        return _scaled(of_output[0], ctx.saved_tensors[0], ctx.share), None


def _scaled(numbers: torch.Tensor, is_kept: torch.Tensor, share: float) -> torch.Tensor:
    return is_kept.to(numbers.dtype).mul_(numbers).div_(share)
