"""A sweep from Python: of a function, or of a recipe's main."""

from __future__ import annotations

import inspect
import math
import re
import reprlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.config import Refusal, RunConfig, settings_of
from toolkit.distributed.launch import TRY_AGAIN
from toolkit.metrics.direction import greater_is_better
from toolkit.runs.directory import holds_a_run
from toolkit.sweeps.journal import Job, JournalFile, Objective, Outcome, Plan, read_journal
from toolkit.sweeps.loop import Sweep, run_sweep
from toolkit.sweeps.outcomes import furthest_step, read_outcome, steps_of, trial_folder
from toolkit.sweeps.pruning import Curve
from toolkit.sweeps.results import Trial, best_trials, metrics_of, trials_of
from toolkit.sweeps.schedule import BY_RUNGS, check_rungs
from toolkit.sweeps.space import choices_written
from toolkit.sweeps.trials import fork_run
from toolkit.system.files import temporary_folder


class Pruned(Exception):
    """Raised by `FunctionTrial.report` when the trial need not go on; the function lets it pass."""


@dataclass
class FunctionTrial:
    """What a swept function may take as its second argument.

    Attributes:
        settings: of this trial.
        until: the step up to which it is wanted; None: to its end.
    """

    settings: dict[str, Any]
    until: int | None
    curve: Curve = field(default_factory=list)
    prune: Callable[[Curve], int | None] | None = None

    def report(self, step: int, value: float) -> None:
        """Report the value after a step, by which trials are compared.

        Raises:
            Pruned: it is worse than others were at that step.
        """
        if _is_number(value):
            self.curve.append((step, float(value)))
        if self.prune and self.prune(self.curve) is not None:
            raise Pruned


def sweep(
    function: Callable[..., float | Mapping[str, float]], space: Mapping[str, Any], *, trials: int = 20,
    strategy: str = "random", seed: int = 0, maximize: bool | Mapping[str, bool] = False, constraints: Sequence[str] = (),
    prune: str = "none", rungs: Sequence[int] = (), reduction: int = 3, parallel: int = 1, folder: str | Path | None = None,
    config: RunConfig | None = None,
) -> list[Trial]:  # fmt: skip
    """Search for the arguments of a function, or for the settings of a recipe's `main`; the trials, the best first.

    Args:
        function: `function(settings)` or `function(settings, trial)` returns the value of a trial, or several by name. What it
            raises fails the trial, and not the sweep; so does a value that is no finite number.
        space: for each setting what --search takes, such as "log:1e-5..1e-3" or "int:4..64", or a list of choices.
        strategy: one of random, grid, quasirandom, tpe, gp, cmaes.
        maximize: whether more is better; of several values by name, of which each is then an objective.
        constraints: limits of returned values, such as "parameters<=1e6".
        prune: none, median, halving, hyperband or asha.
        rungs: steps at which trials are compared; the last one is a whole trial.
        parallel: how many trials have no results yet at a proposal; as a sweep with that many at a time would propose.
        folder: keeps the journal, with which the same call goes on where it was cut off.
        config: the settings that are the same in every trial, where `function` is a recipe's `main(config)`. Each trial is then
            a run under FOLDER/trials (default: sweeps/NAME of the recipe), in this process, one after another, judged by
            `config.metric_for_best_model`.

    Ctrl-C ends a trial as it ends any other code; the trial is called again when the sweep goes on.

    Raises:
        Refusal: the space, or another argument, cannot be meant.
    """
    _check(space, trials, parallel, prune, rungs, reduction)
    if isinstance(maximize, Mapping) and not maximize:
        raise Refusal("maximize={}: name the values that decide, such as {'accuracy': True}.")
    directions = maximize if isinstance(maximize, Mapping) else {"value": maximize}
    if config is not None:
        metric = config.metric_for_best_model
        if not isinstance(maximize, Mapping):
            directions = {metric: maximize or greater_is_better(metric, config.greater_is_better)}
        folder = folder or Path("sweeps") / inspect.getmodule(function).__name__  # type: ignore[union-attr]
        _check_main(config, space, prune)
    search = [f"{name}={_written(name, values)}" for name, values in space.items()]
    plan = Plan(
        getattr(function, "__qualname__", "function"), "", [], search, strategy, seed, trials,
        [Objective(name, each) for name, each in directions.items()], list(constraints), parallel, prune=prune,
        rungs=list(rungs), reduction=reduction,
    )  # fmt: skip
    with temporary_folder("sweep") as temporary:
        place = Path(folder or temporary)
        journal = JournalFile(place)
        state = Sweep(journal, plan, journal.liveness(), fork=lambda trial, parent: fork_run(place, trial, parent))
        kinds = {name: _reader(values) for name, values in space.items()}

        def start(job: Job, slot: int, prune_at: Callable[[Curve], int | None] | None) -> Ended:
            settings = {name: kinds[name](value) for name, value in job.settings.items()}
            if config is not None:
                return Ended(_run(function, config, settings, job, plan, place))
            return Ended(_call(function, FunctionTrial(settings, job.until, prune=prune_at), plan))

        run_sweep(state, start)
        plan_found, jobs = read_journal(state.journal)
    found = [
        replace(trial, settings={name: kinds[name](value) for name, value in trial.settings.items()})
        for trial in trials_of(jobs).values()
    ]
    best = best_trials(found, plan_found or plan)
    return [*best, *(trial for trial in found if trial not in best)]


