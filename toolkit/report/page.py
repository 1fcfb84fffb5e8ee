"""The page: its sections as HTML. Everything that comes from a run is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.metrics.baselines import compared_with_baselines, in_words
from toolkit.metrics.direction import greater_is_better
from toolkit.report.details import show_environment, show_files, show_samples, show_settings
from toolkit.report.numbers import show_count, show_seconds
from toolkit.report.overlay import STYLE as OVERLAY_STYLE, draw_overlay
from toolkit.report.plots import Plot, draw_plot
from toolkit.report.reading import RunRecord, baselines_of, check_runs, first_and_last, metric_names, read_run, series_of
from toolkit.report.style import SCRIPT, bars, html_page
from toolkit.report.verdict import by_how_much, show_value, verdict
from toolkit.system.console import one_line
from toolkit.system.numbers import show_digits

if TYPE_CHECKING:
    from toolkit.report.compare import Comparison, Difference

TITLES = {
    "reward": "Reward", "loss": "Loss", "bits_per_byte": "Bits per byte", "perplexity": "Perplexity",
    "token_accuracy": "Token accuracy", "accuracy": "Accuracy", "f1": "F1", "precision": "Precision", "recall": "Recall",
    "matthews_correlation": "Matthews correlation",
    "learning_rate": "Learning rate", "grad_norm": "Gradient norm", "tokens_per_second": "Supervised tokens per second",
    "examples_per_second": "Examples per second", "mfu": "Model FLOPs utilization",
    "data_wait": "Share of the time that waited for data", "completion_length": "Completion length in tokens",
    "completion_length_min": "Shortest completion in tokens", "completion_length_max": "Longest completion in tokens",
    "truncated": "Share of truncated completions", "reward_std": "Spread of rewards within a group",
    "groups_without_spread": "Share of groups without spread", "kl": "KL", "approx_kl": "Approximate KL",
    "sampling_seconds": "Seconds of sampling a step", "scoring_seconds": "Seconds of scoring a step",
    "learning_seconds": "Seconds of learning a step", "sampled_tokens_per_second": "Tokens sampled per second",
    "learned_tokens_per_second": "Tokens learned from per second",
}
# A run is judged by the first of these that it has.
MAIN_METRICS = ("bits_per_byte", "accuracy", "f1", "matthews_correlation", "loss", "reward")
# Neither more nor less of it is better.
NO_DIRECTION = (
    "completion_length", "completion_length_min", "completion_length_max", "sampling_seconds", "scoring_seconds",
    "learning_seconds",
)  # fmt: skip
MOST_DIFFERENCES = 60
FROM_ZERO = ("learning_rate", "grad_norm", "tokens_per_second", "examples_per_second", "mfu", "data_wait")


def write_report(run_dirs: Sequence[str | Path], path: str | Path) -> Path:
    """Write one HTML page about the runs in `run_dirs` to `path`, and return it.

    The page holds all it shows and loads nothing; its links to the runs' files are relative to where it lies. A run may
    still be going, or lack any of its files.

    Raises:
        Refusal: a directory of `run_dirs` does not exist, or no run has written into it.
        OSError: the page cannot be written.
    """
    target = Path(path)
    check_runs(run_dirs)
    runs = [read_run(Path(directory)) for directory in run_dirs]
    target.parent.mkdir(parents=True, exist_ok=True)
    _write(target, page(runs, target.parent))
    return target


def write_comparison(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write the page of a report with what a comparison found on top of it.

    Raises:
        OSError: the page cannot be written.
    """
    runs = [comparisons[0].runs[0], *(each.runs[1] for each in comparisons)]
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, page(runs, path.parent, "".join(map(_differences, comparisons))))


