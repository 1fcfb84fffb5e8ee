"""The run: step, position, history, what is due, and the files that say so.

It is data and one iterator. It knows no loss, no model type and no data format.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from toolkit import checkpoint as ckpt
from toolkit.config.reading import add_reads_of
from toolkit.data.loading.batch import Batch
from toolkit.distributed.engines import unwrapped
from toolkit.distributed.heartbeat import Heartbeat, start_heartbeat
from toolkit.distributed.ranks import on_main
from toolkit.hub.uploads import hub_uploads
from toolkit.runs import directory as output
from toolkit.runs.overview import unread_after_a_step, verdict_of
from toolkit.runs.run_card import end_run_card, unwrapped_optimizer
from toolkit.runs.summary import Summary, summarize
from toolkit.system.console import one_line, own_ends, show_number
from toolkit.system.interruptions import Interrupted, OutOfTime
from toolkit.system.json_lines import LineFile
from toolkit.tracking.console import Progress
from toolkit.tracking.step_metrics import Window
from toolkit.tracking.trackers import Trackers, open_trackers
from toolkit.training.best import check_decided, note_evaluation
from toolkit.training.divergence import Diverged, Divergence, check_end, warn
from toolkit.training.failures import explained
from toolkit.training.guard import LossSpikes, NonfiniteGuard
from toolkit.training.resume import checkpoint_to_resume
from toolkit.training.run_state import check_room, check_saves, describe_run, report_saves, restore_run, save_run
from toolkit.training.signals import StopSignal, signals_noted, stop_deadline
from toolkit.training.stopping import how_to_continue, interrupt, leave_in_time
from toolkit.training.tracker_files import files_of_a_run

EVERY = {"log": "logging_steps", "eval": "eval_steps", "save": "save_steps"}
STRATEGY = {"log": "logging_strategy", "eval": "eval_strategy", "save": "save_strategy"}


class Run:
    """A training in progress. Iterate over it for the batches; log what each step returned; ask what is due."""

    def __init__(self, accelerator: Any, config: Any, model: Any, optimizer: Any, train: Any) -> None:
        self.accelerator, self.config, self.train = accelerator, config, train
        self.model, self.optimizer = unwrapped(model), getattr(optimizer, "optimizer", optimizer)
        add_reads_of(config, unwrapped_optimizer(self.optimizer))
        self.output_dir = Path(config.output_dir)
        self.checkpoints = self.output_dir / "checkpoints"
        self.step = self.applied = self.position = 0
        self.progress = self.tokens = 0.0
        self.events: list[dict[str, Any]] = []
        self.memory: dict[str, Any] = {}
        self.kept: dict[str, Any] = {}
        self.baselines, self.best = dict[str, Any](), dict[str, Any]()
        # [value, step] of the best evaluations; the deciding metric after each one since step 1, smaller is better
        self.ranked, self.objective = list[list[float]](), list[float]()
        self.tracker_ids, self.trackers = dict[str, str](), Trackers((), config, {}, 0, self.say)
        self.undecided: list[str] = []  # metrics of this step's evaluations that were logged without the deciding one
        self.figures_of: int | None = None  # the step whose evaluation is the model's; None: the last one
        self.status, self.failed_saves, self.loss_spikes = "running", 0, 0
        self.stop = StopSignal()
        self.heartbeat: Heartbeat | None = None
        self.uploads: Any = None  # is told of each checkpoint that is on the disk
        self.writer = ckpt.CheckpointWriter(self.checkpoints, config.save_total_limit, background=config.async_save)
        self.display = Progress(train.num_steps, 0, accelerator.is_main_process)
        self.window, self.guard = Window(), NonfiniteGuard(config, self.output_dir / "incidents")
        self.spikes = LossSpikes(self.output_dir / "incidents")
        self._metrics, self._samples = (LineFile(self.output_dir / f"{name}.jsonl") for name in ("metrics", "samples"))
        self._opened, self.seconds_before = time.monotonic(), 0.0
        self._position_before, self._best_is_unsaved = 0, False
        self.base, self.between_steps, self.evaluation_is_owed = dict[str, Any](), True, False
        self.continued: list[str] = []  # what it went on with otherwise than it began
        self.divergence, self.warnings = Divergence(), list[str]()

    def __iter__(self) -> Iterator[Batch]:
        self.window.resume_clock()
        began = self.step
        check_decided(self)
        for batch in self.train.batches(self.position):
            self.progress = batch.position / self.train.examples_to_consume
            self._batch, self._position_before = batch, batch.position
            self.step, self.position = self.step + 1, batch.position + batch.size
            self.tokens += batch.totals.get("tokens", 0.0)
            self.between_steps = False
            if self.heartbeat:
                self.heartbeat.beat(self.step)
            yield batch
            check_decided(self)
            if self.step == began + 1 and (unread := unread_after_a_step(self.config)):
                self.say(unread)
            self.between_steps = True
            self.display.moved(self.step)
            stop = self.stop.agreed(self.accelerator)
            if stop or self.due("save") or self._best_is_unsaved:
                self.save()
            check_saves(self, self.writer.finished())
            if stop:
                interrupt(self, stop)
            self.window.resume_clock()

    @property
    def epoch(self) -> float:
        return self.position / self.train.epoch_size if self.train.epoch_size else 0.0

    @property
    def finished(self) -> bool:
        return self.position >= self.train.examples_to_consume

    @property
    def num_steps(self) -> int:
        """Steps in all: those taken, and as many as the examples left over fill at the global batch of now."""
        left = max(0, self.train.examples_to_consume - self.position)
        return self.step + math.ceil(left / self.train.global_batch_size)

    @property
    def seconds(self) -> float:
        """Time in training, over all the processes that worked on this run."""
        return self.seconds_before + time.monotonic() - self._opened

    @property
    def summary(self) -> Summary:
        """The figures so far; the final ones once the run is closed."""
        return summarize(self)

    def due(self, what: str) -> bool:
        """Whether "log", "eval" or "save" is due after this step, or "eval_on_start" before the first one.

        An evaluation that a deadline cut off is made up for when the run is continued: then "eval_on_start" is due.
        """
        if what == "eval_on_start":
            wanted = self.step == 0 and self.config.eval_on_start and self.config.eval_strategy != "no"
            owed, self.evaluation_is_owed = self.evaluation_is_owed, False
            return wanted or owed
        strategy = getattr(self.config, STRATEGY[what])
        if strategy == "no" or self.step == 0:
            return False
        if self.finished:
            return True
        if what == "eval" and (self.step if strategy == "steps" else self.epoch) < self.config.eval_delay:
            return False
        if strategy == "steps":
            return self.step % getattr(self.config, EVERY[what]) == 0
        size = self.train.epoch_size
        return bool(size) and self.position // size > self._position_before // size

    def log(self, figures: dict[str, Any]) -> None:
        """Take the figures of a step (0-d tensors, read when logging is due) or of an evaluation (numbers, written at once)."""
        if not any(isinstance(value, torch.Tensor) for value in figures.values()):
            self._log_evaluation(figures)
            return
        self.window.add(self.step, self._batch, figures)
        log_is_due = self.due("log") or (self.finished and self.config.logging_strategy == "no")
        if log_is_due or self.accelerator.device.type == "cpu":  # reading is free on the CPU: a bad step is seen at once
            self.read_window()
        self.window.stop_clock()
        self.between_steps = True  # the update is done: evaluation and samples change nothing
        if log_is_due:
            event = self.window.event(self.optimizer, self.model, self.accelerator)
            if "tokens_per_second" in event:
                event["supervised_tokens"] = self.tokens
            self.display.logged(self.step, event)
            self._write(event)

    def history(self, name: str) -> list[float]:
        """Every value of a figure that was logged so far, in order; `eval_` may be left out."""
        name = name if any(name in event for event in self.events) else f"eval_{name}"
        return [event[name] for event in self.events if event.get(name) is not None]

    def say(self, text: str) -> None:
        """Print a line, on the main process."""
        self.display.say(text)

    def compare_with(self, name: str, find_baselines: Callable[[], dict[str, float]]) -> None:
        """Say what an evaluation figure has to beat; the summary and the report show them side by side.

        Asked for once in a run that evaluates, before its first step, and on the main process alone: it may take seconds.
        """
        is_asked = self.step == 0 and self.accelerator.is_main_process and self.config.eval_strategy != "no"
        baselines = find_baselines() if is_asked else {}
        if not baselines:
            return
        self.baselines = {"figure": name, **baselines}
        self.say(f"to beat, {name}: " + "  ".join(f"{key} {show_number(value)}" for key, value in baselines.items()))

    def add_samples(self, samples: list[dict[str, Any]]) -> None:
        """Write generated samples ("prompt", "text", perhaps "reference") to samples.jsonl and show them."""
        if self.accelerator.is_main_process:
            for sample, asked in zip(samples, own_ends([sample["prompt"] for sample in samples], 50), strict=True):
                self._keep_line(self._samples, {"step": self.step, **sample})
                self.say(f"  sample ┃ {asked} ┃ {one_line(sample['text'], 100)}")
            self.trackers.add_samples(samples, self.step)

    def keep(self, name: str, tensors: torch.Tensor | dict[str, Any]) -> None:
        """Put a tensor of your own, or a dictionary of tensors, into every checkpoint; after a resume it is in `run.kept`."""
        self.kept |= ckpt.only_tensors({name: tensors}, "run.keep")

    def save(self) -> None:
        """Write a checkpoint of this moment. When it fails, that costs a warning, or the run where `save_error` is stop."""
        self.read_window()
        save_run(self)
        self._best_is_unsaved = False

    def finish_saves(self) -> None:
        """Wait for a checkpoint that is still being written."""
        report_saves(self, self.writer.wait())

    def close(self) -> None:
        """Finish what is being written, and write summary.json."""
        self.finish_saves()
        self.read_window()
        if self.accelerator.is_main_process:
            try:
                output.write_summary(self.output_dir, self.summary)
                card = self.output_dir / "run.json"
                end_run_card(card, self.status, self.seconds, self.summary.figures, self.config, self.say)
            except OSError as error:
                self.say(f"WARNING: no summary.json: {error}")
        self.trackers.close(lambda: files_of_a_run(self), hurried=self.status == "interrupted")
        if verdict := verdict_of(self.status, self.summary.figures, self.config):
            self.say(verdict)
        self.display.close()

    def read_window(self) -> None:
        for step in self.window.read():
            self.applied += int(step.values.get("applied", 1))
            self.guard.check(step, self.train, self)
            self.loss_spikes += self.spikes.check(step, self)
            numbers = (step.values["loss"], step.values["grad_norm"], bool(step.values.get("applied", 1)))
            warn(self, self.divergence.after_step(*numbers))

    def _log_evaluation(self, figures: dict[str, float]) -> None:
        if note_evaluation(self, figures) and self.config.load_best_model_at_end and self.step > 0:
            self._best_is_unsaved = True
        self._write(figures)
        shown = "  ".join(f"{key} {show_number(value)}" for key, value in figures.items())
        self.say(f"step {self.step}/{self.num_steps}  {shown}")
        if self.finished and not self.config.load_best_model_at_end:  # before the model is saved and sent
            check_end(self)

    def _write(self, figures: dict[str, Any]) -> None:
        where = {"step": self.step, "epoch": round(self.epoch, 6), "examples": self.position, "time": round(self.seconds, 3)}
        self.events.append({**where, **figures})
        if self.accelerator.is_main_process:
            self._keep_line(self._metrics, self.events[-1])
        self.trackers.log(figures, self.step)

    def _keep_line(self, file: LineFile, record: dict[str, Any]) -> None:
        error = file.append(record)
        if error:
            self.say(f"WARNING: {file.path}: {error}. Its lines wait until they can be written.")


@contextlib.contextmanager
def open_run(accelerator: Any, config: Any, model: Any, optimizer: Any, train: Any) -> Iterator[Run]:
    """Claim the output directory, restore a checkpoint when asked, and yield the run; write its summary at the end.

    The model and the optimizer are the prepared ones. While it is open, SIGTERM and SIGINT end the run at the next step's
    end with a checkpoint and exit code 75; a second signal ends it at once.

    Raises:
        Refusal: the directory is in use, the disk is too small, the checkpoint does not fit.
    """
    run = Run(accelerator, config, model, optimizer, train)
    run.heartbeat = start_heartbeat(accelerator, config.hang_timeout, lambda: how_to_continue(run))
    with contextlib.ExitStack() as closing:
        if run.heartbeat:
            closing.callback(run.heartbeat.close)
        closing.enter_context(output.claimed(config, accelerator))
        closing.enter_context(hub_uploads(run))
        on_main(accelerator, lambda: check_room(run))
        on_main(accelerator, lambda: ckpt.clean_leftovers(run.checkpoints))
        source = on_main(accelerator, lambda: checkpoint_to_resume(run, config))
        if source is not None:
            restore_run(run, source)
        elif accelerator.is_main_process:
            output.clear_figures(run.output_dir)
        on_main(accelerator, lambda: describe_run(run, source))
        run.trackers = open_trackers(accelerator, config, run.tracker_ids, run.step, run.say)
        run.trackers.catch_up(run.events)
        run.status = "failed"
        with signals_noted(stop_deadline(config)) as run.stop:  # until all is closed: a late signal must not cut that short
            try:
                yield run
                check_saves(run, run.writer.wait())
                check_end(run)
                run.status = "finished" if run.finished else "stopped early"
            except Diverged:
                run.status = "diverged"
                raise
            except Interrupted:
                run.status = "interrupted"
                raise
            except OutOfTime:
                run.status = "interrupted"
                leave_in_time(run)
            except RuntimeError as error:
                known = explained(error, run)
                if known is None:
                    raise
                raise known from error
            finally:
                run.stop.disarm()
                run.close()
                if run.heartbeat:
                    run.heartbeat.close()
                accelerator.end_training()
