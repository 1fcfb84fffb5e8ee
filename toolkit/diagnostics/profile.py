"""Where the time of a recipe's steps goes, measured while its own `main` trains."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from toolkit.config import Refusal, Settings
from toolkit.config.conditions import trains_a_teacher
from toolkit.config.reading import values_of
from toolkit.data.loading.batch import Batch
from toolkit.data.loading.loaders import TrainLoader
from toolkit.data.loading.streams import StreamLoader
from toolkit.diagnostics.communication import RankTimes, from_all_ranks, is_collective, means, share_of_waiting, traced_steps
from toolkit.diagnostics.compat import record_gpu_memory, write_gpu_memory
from toolkit.diagnostics.replacements import Replacements
from toolkit.diagnostics.saving import NotMeasured, Saving, measure_saving
from toolkit.diagnostics.short_runs import ended_by_signals, forget_accelerator, never_evaluated
from toolkit.diagnostics.small import QUIET
from toolkit.distributed.engines import engine_of
from toolkit.distributed.engines.engine import Exchanged
from toolkit.system.files import temporary_folder
from toolkit.tracking.step_metrics import Window, model_work
from toolkit.training.run import Run

WARM_UP, TRACED = 3, 3  # steps: compiling, first allocations; and those under torch's profiler, which slows them
LONG_STEP = 2.0  # seconds; one of them is traced where there is one rank: reading a trace takes as long as its steps
LEAST_STEPS = 3  # that are timed
PHASES = ("data", "sampling", "scoring", "forward", "backward", "clipping", "optimizer", "other")
# Public functions that a loop calls itself, and the phase that each is.
_CALLED = {
    "sample_rollouts": "sampling", "with_own_answers": "sampling", "score_rollouts": "scoring", "with_logps": "forward",
    "cache_gradients": "forward", "estimate_kl": "forward", "accumulate_micro_batch": "forward", "clip_and_update": "clipping",
}  # fmt: skip


class _Enough(BaseException):
    """All steps were taken. It is no Exception: a recipe that catches those must not go on."""


@dataclass
class Profile:
    """Medians over the timed steps, of several ranks their means.

    `seconds`: of a step by phase, `step` of all of it. Of several ranks `communication` is what no computation hides, apart
    from the phase in which it happens, `waiting` the share of it that is spent on waiting for the slowest rank, and `ranks` the
    seconds of each. `engine`: what the ranks share the work by, `exchanged`: between them in each
    micro-batch. `operations`: of the first rank; `padding`: of the worst.
    `tokens_per_second`: of all ranks; `mfu`: of all their devices. `busy`: seconds of a step in which the
    first rank's GPU computes. `saving`: None where it was not measured, and `not_saved` says why.
    """

    device: str
    seconds: dict[str, float]
    step: float
    operations: list[tuple[str, float, float]] = field(default_factory=list)
    padding: float = 0.0
    tokens_per_second: float | None = None
    mfu: float | None = None
    engine: str = ""
    exchanged: Exchanged = "nothing"
    waiting: float = 0.0
    busy: float | None = None
    ranks: list[dict[str, float]] = field(default_factory=list)
    saving: Saving | None = None
    not_saved: str = ""

    def share(self, phase: str) -> float:
        return self.seconds.get(phase, 0.0) / self.step

    def slowest(self, phase: str) -> tuple[int, float]:
        """The rank that needs most seconds for a phase, and these."""
        return max(enumerate(rank[phase] for rank in self.ranks), key=lambda each: each[1])

    def late(self) -> tuple[int, str, float]:
        """The rank with most work of its own, the phase in which it falls behind the mean, and by how many seconds in all."""
        alone = [sum(rank.values()) - rank["communication"] for rank in self.ranks]
        last = alone.index(max(alone))
        phase = max(PHASES, key=lambda phase: self.ranks[last][phase] - self.seconds[phase])
        return last, phase, alone[last] - statistics.fmean(alone)


def profile(
    main: Callable[[Any], Any], config: Settings, steps: int = 10, trace: Path | None = None, memory: Path | None = None,
    step_done: Callable[[int], object] = lambda number: None,
) -> Profile:  # fmt: skip
    """Train a recipe for WARM_UP + steps + TRACED steps in a temporary directory and time their parts, then save a checkpoint.

    Where this process is one of several ranks, each of them calls it, and each returns the profile of all.
    On a GPU the device is waited for between the parts, so that each has its own time; steps overlap less than in a run.

    Args:
        trace: a file for a Chrome trace of the traced steps.
        memory: a file for a snapshot of CUDA's allocator (https://pytorch.org/memory_viz).
        step_done: is called after each of the first WARM_UP + steps, with its number.

    Raises:
        Refusal: the recipe refuses its settings or data, or its data end before that many steps.
    """
    if trains_a_teacher(values_of(config)):
        raise Refusal("--teacher: name one. Without it the recipe trains a teacher first, whose steps would be timed.")
    timer, printed = _Timer(steps, trace, memory, values_of(config), step_done), io.StringIO()
    forget_accelerator()
    with ended_by_signals(), never_evaluated(), temporary_folder("profile") as folder, _timed(timer):
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
    if not timer.measured:
        fewer = timer.begun + 1 - WARM_UP - timer.traced  # of steps that are counted from 0
        what_helps = f"Take --steps {fewer}, or a" if fewer >= LEAST_STEPS else "Give it more data, or a"
        raise Refusal(
            f"the run ended before {WARM_UP + steps + timer.traced} steps, which a profile of {steps} needs. {what_helps} "
            "larger --max-steps."
        )
    found = profile_of(timer.measured, timer.device, timer.engine, timer.exchanged)
    return dataclasses.replace(found, saving=timer.saving, not_saved=timer.not_saved)


def profile_of(ranks: list[RankTimes], device: str, engine: str = "", exchanged: Exchanged = "nothing") -> Profile:
    """The profile of a run from what each of its ranks measured."""
    several = len(ranks) > 1
    parts = [rank.apart() if several else rank.seconds for rank in ranks]
    seconds, first = means(parts), ranks[0]
    used = [rank.mfu for rank in ranks if rank.mfu is not None]
    return Profile(
        device, seconds, sum(seconds.values()), first.operations, max(rank.padding for rank in ranks),
        first.tokens_per_second, statistics.fmean(used) if used else None, engine if several else "", exchanged,
        share_of_waiting(ranks) if several else 0.0, first.busy, parts if several else [],
    )  # fmt: skip


class _Timer:
    """A stopwatch whose time goes to one phase at a time."""

    def __init__(
        self, count: int, trace: Path | None, memory: Path | None, settings: Mapping[str, Any],
        step_done: Callable[[int], object],
    ) -> None:  # fmt: skip
        self.count, self.trace, self.memory, self.settings, self.step_done = count, trace, memory, settings, step_done
        self.traced = TRACED
        self.run: Run | None = None
        self.saving: Saving | None = None
        self.not_saved = "the recipe saves with code of its own"
        self.steps: list[dict[str, float]] = []
        self.events: list[dict[str, float]] = []  # as logged
        self.measured: list[RankTimes] = []  # by each rank; filled at the end
        self.padding, self.device, self.engine = 0.0, "cuda" if torch.cuda.is_available() else "cpu", ""
        self.exchanged: Exchanged = "nothing"
        self._now: dict[str, float] = defaultdict(float)
        self._phase, self._since, self._outer = "other", time.perf_counter(), list[str]()
        self._profiler: Any = None
        self._mark, self._marks = contextlib.ExitStack(), dict[str, tuple[int, str]]()  # of the traced steps, in the trace
        self.begun = 0

    def enter(self, phase: str) -> None:
        self._outer.append(self._phase)
        if (self._phase, phase) == ("other", "backward"):  # a loop without train_step: since the batch, or the last backward
            self._phase = "forward"
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
        self._now, self.begun = defaultdict(float), number
        if 0 < number <= WARM_UP + self.count:
            self.step_done(number)
            self._since = time.perf_counter()  # what that took is no part of a step
        if number == WARM_UP + self.count:
            if self.memory is not None and torch.cuda.is_available():
                record_gpu_memory()
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.__enter__()
            ranks = from_all_ranks(None)  # on one of which it starts later than on another
            if len(ranks) == 1 and statistics.median(sum(step.values()) for step in self.steps) > LONG_STEP:
                self.traced = 1
        elif number == WARM_UP + self.count + self.traced:
            self.measured = from_all_ranks(self._close_and_read())  # here, where the ranks still have their group
            self._save()
            raise _Enough
        self._mark_phase()

    def close(self) -> None:
        """End torch's profiler, where it is on."""
        self._mark.close()
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
        self._profiler = None

    def _save(self) -> None:
        if self.run is None:
            return
        step = statistics.fmean(sum(rank.seconds.values()) for rank in self.measured)
        try:
            self.saving, self.not_saved = measure_saving(self.run, self.settings, step), ""
        except NotMeasured as reason:
            self.not_saved = str(reason)

    def _close_and_read(self) -> RankTimes:
        """What this rank measured; what was asked for is written."""
        profiler, on_gpu = self._profiler, torch.cuda.is_available()
        self.close()
        averages = [e for e in profiler.key_averages() if not e.is_user_annotation and not is_collective(e.key)]
        if on_gpu:  # its kernels; what launches them is listed as well, with their time
            averages = [e for e in averages if e.device_type == torch.autograd.DeviceType.CUDA]
        totals = [(e.key, e.self_device_time_total if on_gpu else e.self_cpu_time_total, e.count) for e in averages]
        whole = sum(each for _, each, _ in totals) or 1.0
        named = sorted(totals, key=lambda each: -each[1])[:8]
        operations = [(name, each / whole, count / self.traced) for name, each, count in named if each]
        if self.trace is not None:
            profiler.export_chrome_trace(str(self.trace))
        if self.memory is not None and on_gpu:
            write_gpu_memory(self.memory)
        medians = {phase: statistics.median(each[phase] for each in self.steps) for phase in PHASES}
        logged = self.events[WARM_UP : WARM_UP + self.count]
        speed, mfu = ([e[name] for e in logged if name in e] for name in ("tokens_per_second", "mfu"))
        return RankTimes(
            medians, traced_steps(profiler.events(), self._marks, on_gpu), operations, self.padding,
            statistics.median(speed) if speed else None, statistics.median(mfu) if mfu else None,
            1e-6 * whole / self.traced if on_gpu and totals else None,  # no kernels of a run on the CPU
        )  # fmt: skip

    def _switch(self, phase: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._now[self._phase] += now - self._since
        self._phase, self._since = phase, now
        self._mark_phase()

    def _mark_phase(self) -> None:
        """In the trace, the phase and the step that begin here."""
        self._mark.close()
        if self._profiler is not None:
            name = f"step {self.begun}: {self._phase}"
            self._marks[name] = self.begun, self._phase
            self._mark.enter_context(torch.profiler.record_function(name))


@contextlib.contextmanager
def _timed(timer: _Timer) -> Iterator[None]:
    with Replacements() as replace:
        for loader in (TrainLoader, StreamLoader):
            replace.attribute(loader, "batches", functools.partial(_batches, timer))
        replace.attribute(Run, "__iter__", functools.partial(_followed, timer))
        for name, phase in _CALLED.items():
            replace.public(name, functools.partial(_in_phase, timer, phase))
        replace.attribute(torch.Tensor, "backward", functools.partial(_in_phase, timer, "backward"))
        replace.attribute(torch.nn.utils, "clip_grad_norm_", functools.partial(_in_phase, timer, "clipping"))
        replace.attribute(Window, "event", functools.partial(_logged, timer))
        replace.callback(register_optimizer_step_pre_hook(lambda *_: timer.enter("optimizer")).remove)
        replace.callback(register_optimizer_step_post_hook(lambda *_: timer.leave()).remove)
        yield


def _in_phase(timer: _Timer, phase: str, original: Callable[..., Any], /, *values: object, **named: object) -> Any:
    with timer.during(phase):
        return original(*values, **named)


def _followed(timer: _Timer, original: Callable[[Run], Iterator[Batch]], run: Run) -> Iterator[Batch]:
    timer.run = run
    return original(run)


def _batches(timer: _Timer, original: Callable[..., Iterator[Batch]], *values: Any) -> Iterator[Batch]:
    batches, number = original(*values), 0
    while True:
        with timer.during("data"):
            batch = next(batches, None)
        if batch is None and number < WARM_UP + timer.count + timer.traced:
            return
        timer.begin_step(number)
        number += 1
        assert batch is not None  # after the last one begin_step has raised
        timer.padding = max(timer.padding, _padding(batch))
        yield batch


def _padding(batch: Batch) -> float:
    masked = [each for each in batch.micro_batches if {"attention_mask", "input_ids"} <= each.keys()]
    computed = sum(model_work(each)["model_tokens"] for each in masked)
    return 1 - sum(int(each["attention_mask"].sum()) for each in masked) / computed if computed else 0.0


def _logged(timer: _Timer, original: Callable[..., Any], window: Any, optimizer: Any, model: Any, accelerator: Any) -> Any:
    event, engine = original(window, optimizer, model, accelerator), engine_of(accelerator)
    timer.events.append(event)
    timer.engine = engine.label(accelerator) if engine.shards else "DDP"
    timer.exchanged = engine.exchanged(accelerator)
    return event
