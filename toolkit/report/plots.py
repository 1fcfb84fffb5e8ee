"""One plot of the report: an inline SVG that stretches with the page, and HTML labels around it that do not.

A wide SVG scaled down to a phone would shrink its text beyond reading. So the SVG holds only lines (their strokes keep their
width, and a dot is a line of no length with round ends), and every label is HTML, placed by percentage.
"""

import heapq
import html
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from toolkit.report.numbers import log_ticks, round_ticks
from toolkit.report.reading import Points
from toolkit.system.numbers import show_digits

WIDTH, HEIGHT = 1000, 1000  # of the SVG's own coordinates; the page decides the shape
MOST_POINTS = 2000
MOST_SMOOTHED = 500  # points of a smoothed curve
LONG = 20_000  # points, from which on importing numpy takes less time than sorting without it
SMOOTH_FROM = 30  # points; a shorter curve is drawn as it is


@dataclass(frozen=True)
class Plot:
    """What a plot shows. Any of the two series may be empty."""

    title: str
    train: Points = field(default_factory=list)
    held_out: Points = field(default_factory=list)
    marks: dict[str, float] = field(default_factory=dict)  # horizontal lines by name: baselines to beat
    from_zero: bool = False
    is_noisy: bool = True  # a noisy curve of many points is drawn faint, under a smoothed one
    logarithmic: bool = False  # where the values differ by more than a factor of ten
    note: str = ""


@dataclass(frozen=True)
class Axes:
    """From steps and values to the SVG's coordinates."""

    steps: tuple[float, float]
    values: tuple[float, float]
    logarithmic: bool

    def x(self, step: float) -> float:
        return WIDTH * _share(step, *self.steps)

    def y(self, value: float) -> float:
        scale = _log10 if self.logarithmic else float
        return HEIGHT * (1 - _share(scale(value), scale(self.values[0]), scale(self.values[1])))


def draw_plot(plot: Plot) -> str:
    """The plot as HTML; the empty text when there is no finite value to draw."""
    finite = [value for _, value in plot.train + plot.held_out if value is not None]
    if not finite:
        return ""
    axes = axes_of(plot)
    smoothed = smooth(plot.train) if plot.is_noisy and len(plot.train) >= SMOOTH_FROM else []
    shapes = [grid(axes), _marks(plot, axes)]
    shapes.append(line(plot.train, axes, "train raw" if smoothed else "train"))
    shapes.append(line(smoothed, axes, "train"))
    if len(plot.train) < SMOOTH_FROM:
        shapes.append(dots(plot.train, axes, "train", "training"))
    shapes.append(line(plot.held_out, axes, "held"))
    shapes.append(dots(plot.held_out, axes, "held", "held out"))
    scale = f'data-steps="{axes.steps[0]} {axes.steps[1]}" data-values="{axes.values[0]} {axes.values[1]}"'
    scale += " data-log" if axes.logarithmic else ""
    return f"""<figure class="plot" {scale}>
<figcaption><h4>{html.escape(plot.title)}</h4>{_legend(plot, bool(smoothed))}<output></output></figcaption>
<div class="frame">
<div class="area">{svg("".join(shapes), _spoken(plot))}{_mark_labels(plot, axes)}{_end_label(plot, axes)}</div>
{value_labels(axes)}{step_labels(axes)}
</div>{_notes(plot, axes)}</figure>
"""


