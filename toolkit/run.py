"""The run: step, position, history, what is due, and the files that say so.

It is data and one iterator. It knows no loss, no model type and no data format.
"""

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from toolkit import checkpoint as ckpt
from toolkit import output
from toolkit.best import greater_is_better
from toolkit.config import Refusal
from toolkit.data.batch import Batch
from toolkit.figures import Window
from toolkit.guard import NonfiniteGuard
from toolkit.run_card import write_run_card
from toolkit.signals import Interrupted, StopSignal, continuing_command, signals_noted
from toolkit.summary import Summary
from toolkit.tracking import Progress, open_trackers, peak_memory_gb, show_number

EVERY = {"log": "logging_steps", "eval": "eval_steps", "save": "save_steps"}
STRATEGY = {"log": "logging_strategy", "eval": "eval_strategy", "save": "save_strategy"}


class Run:
    """A training in progress. Iterate over it for the batches; log what each step returned; ask what is due."""

    def __init__(self, accelerator: Any, config: Any, model: Any, optimizer: Any, train: Any) -> None:
        self.accelerator, self.config, self.train = accelerator, config, train
        self.model, self.optimizer = accelerator.unwrap_model(model), getattr(optimizer, "optimizer", optimizer)
        self.output_dir = Path(config.output_dir)
        self.checkpoints = self.output_dir / "checkpoints"
        self.step = self.applied = self.position = 0
        self.progress = self.tokens = 0.0
        self.events: list[dict[str, Any]] = []
        self.memory: dict[str, Any] = {}
        self.kept: dict[str, torch.Tensor] = {}
        self.baselines: dict[str, Any] = {}
        self.best: dict[str, Any] = {}
        self.summary = Summary()
        self.stop = StopSignal()
        self.display = Progress(train.num_steps, 0, accelerator.is_main_process)
        self._window, self._guard = Window(), NonfiniteGuard(config, self.output_dir / "incidents")
        self._opened, self._seconds_before = time.monotonic(), 0.0
        self._position_before, self._best_is_unsaved = 0, False

    def __iter__(self) -> Iterator[Batch]:
        self._window.resume_clock()
        for batch in self.train.batches(self.position):
            self.progress = batch.position / self.train.examples_to_consume
            self._batch, self._position_before = batch, batch.position
            self.step, self.position = self.step + 1, batch.position + batch.size
            self.tokens += batch.totals.get("tokens", 0.0)
            yield batch
            self.display.moved(self.step)
            stop = self.stop.agreed(self.accelerator)
            if stop or self.due("save") or self._best_is_unsaved:
                self.save()
            if stop:
                raise Interrupted(
                    f"stopped by {signal.Signals(stop).name} after step {self.step}; everything is saved. Continue with:\n"
                    f"  {continuing_command()}"
                )
            self._window.resume_clock()

    @property
    def epoch(self) -> float:
        return self.position / self.train.epoch_size if self.train.epoch_size else 0.0

    @property
    def finished(self) -> bool:
        return self.position >= self.train.examples_to_consume

    @property
    def seconds(self) -> float:
        """Time in training, over all the processes that worked on this run."""
        return self._seconds_before + time.monotonic() - self._opened

    def due(self, what: str) -> bool:
        """Whether "log", "eval" or "save" is due after this step, or "eval_on_start" before the first one."""
        if what == "eval_on_start":
            return self.step == 0 and self.config.eval_on_start and self.config.eval_strategy != "no"
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
        self._window.add(self.step, self._batch, figures)
        log_is_due = self.due("log") or (self.finished and self.config.logging_strategy == "no")
        if log_is_due or self.accelerator.device.type == "cpu":  # reading is free on the CPU: a bad step is seen at once
            self._read_window()
        self._window.stop_clock()
        if log_is_due:
            event = self._window.event(self.optimizer, self.model, self.accelerator)
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

    def compare_with(self, name: str, baselines: dict[str, float]) -> None:
        """Say what an evaluation figure has to beat; the summary and the report show them side by side."""
        if not baselines:
            return
        self.baselines = {"figure": name, **baselines}
        self.say(f"to beat, {name}: " + "  ".join(f"{key} {show_number(value)}" for key, value in baselines.items()))

    def add_samples(self, samples: list[dict[str, Any]]) -> None:
        """Write generated samples ("prompt", "text", perhaps "reference") to samples.jsonl and show them."""
        if self.accelerator.is_main_process:
            for sample in samples:
                output.append_line(self.output_dir / "samples.jsonl", {"step": self.step, **sample})
                self.say(f"  sample ┃ {_one_line(sample['prompt'], 50)} ┃ {_one_line(sample['text'], 100)}")

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor of your own into every checkpoint; after a resume it is in `run.kept`."""
        self.kept[name] = tensor

    def save(self) -> None:
        """Write a checkpoint of this moment; a failure costs a warning, not the run."""
        self._read_window()
        if self.accelerator.is_main_process:
            try:
                state = ckpt.capture_state(self.model, self.optimizer, self._record(), self.accelerator.scaler, self.kept)
                path = ckpt.save_checkpoint(self.checkpoints, self.step, state)
                ckpt.write_pointer(self.checkpoints, "last", path)
                if self.best.get("step") == self.step:
                    ckpt.write_pointer(self.checkpoints, "best", path)
                best = ckpt.read_pointer(self.checkpoints, "best")
                ckpt.prune_checkpoints(self.checkpoints, self.config.save_total_limit, [best] if best else [])
            except OSError as error:
                self.say(f"WARNING: no checkpoint at step {self.step}: {error}. Training goes on; the last good one is kept.")
        self._best_is_unsaved = False
        self.accelerator.wait_for_everyone()

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint: weights, optimiser, position and history."""
        state = ckpt.load_checkpoint(path)
        record = state.run
        if record["fingerprint"] != self.train.fingerprint:
            raise Refusal(f"{path}: was trained on other data, or data cut or packed otherwise, than these settings give.")
        ckpt.apply_state(state, self.model, self.optimizer, self.accelerator.scaler)
        self.step, self.applied, self.position = record["step"], record["applied"], record["position"]
        self.tokens, self.memory, self.best = record["tokens"], record["memory"], record["best"]
        self.baselines, self._seconds_before, self.kept = record["baselines"], record["seconds"], state.kept
        self._guard.in_row = record["nonfinite_in_row"]
        if self.accelerator.is_main_process:
            for name in ("metrics.jsonl", "samples.jsonl"):
                output.truncate_lines(self.output_dir / name, self.step)
        self.accelerator.wait_for_everyone()
        self.events = output.read_lines(self.output_dir / "metrics.jsonl")
        self.display = Progress(self.train.num_steps, self.step, self.accelerator.is_main_process)
        self.say(f"resumed from {path}: step {self.step} of {self.train.num_steps}")

    def close(self, status: str) -> None:
        """Write summary.json: how it ended, the last figures, the first ones to compare them with."""
        self._read_window()
        evaluations = [{k: v for k, v in event.items() if k.startswith("eval_")} for event in self.events]
        evaluations = [figures for figures in evaluations if figures]
        first = {f"first_{name}": value for name, value in evaluations[0].items()} if len(evaluations) > 1 else {}
        losses = self.history("loss")
        self.summary.figures.update({
            "status": status, "steps": self.step, "applied_steps": self.applied, "examples": self.position,
            "epoch": self.epoch, "supervised_tokens": self.tokens, "seconds": self.seconds,
            "peak_memory_gb": peak_memory_gb(self.accelerator.device), **({"train_loss": losses[-1]} if losses else {}),
            **first, **(evaluations[-1] if evaluations else {}), "best": self.best, "baselines": self.baselines,
        })  # fmt: skip
        if self.accelerator.is_main_process:
            output.write_summary(self.output_dir, self.summary)
        self.display.close()

    def _record(self) -> dict[str, Any]:
        return {
            "step": self.step, "applied": self.applied, "position": self.position, "epoch": self.epoch, "tokens": self.tokens,
            "seconds": self.seconds, "best": self.best, "memory": self.memory, "baselines": self.baselines,
            "nonfinite_in_row": self._guard.in_row, "fingerprint": self.train.fingerprint,
        }  # fmt: skip

    def _read_window(self) -> None:
        for step in self._window.read():
            self.applied += int(step.values.get("applied", 1))
            self._guard.check(step, self.train, self)

    def _log_evaluation(self, figures: dict[str, float]) -> None:
        name = self.config.metric_for_best_model
        name = name if name in figures else f"eval_{name}"
        if name in figures and math.isfinite(figures[name]):
            sign = 1 if greater_is_better(name, self.config.greater_is_better) else -1
            if not self.best or sign * figures[name] > sign * self.best["value"]:
                self.best = {"name": name, "value": figures[name], "step": self.step}
                self._best_is_unsaved = self.config.load_best_model_at_end and self.step > 0
        elif name not in figures and (self.config.load_best_model_at_end or self.config.early_stopping_patience):
            raise Refusal(f"--metric-for-best-model {name}: not a figure of the evaluation: {', '.join(figures)}")
        self._write(figures)
        shown = "  ".join(f"{key} {show_number(value)}" for key, value in figures.items())
        self.say(f"step {self.step}/{self.train.num_steps}  {shown}")

    def _write(self, figures: dict[str, Any]) -> None:
        where = {"step": self.step, "epoch": round(self.epoch, 6), "examples": self.position, "time": round(self.seconds, 3)}
        self.events.append({**where, **figures})
        if self.accelerator.is_main_process:
            output.append_line(self.output_dir / "metrics.jsonl", self.events[-1])
        self.accelerator.log(figures, step=self.step)


