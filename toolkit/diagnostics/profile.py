"""Where the time of a recipe's steps goes, measured while its own `main` trains."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import toolkit as tk
from toolkit.config import Refusal, Settings
from toolkit.config.conditions import trains_a_teacher
from toolkit.config.reading import values_of
from toolkit.data.loading.batch import Batch
from toolkit.diagnostics.compat import record_gpu_memory, write_gpu_memory
from toolkit.diagnostics.replacements import Replacements
from toolkit.diagnostics.short_runs import QUIET, forget_accelerator

WARM_UP, TRACED = 3, 3  # steps: compiling, first allocations; and those under torch's profiler, which slows them
PHASES = ("data", "forward", "backward", "clipping", "optimizer", "other")


class _Enough(BaseException):
    """All steps were taken. It is no Exception: a recipe that catches those must not go on."""


@dataclass
class Profile:
    """Medians over the timed steps.

    `seconds`: of a step by phase, `step` of all of it. `operations`: (name, share of the traced time, calls a step), the
    longest first. `padding`: share of the positions that no token fills, in the worst step. `tokens_per_second`, `mfu`: as
    logged.
    """

    device: str
    seconds: dict[str, float]
    step: float
    operations: list[tuple[str, float, float]] = field(default_factory=list)
    padding: float = 0.0
    tokens_per_second: float | None = None
    mfu: float | None = None

    def share(self, phase: str) -> float:
        return self.seconds.get(phase, 0.0) / self.step


def profile(
    main: Callable[[Any], Any], config: Settings, steps: int = 10, trace: Path | None = None, memory: Path | None = None
) -> Profile:
    """Train a recipe for WARM_UP + steps + TRACED steps in a temporary directory and time their parts.

    On a GPU the device is waited for between the parts, so that each has its own time; steps overlap less than in a run.

    Args:
        trace: a file for a Chrome trace of the traced steps.
        memory: a file for a snapshot of CUDA's allocator (https://pytorch.org/memory_viz).

    Raises:
        Refusal: the recipe refuses its settings or data, or its data end before that many steps.
    """
    if trains_a_teacher(values_of(config)):
        raise Refusal("--teacher: name one. Without it the recipe trains a teacher first, whose steps would be timed.")
    timer, printed = _Timer(steps, trace, memory), io.StringIO()
    forget_accelerator()
    with tempfile.TemporaryDirectory(prefix="profile-") as folder, _timed(timer):
        values = values_of(config)
        quiet = {name: value for name, value in {**QUIET, "output_dir": f"{folder}/run"}.items() if name in values}
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                main(dataclasses.replace(config, **quiet))
        except _Enough:
            pass
        finally:
            timer.close()
            forget_accelerator()
        events = _events(Path(folder) / "run" / "metrics.jsonl")
    if len(timer.steps) < steps:
        needed = WARM_UP + steps + TRACED
        raise Refusal(f"the run ended before {needed} steps, which a profile of {steps} needs. Give it more data.")
    medians = {phase: statistics.median(each[phase] for each in timer.steps) for phase in PHASES}
    speeds, mfus = ([e[name] for e in events[WARM_UP : WARM_UP + steps] if name in e] for name in ("tokens_per_second", "mfu"))
    return Profile(
        timer.device, medians, sum(medians.values()), timer.operations, timer.padding,
        statistics.median(speeds) if speeds else None, statistics.median(mfus) if mfus else None,
    )  # fmt: skip


class _Timer:
    """A stopwatch whose time goes to one phase at a time."""

    def __init__(self, count: int, trace: Path | None, memory: Path | None) -> None:
        self.count, self.trace, self.memory = count, trace, memory
        self.steps: list[dict[str, float]] = []
        self.operations: list[tuple[str, float, float]] = []
        self.padding, self.device = 0.0, "cuda" if torch.cuda.is_available() else "cpu"
        self._now: dict[str, float] = defaultdict(float)
        self._phase, self._since, self._outer = "other", time.perf_counter(), list[str]()
        self._profiler: Any = None

    def enter(self, phase: str) -> None:
        self._outer.append(self._phase)
        self._switch(phase)

    def leave(self) -> None:
        self._switch(self._outer.pop())

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self.enter(phase)
        try:
            yield
        finally:
            self.leave()

    def begin_step(self, number: int) -> None:
        """The next step begins: the time since the last one is that one's."""
        self._switch(self._phase)
        if WARM_UP < number <= WARM_UP + self.count:
            self.steps.append(self._now)
        self._now = defaultdict(float)
        if number == WARM_UP + self.count:
            if self.memory is not None and torch.cuda.is_available():
                record_gpu_memory()
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.__enter__()
        elif number == WARM_UP + self.count + TRACED:
            raise _Enough

    def close(self) -> None:
        """Read torch's profiler, and write what was asked for."""
        if self._profiler is None:
            return
        self._profiler.__exit__(None, None, None)
        on_gpu = torch.cuda.is_available()
        averages = self._profiler.key_averages()
        totals = [(e.key, e.self_device_time_total if on_gpu else e.self_cpu_time_total, e.count) for e in averages]
        whole = sum(each for _, each, _ in totals) or 1.0
        named = sorted(totals, key=lambda each: -each[1])[:8]
        self.operations = [(name, each / whole, count / TRACED) for name, each, count in named if each]
        if self.trace is not None:
            self._profiler.export_chrome_trace(str(self.trace))
        if self.memory is not None and on_gpu:
            write_gpu_memory(self.memory)

    def _switch(self, phase: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._now[self._phase] += now - self._since
        self._phase, self._since = phase, now


@contextlib.contextmanager
def _timed(timer: _Timer) -> Iterator[None]:
    with Replacements() as replace:
        loaders = importlib.import_module(tk.build_dataloaders.__module__)
        for loader in (loaders.TrainLoader, loaders.StreamLoader):
            replace.attribute(loader, "batches", functools.partial(_batches, timer))
        replace.attribute(torch.Tensor, "backward", functools.partial(_in_phase, timer, "backward"))
        step = importlib.import_module(tk.train_step.__module__)
        replace.attribute(step, "accumulate_micro_batch", functools.partial(_in_phase, timer, "forward"))
        replace.attribute(step, "clip_and_update", functools.partial(_in_phase, timer, "clipping"))
        replace.callback(register_optimizer_step_pre_hook(lambda *_: timer.enter("optimizer")).remove)
        replace.callback(register_optimizer_step_post_hook(lambda *_: timer.leave()).remove)
        yield


def _in_phase(timer: _Timer, phase: str, original: Callable[..., Any], *values: Any, **named: Any) -> Any:
    with timer.during(phase):
        return original(*values, **named)


def _batches(timer: _Timer, original: Callable[..., Iterator[Batch]], *values: Any) -> Iterator[Batch]:
    batches, number = original(*values), 0
    while True:
        with timer.during("data"):
            batch = next(batches, None)
        if batch is None:
            return
        timer.begin_step(number)
        number += 1
        timer.padding = max(timer.padding, _padding(batch))
        yield batch


def _padding(batch: Batch) -> float:
    padded = [each for each in batch.micro_batches if "token_places" not in each]  # of others the padding is not computed
    masks = [each["attention_mask"] for each in padded if isinstance(each.get("attention_mask"), torch.Tensor)]
    positions = sum(mask.numel() for mask in masks)
    return 1 - sum(int(mask.sum()) for mask in masks) / positions if positions else 0.0


def _events(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if "loss" in event]
