"""Products with weights in 4 bits, planned: what bitsandbytes (0.50) holds for them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from toolkit.models.quantization import PackedShape


def product(
    inputs: torch.Tensor, packed: torch.Tensor, quant_state: PackedShape, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """In the place of `bitsandbytes.matmul_4bit`, which unpacks the weights for each product and keeps them packed."""
    output: torch.Tensor = _Product.apply(inputs, packed, quant_state)
    return output if bias is None else output + bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, packed: torch.Tensor, state: PackedShape) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.state = state
        return F.linear(inputs, packed.new_empty(state.shape, dtype=inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *of_output: torch.Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        unpacked = packed.new_empty(ctx.state.shape, dtype=ctx.state.dtype)
        return of_output[0] @ unpacked.to(of_output[0].dtype), None, None
