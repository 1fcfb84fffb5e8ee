"""What is wrong with a recipe: short runs of it, and what the checks find in them."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from toolkit.config import Refusal, Settings
from toolkit.config.reading import values_of
from toolkit.diagnostics.checks_of_data import check_leak, check_padding, check_tokenizer, check_tokens
from toolkit.diagnostics.checks_of_ends import check_ends, check_stops
from toolkit.diagnostics.checks_of_gradients import check_alone, check_cleared, check_clipping, check_split
from toolkit.diagnostics.checks_of_labels import check_masks, check_spans
from toolkit.diagnostics.checks_of_runs import (
    OF_RUNS,
    check_evaluation,
    check_finite,
    check_overfit,
    check_resume,
    check_saved,
    check_start,
    check_types,
)
from toolkit.diagnostics.checks_of_shift import check_shift
from toolkit.diagnostics.checks_of_steps import check_decay, check_modes, check_rates, check_trained
from toolkit.diagnostics.direction import check_direction
from toolkit.diagnostics.findings import CHECKS, Finding, Outcome, Report, found, skipped
from toolkit.diagnostics.records import Record
from toolkit.diagnostics.replacements import Replacements
from toolkit.diagnostics.short_runs import Runs, ended_by_signals, run_short
from toolkit.diagnostics.small import with_small_model, with_small_teacher
from toolkit.diagnostics.watch import Watch
from toolkit.system.files import temporary_folder
from toolkit.training import opening

# The runs that checks look at, next to that of the recipe as it is configured.
_RUNS: dict[str, tuple[str, ...]] = {
    "finite": ("split", "whole", "overfit"), "split": ("split", "whole"), "alone": ("whole",), "direction": ("whole",),
    "evaluation": ("split", "whole"), "start": ("whole",), "overfit": ("overfit",), "resume": ("resumed",),
}  # fmt: skip


def examine(
    main: Callable[[Any], Any], config: Settings, watch: Watch, say: Callable[[str], None] = lambda text: None,
    only: Collection[str] = tuple(CHECKS),
) -> Report:  # fmt: skip
    """Run a recipe's `main` a few times in this process, on the CPU and in a temporary directory, and check what was seen.

    `watch` is entered, and was so before the recipe was imported: its functions are wrapped. `only`: names of CHECKS.

    Raises:
        Refusal: the recipe refuses its settings or data, or its model can't be made small.
    """
    began = time.monotonic()
    with ended_by_signals(), Replacements() as replace, temporary_folder("doctor") as folder:
        replace.attribute(opening, "check_room", _check_room)
        small = with_small_teacher(with_small_model(config, folder / "small-model"), folder / "small-teacher")
        try:
            runs = run_short(main, small, watch, folder, say, {run for check in only for run in _RUNS.get(check, ())})
        except Refusal as refusal:
            raise Refusal(_in_users_names(str(refusal), config, small)) from refusal
        outcomes = _outcomes(runs, small, folder, only)
    model = runs.records["as_is"].model
    shown = f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters" if model is not None else ""
    return Report(watch.script, shown, time.monotonic() - began, outcomes)


def _check_room(check: Callable[..., None], *values: object) -> None:
    try:
        check(*values)
    except Refusal as refusal:
        place = tempfile.gettempdir()
        free = shutil.disk_usage(place).free / 1e6
        raise Refusal(f"{place}: {free:,.0f} MB free, too few for doctor's runs. Name another place: TMPDIR=DIR.") from refusal


def _in_users_names(message: str, config: Settings, small: Settings) -> str:
    """A message with the model and the teacher that the user named, where it has the small ones in their place."""
    given, taken = values_of(config), values_of(small)
    for name in ("model", "teacher"):
        if given.get(name) and given[name] != taken[name]:
            message = message.replace(str(taken[name]), str(given[name]))
    return message


def _outcomes(runs: Runs, config: Settings, folder: Path, only: Collection[str]) -> dict[str, Outcome]:
    record = runs.records["as_is"]
    if record.error is not None:
        what = f"It ends with {type(record.error).__name__}: {record.error}"[:400]
        broken = found("", Finding("runs", what, "Mend this first: all else is looked at then.", record.error_where))
        return {"runs": broken}
    nothing = Record()
    split, whole = (runs.records.get(name, nothing) for name in ("split", "whole"))
    after = runs.weights.get("as_is", {})
    checks: dict[str, Callable[[], Outcome]] = {
        "runs": lambda: found(f"{len(record.updates)} updates", _no_update(record), _ended_run(runs.records)),
        "finite": lambda: check_finite(runs.records),
        "split": lambda: check_split(split, whole, config),
        "alone": lambda: check_alone(whole, config),
        "direction": lambda: check_direction(whole, config),
        "tokens": lambda: check_tokens(record),
        "masks": lambda: check_masks(record, config),
        "shift": lambda: check_shift(record),
        "spans": lambda: check_spans(record),
        "ends": lambda: check_ends(record, config),
        "padding": lambda: check_padding(record),
        "rates": lambda: check_rates(record, config),
        "trained": lambda: check_trained(record, after),
        "decay": lambda: check_decay(record, config),
        "clipping": lambda: check_clipping(record, config),
        "cleared": lambda: check_cleared(record),
        "modes": lambda: check_modes(record),
        "evaluation": lambda: check_evaluation(split, whole, runs.weights),
        "start": lambda: check_start(whole, config),
        "overfit": lambda: (
            check_overfit(runs.records["overfit"]) if "overfit" in runs.records else skipped("a policy is trained")
        ),
        "saved": lambda: check_saved(record, after, folder / "as-is" / "model"),
        "stops": lambda: check_stops(record, folder / "as-is" / "model"),
        "resume": lambda: check_resume(runs.weights, runs.records.get("resumed")),
        "types": lambda: check_types(record, config),
        "tokenizer": lambda: check_tokenizer(record),
        "leak": lambda: check_leak(record),
    }
    assert checks.keys() == CHECKS.keys()
    return {name: _look(check) for name, check in checks.items() if name == "runs" or name in only}


def _look(check: Callable[[], Outcome]) -> Outcome:
    try:
        return check()
    except Exception as error:  # a recipe may do what no check has thought of: the others still tell
        return skipped(f"the check itself failed with {type(error).__name__}: {error}"[:200])


def _no_update(record: Record) -> Finding | None:
    if record.updates:
        return None
    what = "No optimizer was stepped while a batch of tk.build_dataloaders was in use: little can be looked at."
    return Finding("runs", what, "Iterate over the run, or over train.batches(), and step the optimizer in that loop.")


def _ended_run(records: Mapping[str, Record]) -> Finding | None:
    """The first of the other short runs that the recipe ended with an error; the resumed one has a check of its own.

    A run that the toolkit itself ends (a refusal, a loss that is not finite) may be so for the settings that it has here.
    """
    for name, how in OF_RUNS.items():
        error = records[name].error if name in records else None
        if error is not None and not isinstance(error, Refusal) and not hasattr(error, "exit_code"):
            what = f"With {how} it ends with {type(error).__name__}: {error}"[:400]
            change = "Mend this first: what is to be seen in that run could not be looked at."
            return Finding("runs", what, change, records[name].error_where)
    return None