@contextlib.contextmanager
def open_run(accelerator: Any, config: Any, model: Any, optimizer: Any, train: Any) -> Iterator[Run]:
    """Claim the output directory, restore a checkpoint when asked, and yield the run; write its summary at the end.

    The model and the optimiser are the prepared ones. While it is open, SIGTERM and SIGINT end the run at the next step's
    end with a checkpoint and exit code 75; a second signal ends it at once.

    Raises:
        Refusal: the directory is in use, the disk is too small, the checkpoint does not fit.
    """
    run = Run(accelerator, config, model, optimizer, train)
    with output.claimed(config, accelerator.is_main_process):
        if accelerator.is_main_process:
            _check_space(run, config)
            ckpt.clean_leftovers(run.checkpoints)
        accelerator.wait_for_everyone()
        source = _checkpoint_to_resume(run, config)
        if source is not None:
            run.restore(source)
        elif accelerator.is_main_process:
            output.clear_figures(run.output_dir)
        if accelerator.is_main_process:
            write_run_card(run.output_dir / "run.json", accelerator, config, run.model, train)
        open_trackers(accelerator, config)
        status = "failed"
        try:
            with signals_noted() as run.stop:
                yield run
            status = "finished" if run.finished else "stopped early"
        except Interrupted:
            status = "interrupted"
            raise
        finally:
            run.close(status)
            accelerator.end_training()


def _check_space(run: Run, config: Any) -> None:
    """Room for the model and the checkpoints that are kept, beside the one being written: weights and two moments each."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in run.model.parameters())
    kept = 0 if config.save_strategy == "no" else (config.save_total_limit or 1) + 1
    what = f"this run (a model{f' and {kept} checkpoints' if kept else ''})"
    output.check_disk_space(run.output_dir, int(1.1 * weights * (1 + 3 * kept)), what)


def _checkpoint_to_resume(run: Run, config: Any) -> Path | None:
    if config.resume_from:
        return Path(config.resume_from)
    if not config.resume:
        return None
    found = ckpt.latest_checkpoint(run.checkpoints, run.say)
    if found is None:
        run.say(f"--resume: no checkpoint under {run.checkpoints}, starting fresh")
    return found


def _one_line(text: str, width: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"
