"""A learning-rate range test: a recipe trains while its rates rise a millionfold, and its loss shows where it learns and fails.

Smith 2017, arXiv:1506.01186, section 3.3, with rates that rise by a constant factor. The groups of an optimizer keep the
ratio of their rates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config import Refusal, Settings
from toolkit.config.conditions import trains_a_teacher
from toolkit.config.reading import values_of
from toolkit.diagnostics.replacements import Replacements
from toolkit.diagnostics.short_runs import ended_by_signals, forget_accelerator, never_evaluated
from toolkit.diagnostics.small import QUIET
from toolkit.system.files import temporary_folder
from toolkit.training.anomalies import Diverged, Unstable

LOWEST, HIGHEST = 1e-6, 1.0
SMOOTHING = 0.9  # weight of the losses before, in a mean that is corrected for its beginning
FAILED = 3.0  # times the lowest smoothed loss; what comes behind it is left out
ONE_TENTH = 0.1  # of the rate at which the loss is lowest, as is usual: there it has begun to fail


@dataclass(frozen=True)
class Curve:
    """Rates and losses of each step, and `smoothed` losses."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float]


class NoRate(Refusal):
    """A curve that suggests no rate."""

    def __init__(self, message: str, curve: Curve) -> None:
        super().__init__(message)
        self.curve = curve


@dataclass(frozen=True)
class RangeTest(Curve):
    """The rate to try as well, and where the loss was lowest and fell fastest."""

    suggested: float
    lowest: float
    steepest: float

    @property
    def fall(self) -> float:
        """By which share the smoothed loss fell."""
        return 1 - min(self.smoothed) / max(self.smoothed[: self.smoothed.index(min(self.smoothed)) + 1])


