"""Figures of steps on their way from the device to a logging event."""

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from toolkit.data.loading.batch import Batch
from toolkit.tracking.throughput import model_work, peak_flops, training_flops

WORK = ("model_tokens", "head_positions", "pairs")  # of this rank's model, for its FLOPs
FLAGS = ("applied", "nonfinite")  # of a step, not figures to average


@dataclass
class StepFigures:
    """What one step returned: 0-d tensors first, numbers once read."""

    step: int
    batch: Batch
    values: dict[str, Any]


@dataclass
class Window:
    """The steps since the last logging event. Their figures stay on the device until they are read, all at once."""

    unread: list[StepFigures] = field(default_factory=list)
    steps: list[StepFigures] = field(default_factory=list)
    seconds: float = 0.0  # in training steps: evaluating, sampling and saving are not part of any rate
    since: float = field(default_factory=time.monotonic)

    def resume_clock(self) -> None:
        """A step begins."""
        self.since = time.monotonic()

    def stop_clock(self) -> None:
        """A step has ended."""
        self.seconds += time.monotonic() - self.since

    def add(self, step: int, batch: Batch, figures: dict[str, torch.Tensor]) -> None:
        # the batch without its tensors: a window must not hold the memory of ten batches
        work = dict.fromkeys(WORK, 0.0)
        for micro_batch in batch.micro_batches:
            if "input_ids" in micro_batch:
                work = {name: work[name] + value for name, value in model_work(micro_batch).items()}
        light = replace(batch, micro_batches=[], totals={**batch.totals, **work})
        self.unread.append(StepFigures(step, light, dict(figures)))

    def read(self) -> list[StepFigures]:
        """Wait for the device once and turn the unread figures into numbers; returns those steps."""
        fresh, self.unread = self.unread, []
        if fresh:
            names = sorted(fresh[0].values)
            table = torch.stack([torch.stack([step.values[name].double() for name in names]) for step in fresh]).cpu().tolist()
            for step, row in zip(fresh, table, strict=True):
                step.values = dict(zip(names, row, strict=True))
        self.steps += fresh
        return fresh

    def event(self, optimizer: Any, model: Any, accelerator: Any) -> dict[str, float]:
        """One logging event for the read steps: means over those that count, and rates. Empties the window.

        A step that was not finite is counted in `nonfinite_steps` and enters no mean. Nor does a figure that is not a number,
        as that of desirable answers is in a step that has none.
        """
        seconds, self.seconds = self.seconds, 0.0
        steps, self.steps = self.steps, []
        good = [step.values for step in steps if not step.values.get("nonfinite")]
        event = {}
        for name in good[0] if good else ():
            known = [values[name] for values in good if not math.isnan(values[name])]
            if known and name not in FLAGS:
                event[name] = sum(known) / len(known)
        event["learning_rate"] = max(group["lr"] for group in optimizer.param_groups)
        event["examples_per_second"] = sum(step.batch.totals["examples"] for step in steps) / seconds
        if "tokens" in steps[0].batch.totals:
            event["tokens_per_second"] = sum(step.batch.totals["tokens"] for step in steps) / seconds
        peak = peak_flops(accelerator.device)
        if peak:
            work = (sum(step.batch.totals[name] for step in steps) for name in WORK)
            event["mfu"] = training_flops(model, *work) / seconds / peak
        if len(good) < len(steps):
            event["nonfinite_steps"] = len(steps) - len(good)
        return event
