"""Short runs of a recipe in this process, each with its own settings, under one watch."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from toolkit.config import Refusal, Settings
from toolkit.diagnostics.records import Gradients, Record
from toolkit.diagnostics.replacements import Replacements
from toolkit.diagnostics.small import GLOBAL_BATCH, LONGEST, lengths_of, shortened
from toolkit.diagnostics.watch import Watch
from toolkit.diagnostics.wrappers import Learned
from toolkit.distributed.compat import forget_process_state
from toolkit.preference import reference
from toolkit.system.interruptions import Terminated
from toolkit.training import opening
from toolkit.training.run import Run
from toolkit.training.signals import STOPPING

STEPS = 6  # of the run as it is configured
LEARNING_STEPS, LEAST_STEPS = 60, 10  # on eight examples, until they are learned
_LEARNED = 0.7  # of the first loss, that is left when the run ends before that
_LEARNED_OF_MASKS = 0.95  # likewise, where other tokens are hidden in each step: an adapter learns little of them by heart
EVAL_BATCH = 16  # examples; the last batch is about half as large
_EIGHT = {"per_device_train_batch_size": GLOBAL_BATCH, "gradient_accumulation_steps": 1}
OTHER_RUNS = ("split", "whole", "overfit", "resumed")
_SPLIT = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": GLOBAL_BATCH}


@dataclass
class Runs:
    """The records of short runs by name, and the weights with which some of them ended."""

    records: dict[str, Record] = field(default_factory=dict)
    weights: dict[str, Gradients] = field(default_factory=dict)


def run_short(
    main: Callable[[Any], Any], config: Settings, watch: Watch, folder: Path, say: Callable[[str], None],
    wanted: Collection[str] = OTHER_RUNS,
) -> Runs:  # fmt: skip
    """Run a recipe as it is, and then, of OTHER_RUNS, those that are wanted: with one example a micro-batch, with eight, on
    eight examples alone until they are learned, and resumed from the first run's checkpoint.

    A refusal of the first run is raised, where it is not for the lengths of short runs alone; what else ends a run is in its
    record (`error`).
    """
    runs = Runs()
    has_rollouts = "num_generations" in vars(config)
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    as_is = {**accumulated, "per_device_eval_batch_size": 8, "max_steps": STEPS, "eval_steps": STEPS // 2}
    saving = {"save_strategy": "steps", "save_steps": STEPS // 2, "save_total_limit": None} if "resumed" in wanted else {}
    say("as it is configured")
    lengths: dict[str, Any] = {}
    try:
        first = _run(main, config, watch, folder / "as-is", {**as_is, **saving}, runs, "as_is")
    except Refusal:
        lengths = lengths_of(config)
        if max(lengths.values(), default=0) <= LONGEST:
            raise
        first = _run(main, config, watch, folder / "as-is", {**as_is, **saving, **lengths}, runs, "as_is")
    if first.error is not None:
        return runs
    exact = {"max_steps": 2, "eval_steps": 2, "dtype": "float32", "max_grad_norm": 0.0, "warmup_steps": 0}
    if "split" in wanted:
        say("eight micro-batches of one example")
        split = {**exact, **lengths, **_SPLIT, "per_device_eval_batch_size": 1}
        _run(main, config, watch, folder / "split", split, runs, "split", exact=True)
    if "whole" in wanted:
        say("one micro-batch of eight")
        whole = {**exact, **lengths, **_EIGHT, "per_device_eval_batch_size": EVAL_BATCH}
        _run(main, config, watch, folder / "whole", whole, runs, "whole", exact=True)
    if "overfit" in wanted and not has_rollouts:
        say("eight examples, learned by heart")
        _run(main, config, watch, folder / "overfit", {**_learning(config), **lengths}, runs, "overfit")
    checkpoint = folder / "as-is" / "checkpoints" / f"step-{STEPS // 2}"
    if "resumed" in wanted and checkpoint.is_dir():
        say("resumed in the middle")
        again = {**as_is, **lengths, "resume_from": str(checkpoint)}
        _run(main, config, watch, folder / "resumed", again, runs, "resumed")
    return runs


def losses_of(events: Iterable[Mapping[str, Any]]) -> list[float]:
    """The logged losses of the steps."""
    return [float(event["loss"]) for event in events if isinstance(event.get("loss"), int | float)]


def has_learned(losses: Sequence[float], task: str) -> bool:
    """Whether the loss of a run on the same examples has come down far enough to end it, by the mean of the last five steps."""
    share = _LEARNED_OF_MASKS if task in ("masked_lm", "diffusion") else _LEARNED
    return len(losses) >= LEAST_STEPS and sum(losses[-5:]) / 5 < losses[0] - (1 - share) * abs(losses[0])


def _learning(config: Settings) -> dict[str, Any]:
    values = vars(config)
    return {
        **_EIGHT, "max_steps": LEARNING_STEPS, "max_train_examples": GLOBAL_BATCH, "eval_strategy": "no",
        "eval_on_start": False, "eval_steps": 10**6, "lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0.0,
        "learning_rate": max(values.get("learning_rate") or 0.0, 3e-3), "optim": "adamw_torch", "dropout": None,
    }  # fmt: skip


def _run(
    main: Callable[[Any], Any], config: Settings, watch: Watch, place: Path, changes: Mapping[str, Any], runs: Runs, name: str,
    *, exact: bool = False,
) -> Record:  # fmt: skip
    record = watch.start(without_dropout=exact or name == "overfit", compares_gradients=name == "whole")
    runs.records[name] = record
    if name == "overfit":
        watch.until = lambda: has_learned(losses_of(_events(place / "metrics.jsonl")), record.task)
    printed = io.StringIO()
    forget_accelerator()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main(shortened(config, place, changes))
    except Learned:
        pass
    except Refusal as refusal:
        if name == "as_is":
            raise
        record.error = refusal
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


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """A block whose runs end where Ctrl-C or SIGTERM finds them, by an exception: they have nothing to continue.

    A run of its own notes the signal, saves and names the command that continues; here the directory is a temporary one.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    before: dict[int, Any] = {}
    with Replacements() as replace:
        replace.attribute(opening, "signals_noted", lambda original, stop: contextlib.nullcontext())
        with contextlib.suppress(ValueError):  # not the main thread: its signals are another's
            before |= {number: signal.signal(number, end) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def never_evaluated() -> Iterator[None]:
    """A block whose runs never evaluate and write no weights. Their settings stay as they are, so that what a run refuses of
    its evaluation, such as rows too few to hold any out, is refused here too; but not a disk with no room for weights."""
    with Replacements() as replace:
        replace.attribute(opening, "check_room", lambda check, *_: None)
        replace.public("save_model", lambda save, *_, **__: None)
        replace.attribute(Run, "due", lambda due, opened, what: not what.startswith("eval") and due(opened, what))
        replace.attribute(Run, "compare_with", lambda *_: None)
        replace.attribute(reference, "reference_table", _of_training_rows)
        yield


def _of_training_rows(table: Callable[..., Any], *values: Any) -> Any:
    *before, config, ld_alpha = values
    return table(*before, dataclasses.replace(config, eval_strategy="no"), ld_alpha)


def forget_accelerator() -> None:
    """Accelerate keeps the state of a process; each run begins with its own."""
    forget_process_state()
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
