"""Evaluation: every example of a split once, metrics that do not depend on how it was cut; and which one was the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from toolkit import checkpoint as ckpt
from toolkit.config import Refusal
from toolkit.data.loading.batch import Batch, check_batch
from toolkit.distributed.ranks import on_all, on_main
from toolkit.metrics.metric import Metrics
from toolkit.system.allocator import give_back_memory
from toolkit.system.evaluation_mode import evaluation_mode
from toolkit.system.numbers import show_decimals
from toolkit.training.step import to_device

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from toolkit.training.run import Run

__all__ = ["Metrics", "eval_with_gather"]


def eval_with_gather(
    accelerator: Accelerator, model: nn.Module, loader: Iterable[Batch] | None, metrics: Metrics, prefix: str = "eval_"
) -> dict[str, float]:
    """Metrics over all examples of the loader, the same on every rank, with `prefix` before each name.

    `loader` yields the same number of batches on every rank, one micro-batch each; a padding micro-batch (`real` is false) is
    computed, since engines that communicate in the forward pass need it, and counts nothing. Sums are reduced once at the end;
    rows are gathered once, in the order of the examples' indices. The model comes back in the mode it was in.

    Raises:
        Refusal: there are no rows to evaluate on (`loader` is None, or empty).
    """
    if loader is None:
        raise Refusal("There is no evaluation split. Take --eval-split or --eval-fraction, or --eval-strategy no.")
    if not isinstance(metrics, Metrics):
        raise TypeError(f"metrics are a tk.Metrics, such as tk.causal_lm_metrics, not {type(metrics).__name__}")
    give_back_memory()  # what steps left free fits few blocks of other batches, whose memory would come on top
    with evaluation_mode(model):
        observe = _observe_rows if metrics.gather else _observe_sums
        observed = observe(accelerator, model, loader, metrics)
    return {f"{prefix}{name}": value for name, value in _finalized(accelerator, metrics, observed).items()}


def _observe_sums(
    accelerator: Accelerator, model: nn.Module, loader: Iterable[Batch], metrics: Metrics
) -> dict[str, np.ndarray]:
    assert metrics.update is not None
    totals: dict[str, torch.Tensor] = {}
    for batch in loader:
        check_batch(batch)
        sums = metrics.update(model, to_device(batch.micro_batches[0], accelerator.device))
        for name, value in sums.items():
            value = _in_float64(value) if batch.real[0] else torch.zeros_like(_in_float64(value))
            totals[name] = totals[name] + value if name in totals else value
    _refuse_empty(totals)
    # one vector for one reduction; integers are exact in float64 up to 2**53
    vector = torch.cat([value.flatten() for value in totals.values()])
    if _ranks(accelerator):
        vector = accelerator.reduce(vector.to(accelerator.device), reduction="sum")
    pieces = vector.cpu().split([value.numel() for value in totals.values()])
    return {name: piece.reshape(value.shape).numpy() for (name, value), piece in zip(totals.items(), pieces, strict=True)}


def _observe_rows(
    accelerator: Accelerator, model: nn.Module, loader: Iterable[Batch], metrics: Metrics
) -> dict[str, np.ndarray]:
    assert metrics.gather is not None
    collected: dict[str, list[torch.Tensor]] = {}
    for batch in loader:
        check_batch(batch)
        rows = metrics.gather(model, to_device(batch.micro_batches[0], accelerator.device))
        device = next(iter(rows.values())).device
        for name, value in {"": torch.tensor(batch.indices[0], device=device), **rows}.items():
            # a padding micro-batch leaves no row, but shows a rank that has no other what a row looks like
            collected.setdefault(name, []).append(value if batch.real[0] else value[:0])
    _refuse_empty(collected)
    whole = {name: _from_all_ranks(accelerator, torch.cat(pieces)) for name, pieces in collected.items()}
    order = np.argsort(whole.pop(""), kind="stable")
    return {name: values[order] for name, values in whole.items()}


def _from_all_ranks(accelerator: Accelerator, rows: torch.Tensor) -> np.ndarray:
    """Rows of all ranks, one behind the other; ranks may have different numbers of them, also none."""
    if _ranks(accelerator):
        width = rows.shape[1:].numel()
        counts, widths = accelerator.gather(torch.tensor([[len(rows), width]], device=rows.device)).T.tolist()
        if len(set(widths)) > 1:
            raise Refusal(f"The metric's rows are of different widths on the ranks ({sorted(set(widths))}): cut or fill them.")
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        everyone = accelerator.gather(padded).split(max(counts))
        rows = torch.cat([piece[:count] for piece, count in zip(everyone, counts, strict=True)])
    return rows.cpu().numpy()


def _finalized(accelerator: Accelerator, metrics: Metrics, observed: dict[str, np.ndarray]) -> dict[str, float]:
    """Metrics from what was observed. Worked out once, since a user's function need not repeat itself exactly."""
    if not _ranks(accelerator):
        return metrics.finalize(observed)
    from accelerate.utils import broadcast_object_list

    outcome: list[Any] = [None, None]
    try:
        if accelerator.is_main_process:
            outcome[0] = metrics.finalize(observed)
    except Exception as error:
        outcome[1] = f"{type(error).__name__}: {error}"
        raise
    finally:
        broadcast_object_list(outcome)  # also of a failure: the other ranks would wait for ever
    if outcome[1] is not None:
        raise RuntimeError(f"The metrics failed on the main process: {outcome[1]}")
    return outcome[0]


