"""peft's linear layer with its LoRA update as one operation, whose products are added to what is there.

    y = x Wᵀ + b + s (x Aᵀ) Bᵀ        dx = dy W + s (dy B) A        dA = s (dy B)ᵀ x        dB = s dyᵀ (x Aᵀ)

peft (0.21.2) makes an update as large as y, s times it, and its sum with y; under autocast it casts x to float32, and torch
casts it back. Those passes over memory cost more than the products that they are for.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import nn
from torch.autograd.function import once_differentiable

from toolkit.models.compat import has_hooks


class AdaptedLinear(Linear):
    """peft's layer, which computes the plain case itself: one adapter, no dropout, frozen weights. The rest is peft's."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        operands = None if args or kwargs or torch.compiler.is_compiling() else self._operands(x)
        output: torch.Tensor = super().forward(x, *args, **kwargs) if operands is None else _Adapted.apply(*operands)
        return output

    def _operands(self, x: torch.Tensor) -> tuple[Any, ...] | None:
        """x, W, b, A, B, all in the type to compute in, and s; None where the layer is not the plain case."""
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return None
        name, base = self.active_adapters[0], self.base_layer
        if name not in self.lora_A or name in self.lora_variant:
            return None
        dropout, layers = self.lora_dropout[name], (base, self.lora_A[name], self.lora_B[name])
        if any(type(each) is not nn.Linear or has_hooks(each) for each in layers):
            return None
        if (dropout.training and type(dropout) is not nn.Identity) or any(each.requires_grad for each in base.parameters()):
            return None
        tensors = [x, *(each.weight for each in layers), *(each.bias for each in layers if each.bias is not None)]
        kind, casts = x.device.type, x.dtype != torch.float64  # which autocast leaves alone
        if casts and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            tensors = [each.to(torch.get_autocast_dtype(kind)) for each in tensors]
        if len({each.dtype for each in tensors}) > 1 or layers[2].bias is not None:
            return None
        x, w, a, b, *bias = tensors
        return x, w, bias[0] if bias else None, a, b, self.scaling[name]


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        low = rows @ a.t()
        output = x.new_empty(*x.shape[:-1], len(w))  # not a view, which nobody may change in place
        filled = output.view(-1, len(w))
        torch.mm(rows, w.t(), out=filled) if bias is None else torch.addmm(bias, rows, w.t(), out=filled)
        torch.addmm(filled, low, b.t(), alpha=scale, out=filled)
        ctx.save_for_backward(rows, w, a, b, low)
        ctx.scale, ctx.shape = scale, x.shape
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_output: torch.Tensor) -> Any:
        rows, w, a, b, low = ctx.saved_tensors
        of_output = of_output.reshape(-1, of_output.shape[-1])
        of_low = (of_output @ b).mul_(ctx.scale)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = of_output @ w
            of_x = torch.addmm(of_x, of_low, a, out=of_x).view(ctx.shape)
        return of_x, None, None, of_low.t() @ rows, (of_output.t() @ low).mul_(ctx.scale), None


def take_fast_updates(model: nn.Module) -> None:
    """Let peft's linear layers in a model be AdaptedLinear ones."""
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = AdaptedLinear
