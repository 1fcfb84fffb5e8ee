"""Short runs of a recipe in this process, each with its own settings, under one watch."""

from __future__ import annotations

import contextlib
import io
import json
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.config import Refusal, Settings
from toolkit.diagnostics.records import Gradients, Record
from toolkit.diagnostics.small import GLOBAL_BATCH, shortened
from toolkit.diagnostics.watch import Watch
from toolkit.distributed.compat import forget_process_state

STEPS = 6  # of the run as it is configured
LEARNING_STEPS = 60
EVAL_BATCH = 40  # examples; the last batch is half as large
_STOPPED = 75  # exit code of a run that was stopped after a checkpoint
_EIGHT = {"per_device_train_batch_size": GLOBAL_BATCH, "gradient_accumulation_steps": 1}
# What a run does now and then, and where it goes: its steps alone are looked at.
QUIET: dict[str, Any] = {
    "overwrite_output_dir": True, "resume": False, "resume_from": None, "report_to": ["none"], "push_to_hub": False,
    "stop_at_step": None, "stop_deadline": None, "early_stopping_patience": None, "load_best_model_at_end": False,
    "num_samples": 0, "metrics": [], "predict_with_generate": False, "logging_strategy": "steps", "logging_steps": 1,
    "save_strategy": "no", "eval_strategy": "no", "eval_on_start": False, "async_save": False, "loss_spike": "warn",
}  # fmt: skip
_SPLIT = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": GLOBAL_BATCH}


@dataclass
class Runs:
    """The records of short runs by name, and the weights with which some of them ended."""

    records: dict[str, Record] = field(default_factory=dict)
    weights: dict[str, Gradients] = field(default_factory=dict)


def run_short(main: Callable[[Any], Any], config: Settings, watch: Watch, folder: Path, say: Callable[[str], None]) -> Runs:
    """Run a recipe as it is, with one example a micro-batch, with eight, on eight examples alone, and stopped and resumed.

    A refusal of the first run is raised; what else ends a run is in its record (`error`).
    """
    runs = Runs()
    has_rollouts = "num_generations" in vars(config)
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    as_is = {**accumulated, "per_device_eval_batch_size": 8, "max_steps": STEPS, "eval_steps": 3}
    say("as it is configured")
    first = _run(main, config, watch, folder / "as-is", as_is, runs, "as_is")
    if first.error is not None:
        return runs
    exact = {"max_steps": 2, "eval_steps": 2, "dtype": "float32", "max_grad_norm": 0.0, "warmup_steps": 0}
    say("eight micro-batches of one example")
    _run(main, config, watch, folder / "split", {**exact, **_SPLIT, "per_device_eval_batch_size": 1}, runs, "split", exact=True)
    say("one micro-batch of eight")
    _run(
        main,
        config,
        watch,
        folder / "whole",
        {**exact, **_EIGHT, "per_device_eval_batch_size": EVAL_BATCH},
        runs,
        "whole",
        exact=True,
    )
    if not has_rollouts:
        say("eight examples, learned by heart")
        _run(main, config, watch, folder / "overfit", _learning(config), runs, "overfit")
    if "stop_at_step" in vars(config):
        say("stopped and resumed")
        place = folder / "resumed"
        stopped = _run(main, config, watch, place, {**as_is, "stop_at_step": STEPS // 2}, runs, "stopped")
        if getattr(stopped.error, "exit_code", None) == _STOPPED:
            again = {**as_is, "resume": True, "overwrite_output_dir": False}
            _run(main, config, watch, place, again, runs, "resumed")
    return runs


def _learning(config: Settings) -> dict[str, Any]:
    values = vars(config)
    return {
        **_EIGHT, "max_steps": LEARNING_STEPS, "max_train_examples": GLOBAL_BATCH, "eval_strategy": "no",
        "eval_on_start": False, "eval_steps": 10**6, "lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0.0,
        "learning_rate": max(values.get("learning_rate") or 0.0, 3e-3), "optim": "adamw_torch", "dropout": None,
        "group_by_length": False,
    }  # fmt: skip


def _run(
    main: Callable[[Any], Any], config: Settings, watch: Watch, place: Path, changes: Mapping[str, Any], runs: Runs, name: str,
    *, exact: bool = False,
) -> Record:  # fmt: skip
    record = watch.start(without_dropout=exact or name == "overfit", compares_alone=name == "whole")
    runs.records[name] = record
    printed = io.StringIO()
    forget_accelerator()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main(shortened(config, place, changes))
    except Refusal:
        if name == "as_is":
            raise
        record.error = RuntimeError(printed.getvalue()[-500:])
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a stop that was asked for, an exit, or whatever a recipe may do: it is what doctor reports
        record.error = error
        record.error_where = _line_of(error, watch)
    record.events = _events(place / "metrics.jsonl")
    if record.model is not None:
        runs.weights[name] = {n: p.detach().clone() for n, p in record.model.named_parameters()}
    return record


def _line_of(error: BaseException, watch: Watch) -> str:
    """The last line of the user's code on the way to an error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if watch.is_own(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _events(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def forget_accelerator() -> None:
    """Accelerate keeps the state of a process; each run begins with its own."""
    forget_process_state()
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