def _check(space: Mapping[str, Any], trials: int, parallel: int, prune: str, rungs: Sequence[int], reduction: int) -> None:
    """What the command line checks as it is read.

    Raises:
        Refusal: an argument is out of its range, or would have no effect.
    """
    for name, values in space.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise Refusal(f"{name!r}: is no name of a setting. Take letters, digits and underscores.")
        if not isinstance(values, Sequence):
            raise Refusal(f"{name}: {values!r} is no range and no list. Write 'log:1e-5..1e-3' or a list of choices.")
    for argument, value, least in (("trials", trials, 1), ("parallel", parallel, 1), ("reduction", reduction, 2)):
        if value < least:
            raise Refusal(f"{argument}={value}: must be at least {least}.")
    if prune not in (known := ("none", "median", "halving", "hyperband", "asha")):
        raise Refusal(f"prune={prune!r}: there are {', '.join(known)}.")
    if prune in BY_RUNGS:
        check_rungs(rungs, f"rungs={list(rungs)}")
    elif rungs:
        raise Refusal(f"rungs={list(rungs)}: has no effect with prune={prune!r}. Take halving, hyperband or asha.")


def _check_main(config: RunConfig, space: Mapping[str, Any], prune: str) -> None:
    """Raises:
        Refusal: a name is none of the recipe's settings, or the trials would have to be watched from outside.
    """
    if unknown := [name for name in space if name not in settings_of(type(config))]:
        raise Refusal(f"{unknown[0]}: no setting of {type(config).__module__}.{type(config).__name__}.")
    if prune == "median":
        raise Refusal("prune='median': stops a trial from another process. Take prune='asha', or type `toolkit sweep`.")


def _run(
    main: Callable[..., Any], config: RunConfig, settings: Mapping[str, Any], job: Job, plan: Plan, folder: Path
) -> Outcome:
    """One trial of a recipe in this process."""
    run, began, reason = trial_folder(folder, job.trial), time.monotonic(), ""
    changes = {"allow_change": list(settings)} if job.parent else {}
    own = {**settings, **changes, "output_dir": str(run), "stop_at_step": job.until, "resume": holds_a_run(run)}
    try:
        if job.until is None or steps_of(run) < job.until:
            main(replace(config, **own))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    except BaseException as error:
        # It stopped with a checkpoint: where it was to, or by a signal, which is the sweep's affair.
        if getattr(error, "exit_code", None) != TRY_AGAIN or job.until is None or steps_of(run) < job.until:
            raise
    seconds = time.monotonic() - began
    if reason:
        return Outcome(reason=reason, code=1, seconds=seconds, step=furthest_step(run))
    return replace(read_outcome(run, plan, job.until), seconds=seconds)


def _call(function: Callable[..., Any], trial: FunctionTrial, plan: Plan) -> Outcome:
    began, reason, returned = time.monotonic(), "", None
    pruned = False
    takes_trial = len(inspect.signature(function).parameters) > 1
    try:
        returned = function(trial.settings, trial) if takes_trial else function(trial.settings)
    except Pruned:
        pruned, returned = True, (max if plan.objectives[0].maximize else min)(value for _, value in trial.curve)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    first = plan.objectives[0].metric
    values = returned if isinstance(returned, Mapping) else {} if returned is None else {first: returned}
    finite = {name: float(value) for name, value in values.items() if _is_number(value)}
    if not reason and not pruned and (missing := [name for name in metrics_of(plan) if name not in finite]):
        found = f"{missing[0]} is {reprlib.repr(values[missing[0]])}, no finite number" if missing[0] in values else ""
        reason = found or f"returned no {missing[0]}"
    step = trial.curve[-1][0] if trial.curve else trial.until or 0
    return Outcome(finite, reason, 1 if reason else 0, time.monotonic() - began, step, pruned, trial.curve)


def _is_number(value: Any) -> bool:
    """Whether it is a finite number, also one of numpy or torch."""
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):  # a text, several numbers, an integer beyond a float
        return False


@dataclass
class Ended:
    """A call that has returned."""

    outcome: Outcome

    def poll(self) -> Outcome | None:
        return self.outcome

    def interrupt(self, number: int) -> None: ...

    def interrupted(self) -> int | None:
        return None


def _written(name: str, values: str | Sequence[Any]) -> str:
    return values if isinstance(values, str) else choices_written(values, name)


def _reader(values: str | Sequence[Any]) -> Callable[[Any], Any]:
    """Choices come back as they were given."""
    if not isinstance(values, str):
        by_text = {str(value): value for value in values}
        return lambda text: by_text.get(str(text), text)
    return lambda value: value