def _write(path: Path, text: str) -> None:
    """A JSON file may hold half of a surrogate pair, which is no text of UTF-8."""
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def page(runs: list[RunRecord], folder: Path, found: str = "") -> str:
    """The whole page as text; links are relative to `folder`. `found`: HTML of what differs, above the curves of all runs."""
    title = ", ".join(map(run_title, runs))
    overview = f"{_overview(runs)}{found}{_curves_together(runs)}" if len(runs) > 1 else ""
    body = overview + "".join(_run_section(run, index, folder) for index, run in enumerate(runs))
    return html_page(title, "training report", body, OVERLAY_STYLE if overview else "", SCRIPT)


def run_title(run: RunRecord) -> str:
    """The run's name, else its directory's."""
    name = run.setting("run_name")
    return name if name and name not in ("null", "~") else run.directory.resolve().name


def _overview(runs: list[RunRecord]) -> str:
    """One line a run."""
    lines = []
    for index, run in enumerate(runs):
        name = _main_metric(run)
        first, last = first_and_last(run, f"eval_{name}") if name else (None, None)
        change = "–"
        if name and last is not None:
            change = f"{_change(first, last)} <small>{escape(_in_a_sentence(_title(name)))}</small>"
        lines.append(
            f'<tr><th><a href="#run{index}">{escape(run_title(run))}</a></th><td>{escape(_model_name(run))}</td>'
            f"<td>{escape(run.setting('dataset') or '–')}</td><td>{_steps(run)}</td>"
            f"<td>{_duration(run) or '–'}</td><td>{change}</td></tr>"
        )
    head = "<tr><th>Run</th><th>Model</th><th>Data</th><th>Steps</th><th>Time</th><th>Held out</th></tr>"
    return f'<h1>{len(runs)} runs</h1><div class="scroll"><table class="overview">{head}{"".join(lines)}</table></div>'


def _differences(comparison: Comparison) -> str:
    names = (run_title(comparison.runs[0]), run_title(comparison.runs[1]))
    names = names if names[0] != names[1] else (str(comparison.runs[0].directory), str(comparison.runs[1].directory))
    rows = "".join(
        f"<tr><td>{_stage(each)}</td>"
        f"<td>{escape(each.name)}</td>{''.join(f'<td>{_value(each, value)}</td>' for value in each.values)}"
        f"<td>{escape(by_how_much(each))}</td></tr>"
        for each in comparison.differences[:MOST_DIFFERENCES]
    )
    left_out = len(comparison.differences) - MOST_DIFFERENCES
    more = f'<p class="note">{left_out} more are left out.</p>' if left_out > 0 else ""
    heads = "".join(f"<th>{escape(each)}</th>" for each in ("", "What", *names, "Difference"))
    table = f'<table class="settings differences"><tr>{heads}</tr>{rows}</table>' if rows else ""
    table = f'<div class="scroll">{table}</div>{more}' if rows else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in comparison.notes)
    notes = f'<ul class="complaints">{notes}</ul>' if notes else ""
    title = f"{escape(names[0])} and {escape(names[1])}"
    return f"<section><h3>{title}</h3><p>{escape(verdict(comparison, names))}</p>{table}{notes}</section>"


def _stage(difference: Difference) -> str:
    if difference.step is None or difference.stage == "step":
        return f"step {difference.step}" if difference.stage == "step" else escape(difference.stage)
    return f"{escape(difference.stage)} <small>step {difference.step}</small>"


def _value(difference: Difference, value: Any) -> str:
    return "" if difference.about and value is None else escape(one_line(show_value(value), 200))


def _curves_together(runs: Sequence[RunRecord]) -> str:
    """Each metric that two runs or more have, all of them in one frame."""
    names = dict.fromkeys(name for run in runs for name in metric_names(run))
    titles = [run_title(run) for run in runs]
    titles = titles if len(set(titles)) == len(titles) else [str(run.directory) for run in runs]
    ordered = [name for name in TITLES if name in names] + [name for name in names if name not in TITLES]
    drawn = []
    for name in ordered:
        series = ((series_of(run, name), series_of(run, f"eval_{name}")) for run in runs)
        curves = [(title, *both) for title, both in zip(titles, series, strict=True)]
        if sum(bool(train or held_out) for _, train, held_out in curves) > 1:
            drawn.append(draw_overlay(_title(name), curves, from_zero=name in FROM_ZERO, is_noisy=name != "learning_rate"))
    return f'<section><h3>Curves of all runs</h3><div class="plots">{"".join(drawn)}</div></section>' if any(drawn) else ""


