"""The plots of a sweep's page: an inline SVG that stretches, and HTML labels around it that do not."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.report.numbers import round_ticks, show_count
from toolkit.report.plots import HEIGHT, WIDTH, Axes, grid, svg, value_labels
from toolkit.sweeps.pruning import Curve
from toolkit.sweeps.space import Dimension, Point
from toolkit.system.numbers import show_digits

STYLE = """
.chart { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px 10px 14px; }
.chart + .chart { margin-top: 14px; }
.chart .area { height: 260px; }
.chart .line { stroke: var(--train); stroke-width: 1.2; }
.chart .best { stroke: var(--held); stroke-width: 2.2; }
.chart .so-far { stroke: var(--held); stroke-width: 1.5; opacity: .7; }
.chart .dot { stroke-width: 8; stroke: var(--train); }
.chart .dot.best { stroke: var(--held); stroke-width: 11; }
.chart .axis { stroke: var(--mark); stroke-width: 1; }
.parallel { position: relative; margin: 46px 72px 10px; min-width: calc(112px * var(--columns)); }
.parallel .area { border: 0; }
.parallel span { position: absolute; font-size: 12px; line-height: 1; color: var(--soft); white-space: nowrap; }
.parallel .name { top: -40px; transform: translateX(-50%); font-weight: 600; color: var(--ink); }
.parallel .tick { transform: translateY(-50%); margin-left: 5px; padding: 1px 2px; background: var(--card); opacity: .85; }
.tile dd { white-space: nowrap; }
.command { margin-bottom: 14px; }
.command span { display: inline-block; max-width: 100%; }
.trials td, .trials th { white-space: nowrap; padding: 6px 16px 6px 0; border-bottom: 1px solid var(--line); }
.trials td.reason { white-space: normal; min-width: 220px; }
.trials tr.ours { font-weight: 600; }
@media (max-width: 640px) { .chart .area { height: 200px; } .chart { padding: 12px 12px 8px 10px; } }
"""


@dataclass(frozen=True)
class Dot:
    """A trial as a point of a plot."""

    x: float
    y: float
    label: str
    is_best: bool = False


def scatter(title: str, dots: Sequence[Dot], across: str, so_far: Sequence[tuple[float, float]] = ()) -> str:
    """Dots, and the best so far as a line with steps; `across` names what goes to the right."""
    axes = _axes([dot.x for dot in dots], [dot.y for dot in dots])
    path = "".join(
        f"{'H' if place else 'M'}{axes.x(x):.1f}" + (f"V{axes.y(y):.1f}" if place else f",{axes.y(y):.1f}")
        for place, (x, y) in enumerate(so_far)
    )
    line = f'<path class="so-far" d="{path}"/>' if path else ""
    drawn = "".join(
        f'<path class="dot{" best" if dot.is_best else ""}" d="M{axes.x(dot.x):.1f},{axes.y(dot.y):.1f}h.01">'
        f"<title>{html.escape(dot.label)}</title></path>"
        for dot in sorted(dots, key=lambda dot: dot.is_best)
    )
    return _figure(axes, title, line + drawn, across)


def curves(title: str, found: Sequence[tuple[str, Curve, bool]]) -> str:
    """(label, curve, whether it is the best) of each trial, by step."""
    points = [point for _, curve, _ in found for point in curve]
    axes = _axes([step for step, _ in points], [value for _, value in points])
    drawn = ""
    for label, curve, is_best in sorted(found, key=lambda each: each[2]):
        line = " ".join(f"{axes.x(step):.1f},{axes.y(value):.1f}" for step, value in curve)
        kind = "best" if is_best else "line"
        faint = "" if is_best else f' style="opacity:{max(0.25, min(0.8, 8 / len(found))):.2f}"'
        name = f"<title>{html.escape(label)}</title>"
        drawn += f'<polyline class="{kind}"{faint} points="{line}">{name}</polyline>'
        if len(curve) == 1:
            drawn += f'<path class="dot{" best" if is_best else ""}" d="M{line}h.01">{name}</path>'
    return _figure(axes, title, drawn, "step")


def parallel(space: Sequence[Dimension], metric: str, rows: Sequence[tuple[Point, float, str]]) -> str:
    """Parallel coordinates: a line a trial through its settings to its value; `rows`: (settings, value, label), the best first.

    A setting that a trial does not have is at the foot of its axis, at the dash.
    """
    columns = len(space) + 1
    values = [value for _, value, _ in rows]
    low, high = min(values), max(values)
    spread = (high - low) or 1.0
    drawn, labels = "", ""
    foot = 0.9 if any(each.name not in settings for settings, _, _ in rows for each in space) else 1.0  # of the axes
    for place, each in enumerate([*space, None]):
        left = 100 * place / (columns - 1)
        drawn += f'<path class="axis" d="M{10 * left:.1f},0V{HEIGHT * foot:.0f}"/>'
        labels += f'<span class="name" style="left:{left:.2f}%">{html.escape(each.name if each else metric)}</span>'
        ticks = _ticks(each) if each else [(0.0, show_digits(high)), (1.0, show_digits(low))]
        if each and any(each.name not in settings for settings, _, _ in rows):
            ticks.append((1 / foot, "–"))
        for height, text in ticks:
            labels += f'<span class="tick" style="left:{left:.2f}%;top:{100 * foot * height:.2f}%">{html.escape(text)}</span>'
    for rank, (settings, value, label) in reversed(list(enumerate(rows))):
        places = [1 / foot if each.name not in settings else 1 - each.share_of(settings[each.name]) for each in space]
        places.append((high - value) / spread)
        line = " ".join(f"{WIDTH * at / (columns - 1):.1f},{HEIGHT * foot * height:.1f}" for at, height in enumerate(places))
        kind = "best" if rank == 0 else "line"
        faint = "" if rank == 0 else f' style="opacity:{0.75 - 0.6 * rank / len(rows):.2f}"'
        drawn += f'<polyline class="{kind}"{faint} points="{line}"><title>{html.escape(label)}</title></polyline>'
    area = f'<div class="area">{svg(drawn, "Settings of each trial and its value")}{labels}</div>'
    frame = f'<div class="scroll"><div class="parallel" style="--columns:{columns}">{area}</div></div>'
    return f'<figure class="chart"><figcaption><h4>Settings and what came of them</h4></figcaption>{frame}</figure>'


def _axes(across: Sequence[float], up: Sequence[float]) -> Axes:
    """Around all points, with a little room."""
    return Axes(_with_room(min(across), max(across), 0.02), _with_room(min(up), max(up), 0.06), logarithmic=False)


def _figure(axes: Axes, title: str, drawn: str, across: str) -> str:
    ticks = round_ticks(*axes.steps, 5)
    if across in ("trial", "step"):
        ticks = [tick for tick in ticks if tick == int(tick) >= 0]
    along = "".join(f'<span style="left:{axes.x(tick) / WIDTH:.2%}">{_shown(tick)}</span>' for tick in ticks)
    area = f'<div class="area">{svg(grid(axes) + drawn, title)}</div>'
    frame = f'<div class="frame">{area}{value_labels(axes)}<div class="steps">{along}</div></div>'
    caption = f"<figcaption><h4>{html.escape(title)}</h4> <small>by {html.escape(across)}</small></figcaption>"
    return f'<figure class="chart">{caption}{frame}</figure>'


def _shown(tick: float) -> str:
    return show_count(tick) if abs(tick) >= 1e6 else show_digits(tick)


def _with_room(low: float, high: float, share: float) -> tuple[float, float]:
    room = share * (high - low) or share * abs(high) or 1.0
    return low - room, high + room


def _ticks(dimension: Dimension) -> list[tuple[float, str]]:
    """(height from the top, text): all choices, or both ends of a range and its middle."""
    if dimension.choices:
        return [(1 - dimension.share_of(choice), choice) for choice in dimension.choices]
    ends = [(0.0, dimension.high), (1.0, dimension.low)]
    middle = dimension.at(0.5)
    return [(height, show_digits(value)) for height, value in [*ends, (1 - dimension.share_of(middle), float(middle))]]
