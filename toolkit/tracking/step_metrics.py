"""Metrics of steps on their way from the device to a logging event."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from toolkit.data.loading.batch import Batch
from toolkit.tracking.throughput import model_work, peak_flops, training_flops

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

WORK = ("model_tokens", "head_positions", "pairs")  # of this rank's model, for its FLOPs
FLAGS = ("applied", "nonfinite")  # of a step, not metrics to average


@dataclass
class StepMetrics:
    """What one step returned, 0-d tensors until they are read, and of its batch what JSON holds: no tensors of examples."""

    step: int
    values: dict[str, Any]
    totals: dict[str, float]
    position: int
    size: int
    examples: list[int]


@dataclass
class Window:
    """The steps since the last logging event. Their metrics stay on the device until they are read, all at once."""

    unread: list[StepMetrics] = field(default_factory=list)
    steps: list[StepMetrics] = field(default_factory=list)
    seconds: float = 0.0  # in training steps: evaluating, sampling and saving are not part of any rate
    waiting: float = 0.0  # of these, for data
    since: float = field(default_factory=time.monotonic)

    def resume_clock(self) -> None:
        """A step begins."""
        self.since = time.monotonic()

    def stop_clock(self) -> None:
        """A step has ended."""
        self.seconds += time.monotonic() - self.since

    def wait_for(self, batches: Iterator[Batch]) -> Batch | None:
        """The next batch, None after the last one; the time until it is there counts as waiting."""
        began = time.monotonic()
        batch = next(batches, None)
        self.waiting += time.monotonic() - began
        return batch

    def add(self, step: int, batch: Batch, metrics: Mapping[str, torch.Tensor]) -> None:
        """Take the metrics that a step returned."""
        work = dict.fromkeys(WORK, 0.0)
        for micro_batch in batch.micro_batches:
            if "input_ids" in micro_batch:
                work = {name: work[name] + value for name, value in model_work(micro_batch).items()}
        totals = {**batch.totals, **work}
        self.unread.append(StepMetrics(step, dict(metrics), totals, batch.position, batch.size, batch.examples))

    def read(self) -> list[StepMetrics]:
        """Wait for the device once and turn the unread metrics into numbers; returns those steps."""
        fresh, self.unread = self.unread, []
        for step in fresh:
            step.values = dict(sorted(step.values.items()))
        devices = {name: value.device for name, value in fresh[0].values.items()} if fresh else {}
        for device in sorted(set(devices.values()), key=str):  # metrics of rollouts are on the CPU, those of a step are not
            names = [name for name in devices if devices[name] == device]
            kind = torch.float32 if device.type == "mps" else torch.float64
            table = torch.stack([torch.stack([step.values[name].to(kind) for name in names]) for step in fresh]).tolist()
            for step, row in zip(fresh, table, strict=True):
                step.values |= zip(names, row, strict=True)
        self.steps += fresh
        return fresh

    def event(self, optimizer: torch.optim.Optimizer, model: PreTrainedModel, accelerator: Accelerator) -> dict[str, float]:
        """One logging event for the read steps: means over those that count (extremes of `*_max`, `*_min`), and rates.

        The window is empty then. `data_wait` is the share of the time that this rank waited for batches.
        A step that was not finite is counted in `nonfinite_steps` and enters no mean. Nor does a metric that is not a number,
        as that of desirable answers is in a step that has none.
        """
        seconds, waiting, self.seconds, self.waiting = self.seconds, self.waiting, 0.0, 0.0
        steps, self.steps = self.steps, []
        good = [step.values for step in steps if not step.values.get("nonfinite")]
        event = {}
        for name in good[0] if good else ():
            known = [values[name] for values in good if not math.isnan(values[name])]
            if known and name not in FLAGS:
                extreme = {"_max": max, "_min": min}.get(name[-4:])
                event[name] = extreme(known) if extreme else sum(known) / len(known)
        event["learning_rate"] = max(group["lr"] for group in optimizer.param_groups)
        event["examples_per_second"] = sum(step.totals["examples"] for step in steps) / seconds
        if "tokens" in steps[0].totals:
            event["tokens_per_second"] = sum(step.totals["tokens"] for step in steps) / seconds
        event["data_wait"] = waiting / seconds
        peak = peak_flops(accelerator.device)
        if peak:
            work = (sum(step.totals[name] for step in steps) for name in WORK)
            event["mfu"] = training_flops(model, *work) / seconds / peak
        if len(good) < len(steps):
            event["nonfinite_steps"] = len(steps) - len(good)
        return event
