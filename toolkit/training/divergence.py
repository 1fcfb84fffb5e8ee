"""Runs that go wrong without an error: no gradient is left, the loss is far above the first, it ends worse than it began.

A warning for each, once, in the log and in summary.json; with `--divergence stop` the run ends there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from toolkit.metrics.direction import greater_is_better

IN_A_ROW = 10  # steps that a loss is far above the first ones before it is said
WITHOUT_GRADIENT = 5  # steps in a row
NOISE = 0.2  # share of a metric's first value by which the last one may be worse: losses of short runs vary by less
RECENT = 20  # the last steps, most of which must not have been skipped
FEWEST_STEPS = 8  # of a run of which "most steps were skipped" is said

LOWER = "Try a lower --learning-rate,"


class Diverged(Exception):
    """Training has gone wrong, and `divergence` says stop."""

    exit_code = 1


@dataclass
class Divergence:
    """What is remembered of the steps so far; plain numbers, so that a checkpoint holds them."""

    first_losses: list[float] = field(default_factory=list)  # of the first three steps
    steps: int = 0
    applied: int = 0
    without_gradient: int = 0
    high: int = 0
    last_loss: float = 0.0  # the last that was finite
    recent: list[bool] = field(default_factory=list)  # whether each of the last steps changed the weights
    found: list[str] = field(default_factory=list)  # the names of those that were warned of

    def after_step(self, loss: float, grad_norm: float, applied: bool) -> list[str]:
        """Take the next step's numbers; returns warnings, each of them once in a run."""
        self.steps, self.applied = self.steps + 1, self.applied + applied
        self.recent = [*self.recent, applied][-RECENT:]
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self._of_recent()
        self.last_loss = loss
        if len(self.first_losses) < 3:
            self.first_losses.append(loss)
        first, warnings = self.first_losses[0], self._of_recent()
        # Of one example a loss is a matter of luck: the highest of three, unless it has gone up at once.
        usual = min(max(self.first_losses), first + 2 * abs(first) + 1)
        self.high = self.high + 1 if loss > usual + 0.5 * abs(usual) + 0.1 else 0
        # A loss that has come to zero has no gradient either, and nothing is wrong with it.
        self.without_gradient = self.without_gradient + 1 if grad_norm == 0.0 and abs(loss) > 1e-6 else 0
        if self.without_gradient == WITHOUT_GRADIENT:
            warnings += self._once(
                "dead gradient", f"the gradient was exactly 0 in {WITHOUT_GRADIENT} steps in a row (loss {loss:.4g}): nothing "
                "is learned any more. Try a lower --learning-rate",
            )  # fmt: skip
        if self.high == IN_A_ROW:
            warnings += self._once(
                "high loss", f"the loss was far above the first one in {IN_A_ROW} steps in a row: {loss:.4g}, and {first:.4g} "
                "at the first step. Try a lower --learning-rate or more --warmup-steps",
            )  # fmt: skip
        return warnings

    def _of_recent(self) -> list[str]:
        """A warning as soon as most of the last steps were skipped."""
        skipped = len(self.recent) - sum(self.recent)
        if 2 * skipped <= RECENT:
            return []
        said = f"{skipped} of the last {len(self.recent)} steps were skipped, for numbers that are not finite"
        return self._once("recent skipped steps", f"{said}. {LOWER} or --bf16 in place of --fp16")

    def before_nonfinite(self) -> str | None:
        """Of steps that are not finite: that the loss had diverged before them; None where it was not far above the first."""
        if not self.high:
            return None
        first = self.first_losses[0]
        return f"the loss diverged: {first:.4g} at the first step, {self.last_loss:.4g} before it was no longer finite"

    def after_last_step(self) -> list[str]:
        """A warning where fewer than half of all steps changed the weights."""
        if self.steps < FEWEST_STEPS or 2 * self.applied >= self.steps:
            return []
        skipped = f"{self.steps - self.applied} of {self.steps} steps were skipped, for numbers that are not finite"
        return self._once("skipped steps", f"{skipped}. {LOWER} or --bf16 in place of --fp16")

    def of_metric(self, name: str, values: Sequence[float], given: bool | None = None) -> list[str]:
        """A warning where the last value of the deciding metric is worse than the first one, by more than noise.

        Args:
            values: of all evaluations, in order; the last is the final model's.
            given: whether more of that metric is better, where the settings say so.
        """
        if len(values) < 2:
            return []
        sign, first, last = 1 if greater_is_better(name, given) else -1, values[0], values[-1]
        if math.isfinite(last) and sign * last >= sign * first - NOISE * abs(first):
            return []
        return self._once(
            "worse metric", f"{name} is worse at the end than at the first evaluation: {last:.6g}, and {first:.6g} then. Try "
            "a lower --learning-rate or fewer steps; --load-best-model-at-end keeps the best weights",
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def _once(self, name: str, warning: str) -> list[str]:
        if name in self.found:
            return []
        self.found.append(name)
        return [warning]


def restored(state: Mapping[str, Any] | None) -> Divergence:
    """From what `Divergence.state` returned; new for a checkpoint that is older than it."""
    return Divergence(**state) if state else Divergence()


def warn(run: Any, warnings: list[str]) -> None:
    """Say them, keep them for the summary, and end the run for them where `divergence` is stop and it still trains.

    Raises:
        Diverged: on every rank alike, as the numbers of a step are the same on all.
    """
    stops = run.config.divergence == "stop" and not run.stop.closed
    for warning in warnings:
        run.say(f"WARNING: {warning}")
        run.warnings.append(warning)
    if warnings and stops:
        raise Diverged(f"stopped after step {run.step}, as --divergence stop says: {warnings[0]}")


def check_end(run: Any) -> None:
    """Warn of the run as a whole: most steps skipped, or the metric it is judged by worse than at the first evaluation."""
    config, name = run.config, run.config.metric_for_best_model
    values = run.history(name)
    name = name if name.startswith("eval_") else f"eval_{name}"
    if run.figures_of is not None and values:  # the best weights were loaded
        values = [*values[:-1], run.summary.figures.get(name, values[-1])]
    warn(run, [*run.divergence.after_last_step(), *run.divergence.of_metric(name, values, config.greater_is_better)])
