"""Curves of several runs in one frame: a color a run, the training curve thin, the held-out one thick with dots.

The first run's lines are the widest, so that they are seen below those of a run that is the same.
"""

import html
from collections.abc import Sequence

from toolkit.report.plots import (
    SMOOTH_FROM,
    Plot,
    axes_of,
    dots,
    grid,
    legend_entry,
    line,
    smooth,
    step_labels,
    svg,
    value_labels,
)
from toolkit.report.reading import Points

# Eight that differ also with a red-green weakness (Okabe and Ito, https://jfly.uni-koeln.de/color), on light and dark.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d1f", "#7f7f7f")

STYLE = """
.overlay polyline.train { stroke: var(--run); stroke-width: 1.3; opacity: .75; }
.overlay polyline.raw { opacity: .2; }
.overlay polyline.held { stroke: var(--run); stroke-width: 2.4; opacity: 1; }
.overlay .area .dot { stroke: var(--run) !important; stroke-width: 5; }
.overlay .area .dot.held { stroke-width: 8; }
.overlay g:first-of-type polyline.train { stroke-width: 3; opacity: .45; }
.overlay g:first-of-type polyline.held { stroke-width: 5; opacity: .45; }
.differences td { overflow-wrap: normal; }
.differences td:nth-child(1) { white-space: nowrap; }
.key.run::before { border-top: 3px solid var(--run); }
"""


def draw_overlay(
    title: str, runs: Sequence[tuple[str, Points, Points]], *, from_zero: bool = False, is_noisy: bool = True
) -> str:
    """One metric of all runs as HTML; `runs`: (name, training curve, held-out curve). Empty where there is nothing finite."""
    train = [point for _, points, _ in runs for point in points]
    held_out = [point for _, _, points in runs for point in points]
    if all(value is None for _, value in train + held_out):
        return ""
    axes = axes_of(Plot(title, train, held_out, from_zero=from_zero, is_noisy=is_noisy))
    groups, keys = "", ""
    for number, (name, points, held) in enumerate(runs):
        color = f'style="--run:{COLORS[number % len(COLORS)]}"'
        smoothed = smooth(points) if is_noisy and len(points) >= SMOOTH_FROM else []
        drawn = line(points, axes, "train raw" if smoothed else "train") + line(smoothed, axes, "train")
        drawn += dots(points, axes, "train", name) if len(points) == 1 else ""
        drawn += line(held, axes, "held") + dots(held, axes, "held", f"{name}, held out")
        groups += f'<g {color} data-name="{html.escape(name, quote=True)}">{drawn}</g>'
        keys += legend_entry("run", name, color) if drawn else ""
    scale = f'data-steps="{axes.steps[0]} {axes.steps[1]}" data-values="{axes.values[0]} {axes.values[1]}"'
    return f"""<figure class="plot overlay" {scale}>
<figcaption><h4>{html.escape(title)}</h4>{keys}<output></output></figcaption>
<div class="frame"><div class="area">{svg(grid(axes) + groups, f"{title} of {len(runs)} runs")}</div>
{value_labels(axes)}{step_labels(axes)}</div></figure>
"""
