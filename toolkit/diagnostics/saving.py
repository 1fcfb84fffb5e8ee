"""What saving costs a run: one checkpoint of it, written and timed, and how many it writes."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.training.run import Run


@dataclass(frozen=True)
class Saving:
    """What checkpoints cost a run.

    `seconds`: that training waits for one. `written`: until it is on the disk, which takes longer with --async-save. `size`: in
    bytes. `saves`: of the whole run. `share`: of the run's time that is spent on waiting for them, 0 to 1.
    """

    seconds: float
    written: float
    size: int
    saves: int
    steps: int  # of the whole run
    share: float


class NotMeasured(Exception):
    """No checkpoint could be written; the message is why."""


def measure_saving(run: Run, settings: Mapping[str, Any], step_seconds: float) -> Saving | None:
    """Write a checkpoint of a run between two of its steps, as it would by itself.

    All ranks call it; None on all but the first.

    `settings`: what was configured, where the run itself saves nothing. `step_seconds`: of a step without saving.

    Raises:
        NotMeasured: there is no room for it, or something else keeps it from being written.
    """
    saver, writer = run.saver, run.saver.writer
    writer.background = settings["async_save"]
    if writer.background or any(not parameter.requires_grad for parameter in run.model.parameters()):
        _save(run)  # once in a run memory for copies is allocated, and the frozen weights are hashed
        if saver.accelerator.is_main_process:
            shutil.rmtree(writer.root / f"step-{run.step}", ignore_errors=True)
    seconds, written, error = _save(run)
    if not saver.accelerator.is_main_process:
        return None
    files = [path for path in (writer.root / f"step-{run.step}").glob("*") if path.is_file()]
    if isinstance(error, OSError):  # safetensors' have no errno, of a full disk either
        raise NotMeasured(f"{error.strerror or error}, in {tempfile.gettempdir()} (TMPDIR names another place)")
    if error is not None or not files:
        raise NotMeasured(str(error) if error is not None else "a parameter is not finite")
    size = sum(path.stat().st_size for path in files)
    return saving_of(seconds, written, size, _saves(run, settings), run.num_steps, step_seconds)


def saving_of(seconds: float, written: float, size: int, saves: int, steps: int, step_seconds: float) -> Saving:
    """What a checkpoint costs a run of this many steps. In the background a save waits for the one before, if that is still
    being written."""
    trained = steps * step_seconds
    waited = saves * max(seconds, written - trained / max(saves, 1))
    return Saving(seconds, written, size, saves, steps, waited / (waited + trained))


def _save(run: Run) -> tuple[float, float, Exception | None]:
    """Seconds until training could go on, seconds until the checkpoint is on the disk, and what kept it from that."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    run.save()
    waited = time.perf_counter() - began
    errors = [outcome.error for outcome in run.saver.writer.wait()]
    return waited, time.perf_counter() - began, next((error for error in errors if error is not None), None)


def _saves(run: Run, settings: Mapping[str, Any]) -> int:
    """Checkpoints of the whole run, one at its end among them."""
    strategy = settings["save_strategy"]
    if strategy == "no":
        return 0
    of_epoch = (run.train.epoch_size or run.state.examples_to_consume) / run.train.global_batch_size
    steps_apart = settings["save_steps"] if strategy == "steps" else of_epoch
    return max(1, -int(-run.num_steps // steps_apart))