def _in_float64(value: torch.Tensor) -> torch.Tensor:
    """MPS has no float64: its sums are added up on the CPU."""
    return (value.cpu() if value.device.type == "mps" else value).double()


def _ranks(accelerator: Accelerator) -> bool:
    return accelerator.num_processes > 1


def _refuse_empty(observed: dict[str, Any]) -> None:
    if not observed:
        raise Refusal("The evaluation split has no example. Raise --eval-fraction, or type --eval-strategy no.")


def load_best(run: Run) -> None:
    """Put the best evaluated weights into the run's model, when `load_best_model_at_end` is set."""
    run.check_decided()
    best, ranked = run.state.best, run.state.ranked
    if not run.config.load_best_model_at_end or not best or best["step"] == run.step:
        return
    run.saver.check(run.step, wait=True)
    run.accelerator.wait_for_everyone()
    # not the one that the pointer shows, which a full disk may have kept from moving
    name = f"step-{best['step']}"
    path = on_main(run.accelerator, lambda: next((p for p in ckpt.list_checkpoints(run.checkpoints) if p.name == name), None))
    if path is None:
        run.say(f"WARNING: the best weights (step {best['step']}) were not saved; the last ones are kept")
        return
    try:
        run.saver.put_model(on_all(run.accelerator, lambda: ckpt.load_checkpoint(path)), best["step"])
    except Refusal as refusal:
        run.say(f"WARNING: the best weights can't be loaded ({refusal}); the last ones are kept")
        return
    if len(ranked) > 1:
        kept = ", ".join(f"step-{step} ({show_decimals(value)})" for value, step in ranked)
        run.say(f"the best checkpoints by {best['name']}, all kept: {kept}")
    run.say(f"best {best['name']} {show_decimals(best['value'])} at step {best['step']}: its weights are loaded")


def stopped_improving(values: Sequence[float], patience: int | None, greater_is_better: bool = False) -> bool:
    """Whether the last `patience` values of a metric brought nothing better than those before; never where it is None.

    A value that is not finite is no better than any.
    """
    if patience is None or len(values) <= patience:
        return False
    best, worst = (max, -math.inf) if greater_is_better else (min, math.inf)
    values = [value if math.isfinite(value) else worst for value in values]
    earlier = best(values[:-patience])
    return best(earlier, *values[-patience:]) == earlier
