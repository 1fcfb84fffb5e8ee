"""Weights in bfloat16 that learn from small updates: the optimizer steps in float32, and the result is rounded at random.

bfloat16 has 8 bits of precision, so an update below a 512th of its weight is lost by rounding to the nearest. Rounded up or
down with probabilities by which the mean is right, updates add up (Gupta et al., https://arxiv.org/abs/1502.02551, section 3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from toolkit.system.devices import chosen_type

_BLOCK = 2**16  # numbers
_PART = 2**24  # numbers that are in float32 at a time, but at least one tensor


class StochasticRounding(torch.optim.Optimizer):
    """Another optimizer over weights in bfloat16, whose step it takes in float32 for some of them at a time.

    Groups and state are those of one torch optimizer, so saving, loading and scaling work as for any other; the state is in
    float32. Random bits are a function of the number of updates so far, which each group has under `rounded_updates`: the same
    on each data rank, and after a resume.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        for group in inner.param_groups:
            group["rounded_updates"] = 0
        super().__init__(inner.param_groups, inner.defaults)
        self.grad_scale: torch.Tensor | None = None  # of fused optimizers, as `clip_and_update` sets them
        self.found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every group."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.param_groups[0].get("fused"):
            self.inner.grad_scale, self.inner.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
        random = {device: _generator(device, self.param_groups[0]["rounded_updates"]) for device in self._devices()}
        for part in _parts([p for group in self.param_groups for p in group["params"] if p.grad is not None]):
            self._update(part)
            for parameter, wide in part.items():
                is_half = parameter.dtype == torch.bfloat16
                parameter.copy_(rounded_at_random(wide, random[wide.device]) if is_half else wide)
        for group in self.param_groups:
            group["rounded_updates"] += 1
        return loss

    def _update(self, part: dict[torch.Tensor, torch.Tensor]) -> None:
        """One step of the inner optimizer on copies of some parameters. (With another type in `.data` DDP would lose them.)"""
        self.inner.param_groups = [
            {**group, "params": [part[p] for p in group["params"] if p in part]} for group in self.param_groups
        ]
        self.inner.state = defaultdict(dict, {wide: self.state[p] for p, wide in part.items() if p in self.state})
        self.inner.step()
        for parameter, wide in part.items():
            self.state[parameter] = self.inner.state[wide]
        self.inner.state.clear()

    def _devices(self) -> set[torch.device]:
        return {parameter.device for group in self.param_groups for parameter in group["params"]}


def rounded_at_random(numbers: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """float32 numbers in bfloat16, each rounded to one of its two neighbors with the probability that makes the mean right.

    A number that bfloat16 has stays as it is. Takes 16 random bits each of the generator, which is of the numbers' device. On a
    CPU in blocks that its cache holds: 3 ns a number, half of them for the random bits.
    """
    rounded, on_cpu = torch.empty_like(numbers, dtype=torch.bfloat16), chosen_type(numbers.device) == "cpu"
    flat, halves, size = numbers.reshape(-1), rounded.view(-1), _BLOCK if on_cpu else max(1, numbers.numel())
    for block, half in zip(flat.split(size), halves.split(size), strict=True):
        bits = torch.empty(-(-len(block) // 4), dtype=torch.int64, device=block.device)
        noise = bits.random_(-(2**63), None, generator=generator).view(torch.int16)[: len(block)]  # from -0x8000 to 0x7FFF
        carried = (block.view(torch.int32) + noise).add_(0x8000)
        half.view(torch.int16).copy_(carried.bitwise_right_shift_(16))
        if not on_cpu:  # CUDA's NaN has all bits set, and would become a zero
            half.copy_(torch.where(block.isfinite(), half, block.bfloat16()))
    return rounded


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _parts(parameters: list[torch.Tensor]) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
    """Parameters, each with a copy in float32 that has its gradient; the parameter's own is gone."""
    part, size = dict[torch.Tensor, torch.Tensor](), 0
    for parameter in parameters:
        if part and size + parameter.numel() > _PART:
            yield part
            part, size = {}, 0
        assert parameter.grad is not None
        part[parameter] = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
        part[parameter].grad, parameter.grad = parameter.grad.to(part[parameter].dtype), None
        size += parameter.numel()
    if part:
        yield part
