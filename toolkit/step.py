"""One training step: the exact gradient of the global batch, clipped, guarded, applied."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from toolkit.data.batch import Batch
from toolkit.data.order import seed_micro_batch

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
    parts: dict[str, torch.Tensor] = {}
    for i, micro_batch in enumerate(batch.micro_batches):
        if batch.seeds:
            seed_micro_batch(batch.seeds[i])
        last = i == len(batch.micro_batches) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            loss, metrics = loss_fn(model, to_device(micro_batch, accelerator.device), batch.totals)
            weight = 1.0 if batch.real[i] else 0.0
            backward(accelerator, loss * (weight * accelerator.num_processes))
        for name, value in {"loss": loss.detach(), **metrics}.items():
            value = value if batch.real[i] else torch.zeros_like(value)
            parts[name] = parts[name] + value if name in parts else value
    figures = _sum_over_ranks(accelerator, parts)
    return {**figures, **clip_and_update(accelerator, model, optimizer, figures["loss"], max_grad_norm)}


def to_device(micro_batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The same micro-batch with its tensors on `device`."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in micro_batch.items()
    }


def backward(accelerator: Any, loss: torch.Tensor) -> None:
    """Backward of an already normalised loss. `accelerator.backward` would divide it by the accumulation again."""
    (accelerator.scaler.scale(loss) if accelerator.scaler is not None else loss).backward()


def _sum_over_ranks(accelerator: Any, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sums over the ranks, in one reduction for all figures together."""
    if accelerator.num_processes == 1:
        return parts
    stacked = torch.stack([value.double() for value in parts.values()])
    torch.distributed.all_reduce(stacked)
    return dict(zip(parts, stacked.unbind(), strict=True))


def clip_and_update(
    accelerator: Any, model: Any, optimizer: Any, loss: torch.Tensor, max_grad_norm: float
) -> dict[str, torch.Tensor]:
    """Clip by the global norm, update unless something is not finite, and clear the gradients.

    Gradients are the same on all ranks by now, and so is the loss: every rank comes to the same decision.
    """
    plain, scaler = getattr(optimizer, "optimizer", optimizer), accelerator.scaler
    if scaler is not None:
        scaler.unscale_(plain)
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    if max_grad_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    finite = torch.isfinite(norm) & torch.isfinite(loss)
    searching = scaler is not None and scaler.get_scale() > 1.0
    if scaler is None and finite.is_cuda and _skips_on_device(plain):
        plain.found_inf = (~finite).float()  # read by torch's fused kernels: no wait for the device
        plain.step()
    elif bool(finite):
        scaler.step(plain) if scaler is not None else plain.step()
    if scaler is not None:
        scaler.update()
    # The model's, not the optimiser's: that one clears only its own parameters, and a leftover would enter the next norm.
    model.zero_grad(set_to_none=True)
    incident = ~finite & ~torch.isfinite(loss) if searching else ~finite
    return {"grad_norm": norm.detach(), "applied": finite.float(), "nonfinite": incident.float()}


def _skips_on_device(optimizer: Any) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)