def _run_section(run: RunRecord, index: int, folder: Path) -> str:
    parts = [_headline(run), _curves(run), show_samples(run), show_settings(run), show_environment(run)]
    parts.append(show_files(run, folder))
    warnings = run.summary.get("warnings")
    said = [*run.complaints, *(map(str, warnings) if isinstance(warnings, list) else [])]
    complaints = "".join(f"<li>{escape(each)}</li>" for each in said)
    warning = f'<ul class="complaints">{complaints}</ul>' if complaints else ""
    return f'<article id="run{index}">{_head(run)}{warning}{"".join(parts)}</article>\n'


def _head(run: RunRecord) -> str:
    status = str(run.summary.get("status") or ("finished" if run.summary else "no summary yet"))
    parameters = _inside(run.card, "model", "parameters")
    facts = [
        _model_name(run),
        f"{show_count(parameters)} parameters" if isinstance(parameters, (int, float)) else "",
        run.setting("dataset") or "",
        f"{_steps(run)} steps" if _steps(run) != "–" else "",
        _duration(run),
    ]
    kind = "good" if status == "finished" else "plain"
    line = " · ".join(escape(fact) for fact in facts if fact and fact != "–")
    return f'<header><h2>{escape(run_title(run))}<span class="status {kind}">{escape(status)}</span></h2><p>{line}</p></header>'


def _headline(run: RunRecord) -> str:
    """The metrics that show how it went, and the baselines to beat."""
    main = _main_metric(run)
    names = [name for name in metric_names(run) if f"eval_{name}" in run.series]
    ranks = {name: rank for rank, name in enumerate(MAIN_METRICS)}
    names = sorted(names, key=lambda name: (name != main, ranks.get(name, len(ranks))))
    tiles = []
    for name in names[:4]:
        first, last = first_and_last(run, f"eval_{name}")
        if last is not None:
            is_less = None if name in NO_DIRECTION or name.endswith("_std") else _less_is_better(run, name)
            tiles.append(_tile(f"Held-out {_in_a_sentence(_title(name))}", last, first, is_less))
    losses = [value for _, value in series_of(run, "loss") if value is not None]
    if losses and main != "reward":  # of advantages, the loss is no measure of how good the policy is
        tiles.append(_tile("Training loss", losses[-1], losses[0] if len(losses) > 1 else None, True))
    speeds = sorted(value for _, value in series_of(run, "tokens_per_second") if value is not None)
    if speeds:
        usual = float(f"{speeds[len(speeds) // 2]:.3g}")  # the median; its last digits are noise
        tiles.append(f'<div class="tile"><dt>Supervised tokens per second</dt><dd>{show_digits(usual)}</dd></div>')
    board = _baseline_board(run, main) if main else ""
    if not tiles and not board:
        return '<p class="empty">No metrics were logged yet.</p>'
    return f'<section class="headline"><dl class="tiles">{"".join(tiles)}</dl>{board}</section>'


def _tile(title: str, last: float, first: float | None, less_is_better: bool | None) -> str:
    change = ""
    if first is not None and first != last:
        kind = "faint" if less_is_better is None else "better" if (last < first) == less_is_better else "worse"
        arrow = "↓" if last < first else "↑"
        change = f'<p class="{kind}">{arrow} from {show_digits(first)}</p>'
    return f'<div class="tile"><dt>{escape(title)}</dt><dd>{show_digits(last)}</dd>{change}</div>'


