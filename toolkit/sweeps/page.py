"""One self-contained HTML page about a sweep. What comes from runs and settings is escaped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from toolkit.config import Refusal
from toolkit.report.numbers import show_seconds
from toolkit.report.style import bars, html_page
from toolkit.sweeps.journal import Job, Plan
from toolkit.sweeps.outcomes import curve_of, trial_folder
from toolkit.sweeps.page_plots import STYLE as CHARTS, Dot, curves, parallel, scatter
from toolkit.sweeps.results import Trial, best_trials, importances, metrics_of, rank_of, result_of, steps_used, trials_of
from toolkit.sweeps.shown import count_line, reached_in_words, seed_lines
from toolkit.sweeps.space import read_space
from toolkit.sweeps.trials import commands_of
from toolkit.system.console import as_typed
from toolkit.system.numbers import show_digits


def sweep_page(folder: Path, plan: Plan, jobs: Sequence[Job], target: Path) -> str:
    """The page as text; its links are relative to where `target` lies. A sweep may still run, or have no value yet.

    Raises:
        Refusal: a trial has what the plan does not search.
    """
    trials = list(trials_of(jobs).values())
    _check_choices(folder, plan, trials)
    best = best_trials(trials, plan)
    parts = [_head(folder, plan, jobs, best), _best(folder, plan, jobs, best, target.parent)]
    if best:
        parts += [_plots(folder, plan, trials, best), _importance(plan, trials), _seeds(plan, jobs)]
    parts.append(_table(folder, plan, jobs, best, target.parent))
    return html_page(folder.resolve().name, "sweep", "".join(parts), CHARTS)


def _check_choices(folder: Path, plan: Plan, trials: Sequence[Trial]) -> None:
    for each in read_space(plan.search):
        for trial in trials:
            if each.choices and str(trial.settings.get(each.name, each.choices[0])) not in each.choices:
                found = f"{each.name} {trial.settings[each.name]}"
                raise Refusal(f"{folder}: trial {trial.number} has {found}, which is not searched. Was the journal edited?")


def _head(folder: Path, plan: Plan, jobs: Sequence[Job], best: Sequence[Trial]) -> str:
    trials = trials_of(jobs).values()
    failed = sum(trial.outcome is not None and not result_of(trial, plan).values for trial in trials)
    stopped = sum(trial.until is not None or trial.outcome.pruned for trial in trials if trial.outcome)
    seconds = sum(job.outcome.seconds for job in jobs if job.outcome)
    judged = "; ".join(f"{'more' if each.maximize else 'less'} {each.metric} is better" for each in plan.objectives)
    facts = [plan.recipe, plan.strategy, f"pruned by {plan.prune}" if plan.prune != "none" else "", judged, *plan.constraints]
    line = " · ".join(escape(fact) for fact in facts if fact)
    values = result_of(best[0], plan).values if len(best) == 1 else ()
    tiles = [(f"Best {each.metric}", show_digits(value)) for each, value in zip(plan.objectives, values, strict=False)]
    tiles += [("Trials", str(len(trials))), ("Failed", str(failed)), ("Stopped early", str(stopped))]
    tiles += [("Steps trained", f"{steps_used(jobs):,}")] if steps_used(jobs) else []
    tiles += [("Time of all trials", show_seconds(seconds))] if seconds else []
    boxes = "".join(f'<div class="tile"><dt>{escape(title)}</dt><dd>{escape(value)}</dd></div>' for title, value in tiles)
    head = f"<header><h2>{escape(folder.resolve().name)}</h2><p>{line}</p><p>{escape(count_line(plan, jobs))}</p></header>"
    return f'{head}<section class="headline"><dl class="tiles">{boxes}</dl></section>'


def _best(folder: Path, plan: Plan, jobs: Sequence[Job], best: Sequence[Trial], place: Path) -> str:
    if not best:
        return '<p class="empty">No trial has a value yet.</p>'
    title = "The best" if len(best) == 1 else f"The Pareto front: {len(best)} trials"
    shown = []
    for trial in best:
        commands = "\n".join(_command(command) for command in commands_of(plan, jobs, trial.number))
        if not plan.recipe_digest:  # a function's
            commands = escape(", ".join(f"{name}={value!r}" for name, value in trial.settings.items()))
        values = ", ".join(f"{name} {show_digits(value)}" for name, value in _named_values(trial, plan))
        shown.append(f'<p>{_link(folder, trial, place)} {escape(values)}</p><pre class="command">{commands}</pre>')
    return f"<section><h3>{title}</h3>{''.join(shown)}</section>"


def _command(words: Sequence[str]) -> str:
    """A command that is copied as one line, and wrapped between words: a browser would break it at the hyphens of flags too."""
    return " ".join(f"<span>{escape(as_typed(word))}</span>" for word in words)


def _plots(folder: Path, plan: Plan, trials: Sequence[Trial], best: Sequence[Trial]) -> str:
    first, numbers = plan.objectives[0], {trial.number for trial in best}
    found = [(trial, result_of(trial, plan).values) for trial in trials if result_of(trial, plan).values]
    dots = [Dot(trial.number, values[0], _label(trial, plan), trial.number in numbers) for trial, values in found]
    so_far: list[tuple[float, float]] = []
    for dot in dots:
        value = dot.y if not so_far else (max if first.maximize else min)(so_far[-1][1], dot.y)
        so_far.append((dot.x, value))
    drawn = [scatter(f"{first.metric} of each trial, and the best so far", dots, "trial", so_far)]
    if len(plan.objectives) > 1:
        second = plan.objectives[1]
        dots = [Dot(values[0], values[1], _label(trial, plan), trial.number in numbers) for trial, values in found]
        drawn.append(scatter(f"{second.metric} of each trial", dots, first.metric))
    ranked = sorted((trial for trial, _ in found), key=lambda trial: (trial.number not in numbers, rank_of(trial, plan)))
    rows = [(trial.settings, result_of(trial, plan).values[0], _label(trial, plan)) for trial in ranked]
    drawn.append(parallel(read_space(plan.search), first.metric, rows))
    lines = []
    for trial in trials:
        outcome = trial.outcome
        curve = outcome.curve if outcome else curve_of(trial_folder(folder, trial.number), first.metric)
        lines.append((_label(trial, plan), curve, trial.number in numbers))
    if lines := [each for each in lines if each[1]]:
        drawn.append(curves(f"{first.metric} at each evaluation", lines))
    return f"<section><h3>Trials</h3>{''.join(drawn)}</section>"


def _importance(plan: Plan, trials: Sequence[Trial]) -> str:
    try:
        shares = importances(trials, plan)
    except Refusal as refusal:
        return f'<section><h3>Importance of the settings</h3><p class="empty">Not known: {escape(str(refusal))}</p></section>'
    longest = max(shares.values()) or 1.0
    drawn = bars((name, share / longest, f"{share:.0%}", "") for name, share in shares.items())
    note = "The share of each setting in what separates the best tenth of the trials from the rest (PED-ANOVA)."
    board = f'<div class="board">{drawn}<p class="note">{note}</p></div>'
    return f"<section><h3>Importance of the settings</h3>{board}</section>"


def _seeds(plan: Plan, jobs: Sequence[Job]) -> str:
    if plan.seeds < 2:
        return ""
    lines = "\n".join(seed_lines(plan, jobs))
    return f"<section><h3>Noise of the seeds</h3><pre>{escape(lines)}</pre></section>"


def _table(folder: Path, plan: Plan, jobs: Sequence[Job], best: Sequence[Trial], place: Path) -> str:
    trials, reached = list(trials_of(jobs).values()), reached_in_words(plan, jobs, folder)
    names = list(dict.fromkeys(name for trial in trials for name in trial.settings))
    metrics = list(dict.fromkeys(metrics_of(plan)))
    numbers = {trial.number for trial in best}
    head = "".join(f"<th>{escape(name)}</th>" for name in ("Trial", *metrics, *names, "Steps", "Time", "How it ended"))
    lines = []
    for trial in trials:
        outcome = trial.outcome
        values = outcome.values if outcome else {}
        cells = [show_digits(values[name]) if name in values else "–" for name in metrics]
        cells += [str(trial.settings.get(name, "–")) for name in names]
        took = show_seconds(outcome.seconds) if outcome and outcome.seconds else "–"
        cells += [f"{outcome.step:,}" if outcome else "–", took]
        row = "".join(f"<td>{escape(_short(cell))}</td>" for cell in cells)
        kind = ' class="ours"' if trial.number in numbers else ""
        ended = f'<td class="reason">{escape(_ended(trial, reached.get(trial.number, "")))}</td>'
        lines.append(f"<tr{kind}><td>{_link(folder, trial, place)}</td>{row}{ended}</tr>")
    table = f'<table class="trials"><tr>{head}</tr>{"".join(lines)}</table>'
    return f'<section><h3>All trials</h3><div class="scroll">{table}</div></section>' if trials else ""


def _ended(trial: Trial, reached: str) -> str:
    outcome = trial.outcome
    if outcome is None or reached:
        return f"not ended, {reached}" if reached else "not ended"
    if outcome.reason:
        return f"failed: {outcome.reason}"
    if outcome.same_as is not None:
        return f"as {f'trial {outcome.same_as}' if isinstance(outcome.same_as, int) else outcome.same_as}"
    if outcome.pruned:
        return f"pruned at step {outcome.step}"
    return "whole run" if trial.until is None else f"stopped at step {trial.until}"


def _label(trial: Trial, plan: Plan) -> str:
    values = ", ".join(f"{name} {show_digits(value)}" for name, value in _named_values(trial, plan))
    settings = ", ".join(f"{name} {_short(str(value))}" for name, value in trial.settings.items())
    return f"trial {trial.number}: {values}; {settings}"


def _named_values(trial: Trial, plan: Plan) -> list[tuple[str, float]]:
    values = trial.outcome.values if trial.outcome else {}
    return [(name, values[name]) for name in dict.fromkeys(metrics_of(plan)) if name in values]


def _short(text: str) -> str:
    """A number with many digits in four."""
    try:
        return show_digits(float(text)) if len(text) > 8 else text
    except ValueError:
        return text


def _link(folder: Path, trial: Trial, place: Path) -> str:
    run = trial_folder(folder, trial.number)
    name = f"{trial.number:04d}"
    return f'<a href="{escape(os.path.relpath(run, place), quote=True)}/">{name}</a>' if run.is_dir() else name
