"""The floor of a training: its products of matrices, its attention and its optimizer's kernel, recorded and replayed bare.

What is left out is all else that a step does: norms, activation functions, casts, dropout, the loss, Python. A replayed
call finds its arguments in the processor's caches more often than the step's own does, so the floor is a little low.
Of memory the floor is what is held from step to step: weights (a teacher's and a reference's too), gradients, optimizer state.
"""

import gc
import time
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
REPLAYED = {
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._fused_adamw_,
    _aten._scaled_dot_product_flash_attention_for_cpu, _aten._scaled_dot_product_flash_attention_for_cpu_backward,
}  # fmt: skip
MOST_REPEATS = 5  # of calls that differ in nothing


class _Tensor(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> torch.Tensor:
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return empty.uniform_(0.1, 1.0) if self.dtype.is_floating_point else empty.zero_()


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Tensor(value.shape, value.stride(), value.dtype)
    return tuple(_described(each) for each in value) if isinstance(value, list | tuple) else value


def _made(value: Any) -> Any:
    if isinstance(value, _Tensor):
        return value.made()
    return [_made(each) for each in value] if isinstance(value, tuple) else value


class Recorder(TorchDispatchMode):
    """Counts the calls that the floor consists of; use it as a context, as often as need be."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()
        self.held: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in REPLAYED:
            self.calls[func, _described(args), tuple((name, _described(value)) for name, value in kwargs.items())] += 1
        return func(*args, **kwargs)

    def step_done(self, steps: int) -> None:
        """Call it after each step: after the first one all that is held is there."""
        if steps == 1:
            self.held = _held()

    @torch.no_grad()
    def seconds(self) -> float:
        """CPU seconds of all that was recorded, replayed with tensors of the same shapes, strides and types."""
        total = 0.0
        for (func, described, described_kwargs), count in self.calls.items():
            args, kwargs = _made(described), {name: _made(value) for name, value in described_kwargs}
            func(*args, **kwargs)  # libraries prepare themselves for a shape in its first call
            repeats = min(count, MOST_REPEATS)
            began = time.process_time()
            for _ in range(repeats):
                func(*args, **kwargs)
            total += count * (time.process_time() - began) / repeats
        return total


def _held() -> dict[str, float]:
    """GB of all parameters in this process, of the gradients that optimizers take, and of the optimizers' state."""
    alive = gc.get_objects()
    weights = [each for each in alive if isinstance(each, torch.nn.Parameter)]
    optimizers = [each for each in alive if isinstance(each, torch.optim.Optimizer)]
    trained = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    states = [each for optimizer in optimizers for state in optimizer.state.values() for each in state.values()]
    parts = {"weights": weights, "gradients": trained, "optimizer": states}
    return {f"{name} GB": _bytes(tensors) / 1e9 for name, tensors in parts.items()}


def _bytes(tensors: list[Any]) -> int:
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if torch.is_tensor(each)}
    return sum(storages.values())
