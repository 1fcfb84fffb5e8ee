"""One device, or data parallelism: every rank has the whole model and the whole optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.distributed.compat import is_compiled_whole
from toolkit.distributed.engines.engine import Engine
from toolkit.system.devices import chosen_type

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer

_LARGE_TABLE = 1_000_000  # numbers
_OF_PREPARED = ("no_sync", "set_requires_gradient_sync")  # of DDP's wrapper, and of a model that FSDP2 shards


def backward(accelerator: Accelerator, model: nn.Module, loss: torch.Tensor, last: bool) -> None:
    """Backward of an already normalized loss. `accelerator.backward` would divide it by the accumulation again."""
    (accelerator.scaler.scale(loss) if accelerator.scaler is not None else loss).backward()


def accumulating(accelerator: Accelerator, model: nn.Module, last: bool) -> contextlib.AbstractContextManager[None]:
    if any(hasattr(model, name) for name in _OF_PREPARED):
        return contextlib.nullcontext() if last else accelerator.no_sync(model)
    if accelerator.num_processes > 1:
        raise ValueError(
            f"{type(model).__name__}: the model is not prepared for {accelerator.num_processes} ranks, so each would train one "
            "of its own. Before the first step: model, optimizer = accelerator.prepare(model, optimizer)"
        )
    return _adding_rows(model)


@contextlib.contextmanager
def _adding_rows(model: nn.Module) -> Iterator[None]:
    """On a CPU large embeddings have sparse gradients, added to what is there row by row, for the tokens that were read.

    Else torch fills a table of zeros for each micro-batch and adds that: 25 to 50 ms, where 1,500 tokens of 32,768 are read,
    384 wide, in place of half of one.
    """
    embeddings = [] if is_compiled_whole(model) else [each for each in model.modules() if isinstance(each, nn.Embedding)]
    tables = [each for each in embeddings if _takes_rows(each)]
    for table in tables:
        table.sparse = True
    try:
        yield
    finally:
        for table in tables:
            table.sparse = False


def _takes_rows(table: nn.Embedding) -> bool:
    gradient = table.weight.grad
    is_large = gradient is not None and gradient.numel() >= _LARGE_TABLE and chosen_type(gradient.device) == "cpu"
    return is_large and not (table.sparse or table.scale_grad_by_freq)


def clip_and_update(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, loss: torch.Tensor, max_grad_norm: float
) -> dict[str, torch.Tensor]:
    """Gradients are the same on all ranks by now, and so is the loss: every rank comes to the same decision."""
    plain: Any = getattr(optimizer, "optimizer", optimizer)
    scaler = accelerator.scaler
    if scaler is not None:
        scaler.unscale_(plain)
    parameters = [p for p in model.parameters() if p.grad is not None]
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = squared_norm(gradients).sqrt()
    norm = norm if any(gradient.dtype == torch.float64 for gradient in gradients) else norm.float()
    finite = torch.isfinite(norm) & torch.isfinite(loss)
    searching = scaler is not None and scaler.get_scale() > 1.0
    is_fused = all(group.get("fused") for group in plain.param_groups) and chosen_type(norm.device) in ("cpu", "cuda")
    if is_fused and scaler is None and norm.dtype == torch.float32:
        _fused_step(plain, norm, finite, max_grad_norm)
    else:
        if max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        if bool(finite):
            scaler.step(plain) if scaler is not None else plain.step()
    if scaler is not None:
        scaler.update()
    for parameter in parameters:  # not only the optimizer's: a leftover would enter the next norm
        parameter.grad = None
    incident = ~finite & ~torch.isfinite(loss) if searching else ~finite
    return {"grad_norm": norm.detach(), "applied": finite.float(), "nonfinite": incident.float()}


def _fused_step(optimizer: Any, norm: torch.Tensor, finite: torch.Tensor, max_grad_norm: float) -> None:
    """Clip and update in one pass, without a wait: torch's fused kernels divide by `grad_scale` and read `found_inf`."""
    optimizer.found_inf = (~finite).float()
    optimizer.grad_scale = ((norm + 1e-6) / max_grad_norm).clamp(min=1.0) if max_grad_norm > 0 else None
    optimizer.step()
    optimizer.found_inf = optimizer.grad_scale = None


def squared_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The sum of all squares, 0-d, float64 on the CPU.

    torch's (2.13) own norm adds up one number after another there: 4e-5 off for an embedding of a million numbers. Of rows of
    512 it is right to 1e-7, and takes a fifth of the time of squares that are added up.
    """
    if not gradients or chosen_type(gradients[0].device) != "cpu":
        return torch.nn.utils.get_total_norm(gradients).square()
    return torch.stack([_squares(gradient.reshape(-1)) for gradient in gradients]).sum()


def _squares(numbers: torch.Tensor) -> torch.Tensor:
    dtype, in_rows = torch.promote_types(numbers.dtype, torch.float32), len(numbers) // 512 * 512
    norms = torch.linalg.vector_norm(numbers[:in_rows].view(-1, 512), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(numbers[in_rows:], dtype=dtype)
    return torch.cat([norms, rest[None]]).double().square().sum()


def place_frozen(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Whole on every rank."""
    return model.to(accelerator.device)


ENGINE = Engine(lambda accelerator: "plain", backward, accumulating, clip_and_update, place_frozen)