def find_learning_rate(
    main: Callable[[Any], Any], config: Settings, steps: int = 100, add_steps: Callable[[int], object] = lambda count: None
) -> RangeTest:
    """Train a recipe in a temporary directory with rates from LOWEST to HIGHEST, and see what its loss does.

    `add_steps`: is called with how many more steps begin.

    Raises:
        Refusal: the recipe refuses its settings or data, samples, trains a teacher first, or its loss never falls.
    """
    values = values_of(config)
    if "num_generations" in values:
        raise Refusal("no range test of a recipe that samples: its loss doesn't say how much it learns.")
    if trains_a_teacher(values):
        raise Refusal("--teacher: name one. Without it the recipe trains a teacher first.")
    highest = values["learning_rate"]
    printed, problem = io.StringIO(), None
    forget_accelerator()

    def ramped(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        optimizer, _ = original(*given, **named)
        shares = [group["lr"] / highest for group in optimizer.param_groups]

        def schedule(progress: float, objective: object = None) -> list[float]:
            add_steps(1)
            return [rate_at(progress) * share for share in shares]

        return optimizer, schedule

    with (
        ended_by_signals(), never_evaluated(), temporary_folder("learning-rate") as folder,
        Replacements() as replace,
    ):  # fmt: skip
        replace.public("build_optimizer", ramped)
        wanted = {**QUIET, "output_dir": f"{folder}/run", "max_steps": steps, "nonfinite": "skip", "divergence": "warn"}
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                main(dataclasses.replace(config, **{name: value for name, value in wanted.items() if name in values}))
        except Refusal:
            raise
        except Exception as error:  # a run that diverged ends: its losses up to there are what is asked
            problem = error
        finally:
            forget_accelerator()
        found = _losses(folder / "run" / "metrics.jsonl")
    is_failed = bool(found) and not found[-1][1] <= found[0][1]  # NaN is not either
    if problem is not None and not is_failed and not isinstance(problem, Unstable | Diverged):
        raise problem
    if problem is None and len(found) < min(steps, 20):
        raise Refusal(f"the run took {len(found)} steps, and a range test needs 20.")
    return judged([rate_at((step - 1) / steps) for step, _ in found], [loss for _, loss in found])


def rate_at(progress: float) -> float:
    """The rate at a step; `progress` 0 to 1."""
    return LOWEST * (HIGHEST / LOWEST) ** progress


def judged(rates: Sequence[float], losses: Sequence[float]) -> RangeTest:
    """What losses at rising rates say.

    Raises:
        NoRate: the loss never fell, or is not finite after a few steps.
    """
    smoothed, mean = list[float](), 0.0
    for number, loss in enumerate(losses, 1):
        if not math.isfinite(loss):
            break
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        smoothed.append(mean / (1 - SMOOTHING**number))
        if number > 10 and smoothed[-1] > FAILED * min(smoothed):
            break
    count = len(smoothed)
    curve = Curve(list(rates[:count]), list(losses[:count]), smoothed)
    if count < 12:
        when = f"after {count} steps: take more --steps, or" if smoothed else "from the start:"
        raise NoRate(f"the loss is not finite {when} look for the mistake with `toolkit doctor`.", curve)
    best = min(range(count), key=smoothed.__getitem__)
    if smoothed[best] > 0.99 * max(smoothed[: best + 1]):
        advice = "take more --steps, or look for the mistake with `toolkit doctor`."
        raise NoRate(f"the loss does not fall at any rate: {advice}", curve)
    falls = [smoothed[i - 1] - smoothed[i] for i in range(1, best + 1)]
    steepest = rates[1 + max(range(len(falls)), key=falls.__getitem__)]
    return RangeTest(curve.rates, curve.losses, smoothed, _rounded(ONE_TENTH * rates[best]), rates[best], steepest)


def draw(found: Curve) -> str:
    """Losses over rates as an SVG, and the rate to try; the rate axis is logarithmic. `found` has a step at least."""
    width, height, edge = 640, 360, 50
    low, high = min(found.losses), max([found.smoothed[0], *found.smoothed[: len(found.smoothed) // 2]])
    high += 0.15 * (high - low) or 1.0  # a loss that never changes

    def place(rate: float, loss: float) -> tuple[float, float]:
        across = math.log(rate / LOWEST) / math.log(HIGHEST / LOWEST)
        up = (min(loss, high) - low) / (high - low)
        return edge + across * (width - 2 * edge), height - edge - max(up, -0.05) * (height - 2 * edge)

    def path(losses: Sequence[float]) -> str:
        places = [place(rate, loss) for rate, loss in zip(found.rates, losses, strict=True)]
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)

    ticks = "".join(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{edge}" y2="{height - edge}" stroke="#ddd"/>'
        f'<text x="{x:.1f}" y="{height - edge + 18}" text-anchor="middle">1e{power}</text>'
        for power in range(round(math.log10(LOWEST)), round(math.log10(HIGHEST)) + 1)
        for x, _ in [place(10.0**power, low)]
    )
    labels = "".join(
        f'<text x="{edge - 6}" y="{place(LOWEST, loss)[1] + 4:.1f}" text-anchor="end">{loss:.3g}</text>' for loss in (low, high)
    )
    suggestion = ""
    if isinstance(found, RangeTest):
        x, _ = place(found.suggested, low)
        suggestion = (
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{edge}" y2="{height - edge}" stroke="#d55e00" stroke-dasharray="4"/>\n'
            f'<text x="{x:.1f}" y="{edge - 8}" text-anchor="middle" fill="#d55e00">{found.suggested:g}</text>\n'
        )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">
<rect width="{width}" height="{height}" fill="#fff"/>{ticks}{labels}
<polyline points="{path(found.losses)}" fill="none" stroke="#0072b2" stroke-opacity=".3"/>
<polyline points="{path(found.smoothed)}" fill="none" stroke="#0072b2" stroke-width="2"/>
{suggestion}<text x="{width / 2}" y="{height - 8}" text-anchor="middle">learning rate</text>
<text x="{edge}" y="20">loss</text>
</svg>
"""


def _rounded(rate: float) -> float:
    return float(f"{rate:.1e}")


def _losses(path: Path) -> list[tuple[int, float]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines if line.strip()]
    return [(int(event["step"]), float(event["loss"])) for event in events if isinstance(event.get("loss"), int | float)]
