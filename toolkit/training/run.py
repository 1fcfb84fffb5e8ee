"""The run: step, position, history, what is due, and the files that record it.

It is data and one iterator. It depends on no loss, no model type and no data format.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from toolkit import checkpoint as ckpt
from toolkit.config import Refusal
from toolkit.config.conditions import is_decided_by_a_metric, never_measured
from toolkit.config.reading import settings_read, values_of
from toolkit.distributed.ranks import weights_apart
from toolkit.metrics.direction import greater_is_better
from toolkit.runs.overview import unread_after_a_step
from toolkit.runs.summary import read_settings
from toolkit.tracking.console import show_metrics
from toolkit.tracking.resources import ResourceWatch, memory_in_use
from toolkit.tracking.step_metrics import Window, peak_memory_gb
from toolkit.training.anomalies import RANKS_APART, SAME_WEIGHTS, Diverged, report_incident, report_rollback, too_many_nonfinite
from toolkit.training.due import is_due
from toolkit.training.run_state import RunState, summarize
from toolkit.training.stopping import how_to_continue, interruption, stopped_at

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from toolkit.config import RunConfig
    from toolkit.data.loading.batch import Batch
    from toolkit.data.loading.loaders import StreamLoader, TrainLoader
    from toolkit.distributed.heartbeat import Heartbeat
    from toolkit.runs.summary import Summary
    from toolkit.tracking.records import Records
    from toolkit.training.saving import Saver
    from toolkit.training.signals import StopSignal


@dataclass
class Run:
    """A training in progress. Iterate over it for the batches; log what each step returned; check what is due.

    `state` is what its checkpoints save of it, `kept` the recipe's own tensors in them. The rest are live objects, and what
    belongs to this process alone. Only the run changes them.
    """

    accelerator: Accelerator
    config: RunConfig
    model: PreTrainedModel  # unwrapped, like the optimizer
    optimizer: torch.optim.Optimizer
    train: TrainLoader | StreamLoader
    state: RunState
    saver: Saver
    records: Records
    stop: StopSignal
    heartbeat: Heartbeat | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)  # the lines of metrics.jsonl
    window: Window = field(default_factory=Window)
    resources: ResourceWatch = field(default_factory=ResourceWatch)
    status: str = "running"
    on_model_saved: list[Callable[[], None]] = field(default_factory=list)  # called by `save_to_hub`
    between_steps: bool = True  # whether the weights are those of a whole step

    def __post_init__(self) -> None:
        self.output_dir = Path(self.config.output_dir)
        self.checkpoints = self.output_dir / "checkpoints"
        self._opened, self._position_before, self._best_is_unsaved = time.monotonic(), 0, False
        self._undecided: list[str] = []  # metrics of this step's evaluations that were logged without the deciding one

    def __repr__(self) -> str:
        return f"Run({self.output_dir}: {self.status}, step {self.step:,} of {self.num_steps:,})"

    def __iter__(self) -> Iterator[Batch]:
        self.window.resume_clock()
        began = self.step
        self.check_decided()
        if self._stops_here():  # it was resumed at that step, or after it
            raise stopped_at(self.step)
        batches = self.train.batches(self.position)
        while batch := self.window.wait_for(batches):
            self._batch, self._position_before = batch, batch.position
            self.state.begin_step(batch)
            self.between_steps = False
            if self.heartbeat:
                self.heartbeat.beat(self.step)
            yield batch
            self.check_decided()
            if self.step == began + 1 and (unread := unread_after_a_step(self.config)):
                self.say(unread)
            self.between_steps = True
            self.records.display.moved(self.step)
            stop, stops_here = self.stop.agreed(self.accelerator), self._stops_here()
            if stop or stops_here or self.due("save") or self._best_is_unsaved:
                self.save()
            self.saver.check(self.step)
            if stop or stops_here:
                self.saver.report(wait=True)
                how = how_to_continue(self.checkpoints, self.config)
                raise interruption(stop, self.step, how, self.config) if stop and not stops_here else stopped_at(self.step)
            if self.position > batch.position + batch.size:  # the step took more
                batches = self.train.batches(self.position)
            self.window.resume_clock()

    def take(self, count: int) -> Batch | None:
        """A batch of the next `count` examples, consumed in this step too; of fewer at the end of the run, None after it."""
        batch = self.train.further(self.position, count) if count else None
        if batch is not None:
            self.state.take(batch)
        return batch

    @property
    def step(self) -> int:
        """Steps taken: global batches consumed."""
        return self.state.step

    @property
    def position(self) -> int:
        """Examples consumed."""
        return self.state.position

    @property
    def progress(self) -> float:
        """Examples consumed before this step over examples to consume, 0 to 1."""
        return self._position_before / self.state.examples_to_consume

    @property
    def objective(self) -> list[float]:
        """The deciding metric after each evaluation so far, smaller is better."""
        return self.state.objective

    @property
    def memory(self) -> dict[str, Any]:
        """The recipe's own, in every checkpoint: anything that JSON holds."""
        return self.state.memory

    @property
    def epoch(self) -> float:
        return self.position / self.train.epoch_size if self.train.epoch_size else 0.0

    @property
    def finished(self) -> bool:
        return self.state.finished

    @property
    def num_steps(self) -> int:
        return self.state.num_steps(self.train.global_batch_size)

    @property
    def seconds(self) -> float:
        """Time in training, over all the processes that worked on this run."""
        return self.state.seconds + time.monotonic() - self._opened

    @property
    def greater_is_better(self) -> bool:
        """Whether more of the deciding metric is better."""
        return greater_is_better(self.config.metric_for_best_model, self.config.greater_is_better)

    @property
    def summary(self) -> Summary:
        """What summary.json holds, as of now; its last values once the run is closed."""
        saver, memory_gb, read = self.saver, peak_memory_gb(self.accelerator.device), read_settings(self.config)
        return summarize(self.snapshot(), self.events, self.status, saver.model_step, saver.failed, memory_gb, read)

    def snapshot(self) -> RunState:
        """The state as of now, with what live objects hold of it."""
        return replace(
            self.state, epoch=self.epoch, seconds=self.seconds, source=self.train.state(), window=self.window.steps,
            window_seconds=self.window.seconds, window_waiting=self.window.waiting,
            settings_read=sorted(settings_read(self.config)), trackers=dict(self.records.trackers.ids),
        )  # fmt: skip

    def due(self, what: str) -> bool:
        """Whether "log", "eval" or "save" is due after this step, or "eval_on_start" before the first one.

        An evaluation that a deadline cut off is made up for when the run is resumed: then "eval_on_start" is due.
        """
        if what == "eval_on_start":
            wanted = self.step == 0 and self.config.eval_on_start and self.config.eval_strategy != "no"
            return wanted or self.state.evaluation_is_owed
        examples = (self._position_before, self.position, self.train.epoch_size)
        return is_due(what, self.config, self.step, *examples, is_last=self.finished)

    def log(self, metrics: Mapping[str, Any], batch: Batch | None = None) -> None:
        """Take the metrics of a step (0-d tensors, read when logging is due) or of an evaluation (numbers, written at once).

        Numbers of your own may be with either. A metric of some steps alone is logged as its mean over those. A step is also
        known by its `grad_norm`. `batch`: the step's, where it has other tokens than the one that the run gave.
        """
        if "grad_norm" not in metrics and not any(isinstance(value, torch.Tensor) for value in metrics.values()):
            self._log_evaluation({name: _as_number(name, value) for name, value in metrics.items()})
            return
        if batch is not None:
            self.state.tokens += batch.totals["tokens"] - self._batch.totals["tokens"]
        self.window.add(self.step, batch or self._batch, metrics)
        log_is_due = self.due("log") or (self.finished and self.config.logging_strategy == "no")
        at_once = self.accelerator.device.type == "cpu" or self.config.loss_spike == "rollback"  # reading is free on the CPU
        if log_is_due or at_once:
            self.read_window()
        self.window.stop_clock()
        self.between_steps = True  # the update is done: evaluation and samples change nothing
        if log_is_due:
            seconds = self.window.seconds
            event = self.window.event(self.optimizer, self.model, self.accelerator)
            if "tokens_per_second" in event:
                event["supervised_tokens"] = self.state.tokens
            self.records.display.logged(self.step, event)
            self._record(event)
            memory = memory_in_use(self.accelerator.device)
            self._warn(self.resources.after_event(self.step, seconds, event["data_wait"], memory), stops=False)

    def history(self, name: str, *, from_step: int = 1) -> list[float]:
        """Every value of a metric that was logged so far, in order; `loss` is that of evaluations, where there are any.

        The evaluation before training is not in it, unless `from_step` is 0: Trainer's early stopping does not count it either.
        """
        of_evaluations = f"eval_{name}"
        name = of_evaluations if any(of_evaluations in event for event in self.events) else name
        return [event[name] for event in self.events if event["step"] >= from_step and event.get(name) is not None]

    def say(self, text: str) -> None:
        """Print a line, on the main process."""
        self.records.display.say(text)

    def compare_with(self, name: str, find_baselines: Callable[[], Mapping[str, float]]) -> None:
        """Set what an evaluation metric has to beat; the summary and the report show them next to each other.

        `find_baselines` may take seconds: it is called once, before the first step of a run that evaluates, on one process.
        """
        is_used = not self.step and self.config.eval_strategy != "no" and self.accelerator.is_main_process
        if not is_used or never_measured(name, values_of(self.config).get("metrics") or [name]):
            return
        if baselines := find_baselines():
            self.state.baselines = {"figure": name, **baselines}
            self.say(f"to beat, {name}: " + show_metrics(baselines))

    def add_samples(self, samples: Sequence[Mapping[str, str]]) -> None:
        """Write generated samples ("prompt", "text", perhaps "reference" or "score") to samples.jsonl and show them."""
        self.records.add_samples(self.step, samples)

    def keep(self, name: str, tensors: torch.Tensor | dict[str, Any]) -> None:
        """Put a tensor of your own, or a dictionary of tensors, into every checkpoint; after a resume it is in `run.kept`."""
        self.kept |= ckpt.only_tensors({name: tensors}, "run.keep")

    def save(self) -> None:
        """Write a checkpoint of this moment. When it fails, that costs a warning, or the run where `save_error` is stop."""
        self.read_window()
        if self.due("save"):  # not for a signal: what a rollback goes back to must not depend on when one came
            self.state.last_due_save = self.step
        self.check_ranks()
        self.saver.save(self.snapshot(), self.kept)
        self._best_is_unsaved = False

    def end(self, status: str) -> None:
        """Nothing more is trained: finish what is being written, and read what was not read."""
        self.status = status
        self.saver.report(wait=True)
        self.read_window()

    def read_window(self) -> None:
        """Wait for the metrics of the steps that were not read yet; report what went wrong in them, or end the run for it."""
        limit = 1 if self.config.nonfinite == "stop" else self.config.max_nonfinite_steps
        for step in self.window.read():
            spike_above, warnings = self.state.add_metrics(step)
            if self.accelerator.is_main_process:
                report_incident(self.output_dir, step, spike_above, self.train, self.say)
            if self.state.nonfinite_in_row >= limit:
                diverged = self.state.divergence.before_nonfinite()
                self._warn([diverged] if diverged else [], stops=False)
                raise too_many_nonfinite(self.state.nonfinite_in_row, step.step, diverged)
            self._warn(warnings)
            if spike_above is not None and self.config.loss_spike == "rollback":
                self._roll_back()

    def check_decided(self) -> None:
        """Refuse a step that was evaluated when the deciding metric was never logged, where something depends on it."""
        name, logged, self._undecided = self.config.metric_for_best_model, self._undecided, []
        if logged and is_decided_by_a_metric(self.config) and not self.history(name, from_step=0):
            raise Refusal(f"--metric-for-best-model {name}: not a metric of the evaluation: {', '.join(logged)}")

    def check_ranks(self) -> None:
        """Warn once of ranks that should hold the same weights and don't, which no loss shows. A collective."""
        is_shown = self.saver.shards or RANKS_APART in self.state.warnings
        if not is_shown and weights_apart(self.accelerator, self.model) > SAME_WEIGHTS:
            self._warn([RANKS_APART], stops=False)

    def check_end(self) -> None:
        """Warn of the run as a whole: most steps skipped, or the metric it is judged by worse than at the first evaluation."""
        name = self.config.metric_for_best_model
        values, name = self.history(name, from_step=0), f"eval_{name.removeprefix('eval_')}"
        if self.saver.model_step is not None and values:  # the best weights were loaded
            values = [*values[:-1], self.summary.metrics.get(name, values[-1])]
        watch = self.state.divergence
        self._warn([*watch.after_last_step(), *watch.of_metric(name, values, self.config.greater_is_better)])

    def _roll_back(self) -> None:
        """After a spike: the weights of the last good checkpoint, and training goes on behind the rows of the steps since."""
        if (saved := self.saver.roll_back(self.state, self.kept)) is None:
            return
        record = self.state.go_back(RunState.from_record(saved.run))
        if self.accelerator.is_main_process:
            report_rollback(self.output_dir, record, self.say)
        if (problem := self.state.rolls_back_in_vain()) and not self.stop.closed:
            raise Diverged(problem)

    def _stops_here(self) -> bool:
        return not self.finished and self.config.stop_at_step is not None and self.step >= self.config.stop_at_step

    def _warn(self, warnings: list[str], stops: bool = True) -> None:
        for warning in warnings:
            self.say(f"WARNING: {warning}")
        self.state.warnings += warnings
        if self.config.divergence == "stop" and warnings and stops and not self.stop.closed:
            raise Diverged(f"stopped after step {self.step}, because of --divergence stop: {warnings[0]}")

    def _log_evaluation(self, metrics: Mapping[str, float]) -> None:
        name, config, state = self.config.metric_for_best_model, self.config, self.state
        name = name if name in metrics else f"eval_{name}"
        if name not in metrics:  # metrics of one step may be logged in several calls: `check_decided` comes at its end
            self._undecided += [each for each in metrics if each.startswith("eval_")]
        else:
            sign = 1 if self.greater_is_better else -1
            if state.judged_by_another(name, sign):
                self.say(f"the best so far was judged by {state.best['name']}; from here on by {name}")
            is_among_best = state.add_evaluation(name, metrics[name], sign, config.save_best_limit)
            self._best_is_unsaved |= is_among_best and config.load_best_model_at_end
            if state.best.get("step") == self.step and self.accelerator.is_main_process:
                self.saver.point_to_best(self.step)
        self._record(metrics)
        self.say(f"step {self.step}/{self.num_steps}  {show_metrics(metrics)}")
        if self.finished and not config.load_best_model_at_end:  # before the model is saved and sent
            self.check_end()

    def _record(self, metrics: Mapping[str, Any]) -> None:
        where = {"step": self.step, "epoch": round(self.epoch, 6), "examples": self.position, "time": round(self.seconds, 3)}
        self.events.append({**where, **metrics})
        self.state.events = len(self.events)
        self.records.add_metrics(where, metrics)


def _as_number(name: str, value: Any) -> float:
    """As JSON has it: NumPy's numbers, which a metric of the user's may return, become Python's."""
    number = value.item() if isinstance(value, (np.generic, np.ndarray)) and value.size == 1 else value
    if not isinstance(number, (int, float)):
        raise TypeError(f"run.log: {name} is no number, but {type(value).__name__}: log each number by a name of its own")
    return number
