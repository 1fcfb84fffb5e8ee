"""One training step: the exact gradient of the global batch, clipped, guarded, applied."""

from collections.abc import Callable
from typing import Any

import torch

from toolkit.data.batch import Batch
from toolkit.data.order import seed_micro_batch
from toolkit.engines import engine_of

LossFn = Callable[[Any, dict[str, Any], dict[str, float]], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def train_step(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    batch: Batch,
    loss_fn: LossFn,
    learning_rates: list[float],
    *,
    max_grad_norm: float = 1.0,
) -> dict[str, torch.Tensor]:
    """Forward, backward, clip, guard and update for one global batch.

    `loss_fn(model, micro_batch, totals)` returns its part of the mean, already divided by the total of its unit; the parts
    of all micro-batches and ranks add up to the exact mean. A step whose loss or gradient is not finite on any rank changes
    no parameter and no optimiser state, on all ranks alike.

    Returns 0-d tensors, the same on every rank; with a fused optimiser nothing waits for the device (others wait once, to
    know whether the update may be made): `loss`; `grad_norm`, global and before
    clipping at `max_grad_norm` (0: no clipping); `applied`, 1 or 0; `nonfinite`, 1 for a skipped step that is not the
    search of fp16's loss scale; and the loss function's metrics.
    """
    if len(learning_rates) != len(optimizer.param_groups):
        raise ValueError(
            f"{len(optimizer.param_groups)} parameter groups need as many learning rates, not {len(learning_rates)}: "
            "schedule(progress) of build_optimizer returns them"
        )
    for group, rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = rate
    engine = engine_of(accelerator)
    parts: dict[str, torch.Tensor] = {}
    for i, micro_batch in enumerate(batch.micro_batches):
        if batch.seeds:
            seed_micro_batch(batch.seeds[i])
        last = i == len(batch.micro_batches) - 1
        with engine.accumulating(accelerator, model, last):
            loss, metrics = loss_fn(model, to_device(micro_batch, accelerator.device), batch.totals)
            weight = 1.0 if batch.real[i] else 0.0
            engine.backward(accelerator, model, loss * (weight * accelerator.num_processes), last)
        for name, value in {"loss": loss.detach(), **metrics}.items():
            value = value if batch.real[i] else torch.zeros_like(value)
            parts[name] = parts[name] + value if name in parts else value
    figures = _sum_over_ranks(accelerator, parts)
    return {**figures, **engine.clip_and_update(accelerator, model, optimizer, figures["loss"], max_grad_norm)}


def to_device(micro_batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The same micro-batch with its tensors on `device`."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in micro_batch.items()
    }


def _sum_over_ranks(accelerator: Any, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sums over the ranks, in one reduction for all figures together."""
    if accelerator.num_processes == 1:
        return parts
    stacked = torch.stack([value.double() for value in parts.values()])
    torch.distributed.all_reduce(stacked)
    return dict(zip(parts, stacked.unbind(), strict=True))