def smooth(points: Points) -> Points:
    """The mean of the middle half of a window around each point: it lags behind nothing, and one spike does not bend it.

    The window holds about a twentieth of the points. Where a run begins it stays symmetrical, since a loss is steep there;
    where it ends, a last value is no better known than the others, and half a window remains. Of a long curve every n-th
    point is drawn, since two neighbors share most of their windows.
    """
    finite = [(step, value) for step, value in points if value is not None]
    values: Any = [value for _, value in finite]
    in_order: Callable[[Any], Any] = sorted
    total: Callable[[Any], float] = sum
    if len(values) > LONG:
        import numpy

        values, in_order, total = numpy.array(values), numpy.sort, numpy.sum
    reach, stride = max(2, len(finite) // 40), max(1, math.ceil(len(finite) / MOST_SMOOTHED))
    smoothed: Points = []
    for index in [*range(0, len(finite) - 1, stride), *range(len(finite))[-1:]]:
        side = min(reach, index)
        window = in_order(values[index - side : index + side + 1])
        quarter = len(window) // 4
        middle = window[quarter : len(window) - quarter]
        smoothed.append((finite[index][0], total(middle) / len(middle)))
    return smoothed


def thin(points: Points) -> Points:
    """Of a long curve the least and the greatest value of each stretch, so that no peak is lost."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(len(points) / (MOST_POINTS // 2))
    kept: Points = []
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        finite = [(value, index) for index in stretch if (value := points[index][1]) is not None]
        gap = len(finite) < len(stretch)
        indices = {min(finite)[1], max(finite)[1]} if finite else set()
        kept += [points[index] for index in sorted(indices)] + ([(points[stretch[-1]][0], None)] if gap else [])
    return kept


def svg(drawn: str, spoken: str) -> str:
    """Shapes as a picture that stretches; `spoken` is the text for a screen reader."""
    view = f'viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none"'
    return f'<svg {view} role="img" aria-label="{html.escape(spoken, quote=True)}">\n{drawn}</svg>'


def _log10(value: float) -> float:
    return math.log10(value) if value > 0 else -300.0


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low)


def axes_of(plot: Plot) -> Axes:
    """A frame around what a plot shows, without spikes and without what is far from everything else."""
    steps = [step for step, _ in plot.train + plot.held_out]
    values = [value for _, value in plot.train if value is not None]
    held_out = [value for _, value in plot.held_out if value is not None]
    if len(values) >= SMOOTH_FROM and not plot.logarithmic:
        # One spike would press the rest flat: it is cut off at the frame, with a note below it.
        least, highest = min(values), heapq.nlargest(len(values) - math.ceil(0.98 * len(values)) + 1, values)
        usual = highest[-1]
        if highest[0] - least > 3 * (usual - least) > 0:
            values = [value for value in values if value <= usual + 0.5 * (usual - least)]
    if plot.marks and len(held_out) > 2:
        # The untrained model is far from what there is to beat; a frame that holds both would show neither.
        low, high = min(held_out[1:]), max(held_out[1:])
        near = _near(plot.marks.values(), low, high)
        low, high = min([low, *near]), max([high, *near])
        if not low - (high - low) <= held_out[0] <= high + (high - low):
            held_out = held_out[1:]
    values += held_out
    low, high = min(values), max(values)
    logarithmic = plot.logarithmic and low > 0 and high / low > 10
    near = _near(plot.marks.values(), low, high)
    low, high = min([low, *near]), max([high, *near])
    if logarithmic:
        room = (high / low) ** 0.06 if high > low else 1.2
        low, high = low / room, high * room
    else:
        room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
        low, high = (0.0 if plot.from_zero and low >= 0 else low - room), high + room
    first, last = min(steps), max(steps)
    return Axes((first, last) if last > first else (first - 1, first + 1), (low, high), logarithmic)


def _near(marks: Iterable[float], low: float, high: float) -> list[float]:
    """Those within or not far outside a range, as seen from the range."""
    reach = max(high - low, 0.25 * abs(high))
    return [mark for mark in marks if low - reach <= mark <= high + reach]


def _place(step: float, value: float, axes: Axes) -> str:
    return f"{axes.x(step):.2f},{axes.y(value):.2f}"


def line(points: Points, axes: Axes, kind: str) -> str:
    """A polyline; it breaks where a value was not finite."""
    pieces: list[list[str]] = [[]]
    for step, value in thin(points):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(_place(step, value, axes))
    return "".join(f'<polyline class="{kind}" points="{" ".join(piece)}"/>' for piece in pieces if piece)


def dots(points: Points, axes: Axes, kind: str, name: str) -> str:
    """A dot at each finite value, which shows its step and value under the pointer."""
    return "".join(
        f'<path class="dot {kind}" d="M{_place(step, value, axes)}h.01"><title>step {show_digits(step)}: '
        f"{show_digits(value)} ({html.escape(name)})</title></path>"
        for step, value in thin(points)
        if value is not None
    )


def grid(axes: Axes) -> str:
    """A horizontal line at each tick."""
    lines = (f"M0,{axes.y(tick):.2f}H{WIDTH}" for tick in _value_ticks(axes))
    return f'<path class="grid" d="{"".join(lines)}"/>'


def _value_ticks(axes: Axes) -> list[float]:
    return log_ticks(*axes.values) if axes.logarithmic else round_ticks(*axes.values)


def value_labels(axes: Axes) -> str:
    """The ticks' numbers to the left of the frame."""
    ticks = _value_ticks(axes)
    places = (f"top:{axes.y(tick) / HEIGHT:.2%}" for tick in ticks)
    return f'<div class="values">{_labels(places, ticks)}</div>'


def step_labels(axes: Axes) -> str:
    """The steps below the frame."""
    low, high = axes.steps
    ticks = [tick for tick in round_ticks(low, high, 5) if tick == int(tick)]
    places = (f"left:{axes.x(tick) / WIDTH:.2%}" + (";translate:-50%" if axes.x(tick) > 0.97 * WIDTH else "") for tick in ticks)
    return f'<div class="steps">{_labels(places, ticks)}</div>'


def _labels(places: Iterable[str], ticks: list[float]) -> str:
    return "".join(f'<span style="{place}">{text}</span>' for place, text in zip(places, _tick_texts(ticks), strict=True))


def _tick_texts(ticks: list[float]) -> list[str]:
    """All ticks of an axis with the same number of decimals."""
    size = max((abs(tick) for tick in ticks), default=0.0)
    if size >= 1e5 and all(tick == int(tick) for tick in ticks):
        unit, word = (1e6, "M") if size >= 1e6 else (1e3, "k")
        return [f"{tick / unit:g}{word}" if tick else "0" for tick in ticks]
    if 0 < size < 1e-3:
        return [f"{tick:.3g}".replace("e-0", "e-") if tick else "0" for tick in ticks]
    decimals = max((len(f"{tick:.6f}".rstrip("0").partition(".")[2]) for tick in ticks), default=0)
    return [f"{tick:,.{decimals}f}" for tick in ticks]


def _marks(plot: Plot, axes: Axes) -> str:
    """Dashed lines at the baselines to beat."""
    return "".join(
        f'<path class="mark" d="M0,{axes.y(value):.2f}H{WIDTH}"><title>{html.escape(name)}: {show_digits(value)}</title></path>'
        for name, value in _visible_marks(plot, axes)
    )


def _visible_marks(plot: Plot, axes: Axes) -> list[tuple[str, float]]:
    low, high = axes.values
    return sorted(((name, value) for name, value in plot.marks.items() if low <= value <= high), key=lambda mark: mark[1])


def _mark_labels(plot: Plot, axes: Axes) -> str:
    """Their names at the left end, those of lines too close for both next to each other; of more than three not all."""
    labels, lowest = "", [math.inf] * 3  # the height of the last label in each column
    for name, value in _visible_marks(plot, axes):
        y = axes.y(value) / HEIGHT
        column = next((column for column, last in enumerate(lowest) if last - y > 0.08), None)
        if column is not None:
            aside = f";margin-left:{30 * column}%" if column else ""
            labels += f'<span class="mark" style="top:{y:.2%}{aside}">{html.escape(name)} {show_digits(value)}</span>'
            lowest[column] = y
    return labels


def _end_label(plot: Plot, axes: Axes) -> str:
    """The held-out curve's final value, next to its end, and on the other side of it than the training curve's."""
    finite = [(step, value) for step, value in plot.held_out if value is not None]
    if not finite:
        return ""
    step, value = finite[-1]
    x, y = axes.x(step) / WIDTH, axes.y(value) / HEIGHT
    trained = [axes.y(value) / HEIGHT for _, value in plot.train[-1:] if value is not None]
    is_free = not trained or trained[0] > y
    side = "below" if y < 0.2 or (not is_free and y < 0.85) else "above"
    return f'<span class="end {side}" style="left:{x:.2%};top:{y:.2%}">{show_digits(value)}</span>'


def _legend(plot: Plot, is_smoothed: bool) -> str:
    entries = []
    if plot.train and (plot.held_out or is_smoothed):
        entries.append(("train", "training, smoothed" if is_smoothed else "training"))
    if plot.held_out:
        entries.append(("held", "held out"))
    return "".join(legend_entry(kind, text) for kind, text in entries)


def legend_entry(kind: str, text: str, attributes: str = "") -> str:
    """A curve's name with its sign; `attributes` of the element are HTML."""
    return f'<span class="key {kind}"{" " * bool(attributes)}{attributes}>{html.escape(text)}</span>'


def _notes(plot: Plot, axes: Axes) -> str:
    notes = [plot.note] if plot.note else []
    everything = plot.train + plot.held_out
    low, high = axes.values
    outside = [(value, step) for step, value in everything if value is not None and not low <= value <= high]
    if outside:
        value, step = max(outside)
        of_them = f", the highest {show_digits(value)}" if len(outside) > 1 else f": {show_digits(value)}"
        notes.append(f"{len(outside)} of {len(everything)} values lie outside the frame{of_them} at step {show_digits(step)}.")
    gaps = [step for step, value in everything if value is None]
    if gaps:
        some = ", ".join(map(show_digits, gaps[:5])) + (" …" if len(gaps) > 5 else "")
        notes.append(f"Not finite at step {some}.")
    if len(plot.train) > MOST_POINTS:
        notes.append(f"Drawn from {len(plot.train):,} values: the least and the greatest of each stretch.")
    if axes.logarithmic:
        notes.append("Logarithmic scale.")
    return f'<p class="note">{html.escape(" ".join(notes))}</p>' if notes else ""


def _spoken(plot: Plot) -> str:
    """The text for a screen reader in place of the picture."""
    said = [plot.title]
    for name, points in (("training", plot.train), ("held out", plot.held_out)):
        finite = [value for _, value in points if value is not None]
        if finite:
            said.append(f"{name} from {show_digits(finite[0])} to {show_digits(finite[-1])}")
    return ", ".join(said)