def _baseline_board(run: RunRecord, main: str) -> str:
    """Bars from zero, the best on top: the model among its baselines, and a sentence on whether it beat them."""
    baselines = baselines_of(run)
    _, last = first_and_last(run, f"eval_{main}")
    if not baselines or last is None:
        return ""
    rows = [(value, name, "") for name, value in baselines.items()] + [(last, "this model", "ours")]
    is_less = _less_is_better(run, main)
    rows.sort(key=lambda row: row[0], reverse=not is_less)
    compared = compared_with_baselines({"figure": main, **baselines}, {main: last}, not is_less)
    verdict = ""
    if compared:
        kind = "worse" if compared.unbeaten else "better"
        words = in_words(compared._replace(name="this model, with"), show_digits)
        verdict = f'<p class="{kind}">{escape(words[:1].upper() + words[1:])}.</p>'
    longest = max(abs(value) for value, _, _ in rows) or 1.0
    drawn = bars((name, max(0.0, value) / longest, show_digits(value), kind) for value, name, kind in rows)
    order = "lower is better" if is_less else "higher is better"
    title = f"<h4>{escape(_title(main))} <small>{order}</small></h4>"
    return f'<div class="board">{title}{drawn}{verdict}</div>'


def _curves(run: RunRecord) -> str:
    names = metric_names(run)
    if "tokens_per_second" in names:  # the same curve at another scale
        names = [name for name in names if name != "examples_per_second"]
    main = _main_metric(run)
    first = [name for name in dict.fromkeys((main, "loss") if main == "reward" else ("loss", main)) if name in names]
    held_out = [name for name in names if f"eval_{name}" in run.series]
    ordered = list(dict.fromkeys([*first, *held_out, *(name for name in TITLES if name in names), *names]))
    skipped = run.nonfinite_steps
    drawn = []
    for name in ordered:
        note = ""
        if name == "loss" and skipped:
            note = f"{skipped} step{'s' if skipped > 1 else ''} with a loss or gradient that was not finite."
        drawn.append(
            draw_plot(
                Plot(
                    _title(name), series_of(run, name), series_of(run, f"eval_{name}"),
                    marks=baselines_of(run) if name == main else {},
                    from_zero=name in FROM_ZERO, is_noisy=name != "learning_rate", logarithmic=name == "perplexity", note=note,
                )
            )
        )
    drawn = [plot for plot in drawn if plot]
    return f'<section><h3>Curves</h3><div class="plots">{"".join(drawn)}</div></section>' if drawn else ""


def _main_metric(run: RunRecord) -> str | None:
    names = [name for name in metric_names(run) if f"eval_{name}" in run.series]
    of_baselines = str(_inside(run.summary, "baselines", "figure")).removeprefix("eval_")
    return next((name for name in (of_baselines, *MAIN_METRICS, *names) if name in names), None)


def _less_is_better(run: RunRecord, name: str) -> bool:
    decides = str(run.setting("metric_for_best_model")).removeprefix("eval_") == name
    given = {"true": True, "false": False}.get(str(run.setting("greater_is_better"))) if decides else None
    return not greater_is_better(name, given)


def _change(first: float | None, last: float) -> str:
    return f"{show_digits(first)} → <b>{show_digits(last)}</b>" if first is not None else f"<b>{show_digits(last)}</b>"


def _steps(run: RunRecord) -> str:
    steps = run.summary.get("steps")
    if not isinstance(steps, (int, float)):
        steps = run.last_step
    return show_digits(steps) if isinstance(steps, (int, float)) else "–"


def _duration(run: RunRecord) -> str:
    seconds = run.summary.get("seconds")
    return show_seconds(seconds) if isinstance(seconds, (int, float)) else ""


def _model_name(run: RunRecord) -> str:
    return str(_inside(run.card, "model", "name") or run.setting("model") or "–")


def _inside(record: dict[str, Any], *path: str) -> Any:
    found: Any = record
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _in_a_sentence(title: str) -> str:
    return title[:1].lower() + title[1:] if title[1:2].islower() else title


def _title(name: str | None) -> str:
    return TITLES.get(name or "", (name or "").replace("_", " ").capitalize())
