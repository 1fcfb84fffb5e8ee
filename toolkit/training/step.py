"""One training step: the exact gradient of the global batch, clipped, guarded, applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from toolkit.data.loading.batch import Batch, MicroBatch, check_batch
from toolkit.data.loading.order import seed_micro_batch
from toolkit.distributed.engines import engine_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

_OF_THE_STEP = {"loss", "grad_norm", "applied", "nonfinite"}  # what `train_step` returns next to the loss function's metrics
LossFn = Callable[[Any, MicroBatch, dict[str, float]], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def train_step(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, loss_fn: LossFn,
    learning_rates: list[float], *, max_grad_norm: float = 1.0,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Forward, backward, clip, guard and update for one global batch: `accumulate_gradients`, then `clip_and_update`.

    A step whose loss or gradient is not finite on any rank changes no parameter and no optimizer state, on all ranks alike.

    Returns 0-d tensors, the same on every rank; with a fused optimizer nothing waits for the device (others wait once, to
    agree whether the update may be made): `loss`; `grad_norm`, global and before
    clipping at `max_grad_norm` (0: no clipping); `applied`, 1 or 0; `nonfinite`, 1 for a skipped step that is not the
    search of fp16's loss scale; and the loss function's metrics.
    """
    set_learning_rates(optimizer, learning_rates)
    metrics = accumulate_gradients(accelerator, model, batch, loss_fn)
    loss = metrics["loss"]
    return metrics | clip_and_update(accelerator, model, optimizer, loss, learning_rates, max_grad_norm=max_grad_norm)


def accumulate_gradients(accelerator: Accelerator, model: nn.Module, batch: Batch, loss_fn: LossFn) -> dict[str, torch.Tensor]:
    """Add the gradient of the global batch's mean loss to `.grad`, and return the loss and the loss function's metrics.

    `loss_fn(model, micro_batch, totals)` returns its part of the mean, already divided by the total of its unit; the parts
    of all micro-batches and ranks add up to the exact mean. So do its metrics, 0-d tensors; one whose name ends in `_max` is
    their maximum. On one device and under DDP every parameter then has the gradient of the whole global batch, not clipped
    yet; ZeRO and FSDP2 keep a part of it on each rank. With fp16 gradients are multiplied by the loss scale until
    `clip_and_update` divides by it.

    Raises:
        TypeError: the loss function doesn't return a loss and a dictionary of metrics.
        ValueError: a metric has a name of what `train_step` returns itself, such as `loss`.
    """
    check_batch(batch)
    sums: dict[str, torch.Tensor] = {}
    for index in range(len(batch.micro_batches)):
        for name, part in accumulate_micro_batch(accelerator, model, batch, index, loss_fn).items():
            join = torch.maximum if is_maximum(name) else torch.add
            sums[name] = join(sums[name], part) if name in sums else part
    return sum_over_ranks(accelerator, sums)


def accumulate_micro_batch(
    accelerator: Accelerator, model: nn.Module, batch: Batch, index: int, loss_fn: LossFn
) -> dict[str, torch.Tensor]:
    """Forward and backward of one micro-batch: adds its part of the gradient to `.grad`.

    Returns this rank's parts of the loss and of the loss function's metrics, zero for a padding micro-batch. Micro-batches are
    taken in their order: ranks exchange gradients with the last one, so under DDP `.grad` is this rank's alone until then,
    multiplied by the number of ranks.
    """
    engine, last = engine_of(accelerator), index == len(batch.micro_batches) - 1
    if batch.seeds:
        seed_micro_batch(batch.seeds[index])
    with engine.accumulating(accelerator, model, last):
        micro_batch = to_device(batch.micro_batches[index], accelerator.device)
        loss, metrics = loss_and_metrics(loss_fn, model, micro_batch, batch.totals)
        weight = 1.0 if batch.real[index] else 0.0
        engine.backward(accelerator, model, loss * (weight * accelerator.num_processes), last)
    if taken := sorted(metrics.keys() & _OF_THE_STEP):
        raise ValueError(f"the loss function returns metrics by the names {taken}, which are those of the step: rename them")
    named = {"loss": loss, **metrics}
    parts = {name: torch.as_tensor(part, device=loss.device).detach() for name, part in named.items()}
    return parts if batch.real[index] else {name: torch.zeros_like(part) for name, part in parts.items()}


def loss_and_metrics(
    loss_fn: LossFn, model: Any, micro_batch: MicroBatch, totals: dict[str, float]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What the loss function returns; TypeError where it isn't a loss with a dictionary of metrics."""
    returned = loss_fn(model, micro_batch, totals)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"the loss function returns {type(returned).__name__}, not two values: the loss, and a dictionary of metrics, "
            "which may be empty: return loss, {}"
        )
    return returned


def clip_and_update(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor,
    learning_rates: list[float], *, max_grad_norm: float = 1.0,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Clip the gradients, update the parameters unless something is not finite, and clear the gradients.

    `loss`: of the global batch, as `accumulate_gradients` returns it; where it is not finite on all ranks alike, nothing is
    updated. Returns `grad_norm`, `applied` and `nonfinite`, as `train_step` does.
    """
    set_learning_rates(optimizer, learning_rates)
    return engine_of(accelerator).clip_and_update(accelerator, model, optimizer, loss, max_grad_norm)


def mean_metrics(steps: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The metrics of several updates as those of one step: means; of `*_max` and `nonfinite` maxima."""
    if len(steps) == 1:
        return steps[0]
    found = {name: torch.stack([step[name] for step in steps]).mean() for name in steps[0]}
    for name in found:
        if is_maximum(name) or name in ("nonfinite", "applied"):
            values = torch.stack([step[name] for step in steps])
            found[name] = values.amin() if name == "applied" else values.amax()
    return found


def set_learning_rates(optimizer: torch.optim.Optimizer, learning_rates: list[float]) -> None:
    """The rate of each parameter group, in the order of `optimizer.param_groups`."""
    groups = len(optimizer.param_groups)
    if not isinstance(learning_rates, Sequence) or len(learning_rates) != groups:
        raise ValueError(
            f"learning_rates is a list with a learning rate for each parameter group, {groups} in all, not {learning_rates}: "
            "schedule(progress) of build_optimizer returns one"
        )
    for group, rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = rate


def to_device(micro_batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """The same micro-batch with its tensors on `device`."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in micro_batch.items()
    }


def sum_over_ranks(accelerator: Accelerator, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sums of 0-d tensors over the ranks, in one reduction for all of them, and maxima in another. Every rank calls it."""
    if accelerator.num_processes == 1:
        return parts
    summed = dict(parts)
    for names, operation in (
        ([name for name in parts if not is_maximum(name)], torch.distributed.ReduceOp.SUM),
        ([name for name in parts if is_maximum(name)], torch.distributed.ReduceOp.MAX),
    ):
        if names:
            stacked = torch.stack([parts[name].double() for name in names])
            torch.distributed.all_reduce(stacked, operation)
            summed.update(zip(names, stacked.unbind(), strict=True))
    return summed


def is_maximum(name: str) -> bool:
    """Whether a metric is the largest value, at least 0, of what micro-batches return, and not their sum."""
    return name.endswith("_max")
