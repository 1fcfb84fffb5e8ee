"""Steps and runs that go wrong: not finite, a loss far above those before, no gradient, worse than it began.

A step that is not finite was withheld from the weights already, on the device; here it is reported with its rows, like a loss
spike. Of a whole run there is one warning of each kind, in the log and in summary.json; `--divergence stop` ends it there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.data.sources.find_files import with_given_paths
from toolkit.metrics.direction import greater_is_better
from toolkit.system.json_lines import append_line

if TYPE_CHECKING:
    from toolkit.data.loading.batch import Batch
    from toolkit.data.loading.loaders import StreamLoader, TrainLoader
    from toolkit.tracking.step_metrics import StepMetrics

IN_A_ROW = 10  # steps that a loss is far above the first ones before there is a warning
WITHOUT_GRADIENT = 5  # steps in a row
NOISE = 0.2  # share of a metric's first value by which the last one may be worse: losses of short runs vary by less
RECENT = 20  # the last steps, most of which must not have been skipped
FEWEST_STEPS = 8  # of a run that is warned of because most of its steps were skipped
SAME_WEIGHTS = 1e-5  # of the mean size of the weights: ranks on devices of several kinds may round otherwise
RANKS_APART = (
    "the weights of the processes are no longer the same, so what is trained depends on their number: something that changes "
    "gradients or weights draws its random numbers, or reads its examples, on each process alone. Draw them behind "
    "tk.seed_micro_batch(config.seed + run.step), which is the same everywhere"
)
MOST_ROLLBACKS = 3  # to one checkpoint
# Of steps, which a run that is resumed from before them takes again.
INCIDENTS = ("incidents/nonfinite.jsonl", "incidents/loss_spikes.jsonl", "incidents/rollbacks.jsonl")
SPIKE_STEPS, SPIKE_SPREADS = 50, 8.0  # a spike is above the median of the last 50 steps by 8 of their usual distances from it

LOWER = "Try a lower --learning-rate,"


class Unstable(Exception):
    """Too many steps in a row were not finite; the parameters are those of the last good one."""

    exit_code = 1


class Diverged(Exception):
    """Training has gone wrong, and `divergence` is stop, or the loss had risen before it was no longer finite."""

    exit_code = 1


@dataclass
class Divergence:
    """What is remembered of the steps so far; numbers that JSON holds, because they are in every checkpoint."""

    first_losses: list[float] = field(default_factory=list)  # of the first three steps
    steps: int = 0
    applied: int = 0
    without_gradient: int = 0
    without_spread: int = 0  # of the first steps
    high: int = 0
    last_loss: float = 0.0  # the last that was finite
    recent: list[bool] = field(default_factory=list)  # whether each of the last steps changed the weights
    found: list[str] = field(default_factory=list)  # the names of the warnings so far

    def after_step(self, loss: float, grad_norm: float, applied: bool, without_spread: bool = False) -> list[str]:
        """Take the next step's numbers; returns warnings, each of them once in a run.

        `without_spread`: the rewards of each of its groups of completions were equal.
        """
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
        # Later on it may be that all is learned.
        self.without_spread = self.without_spread + 1 if without_spread and self.without_spread == self.steps - 1 else 0
        if self.without_spread == WITHOUT_GRADIENT and grad_norm == 0.0:
            warnings += self._once(
                "no spread", f"in the first {WITHOUT_GRADIENT} steps no completion had another reward than the others of its "
                "group: nothing is learned. The prompts are too hard or too easy for the model, or the reward does not "
                "read what it writes. toolkit rollouts OUTPUT_DIR --step 1 shows completions and rewards",
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
        found = f"{skipped} of the last {len(self.recent)} steps were skipped, for numbers that are not finite"
        return self._once("recent skipped steps", f"{found}. {LOWER} or --bf16 in place of --fp16")

    def before_nonfinite(self) -> str | None:
        """A warning where the loss had diverged before steps that are not finite; None where it was not far above the first."""
        if not self.high:
            return None
        return (
            f"the loss diverged: {self.first_losses[0]:.4g} at the first step, {self.last_loss:.4g} before it was no longer "
            "finite. Lower --learning-rate, or take more --warmup-steps"
        )

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
            given: whether more of that metric is better, where it is set.
        """
        if len(values) < 2 or math.isnan(values[0]):
            return []
        sign, first, last = 1 if greater_is_better(name, given) else -1, values[0], values[-1]
        if math.isfinite(last) and sign * last >= sign * first - NOISE * abs(first):
            return []
        return self._once(
            "worse metric", f"{name} is worse at the end than at the first evaluation: {last:.6g}, and {first:.6g} then. Try "
            "a lower --learning-rate or fewer steps; --load-best-model-at-end keeps the best weights",
        )  # fmt: skip

    def _once(self, name: str, warning: str) -> list[str]:
        if name in self.found:
            return []
        self.found.append(name)
        return [warning]


def too_many_nonfinite(in_row: int, step: int, diverged: str | None) -> Exception:
    """The exception that ends a run after N steps in a row that are not finite.

    `diverged`: the warning of `Divergence.before_nonfinite`, where the loss had risen before them.
    """
    if diverged:
        return Diverged(
            f"stopped after step {step}, with {in_row} step(s) in a row that were not finite: {diverged}. "
            "The parameters are untouched by these steps, and not by those before them: take an earlier checkpoint."
        )
    return Unstable(
        f"{in_row} step(s) in a row with a non-finite loss or gradient, the last one step {step}. The "
        "parameters are untouched by them. Look at the rows written, lower --learning-rate, or prefer --bf16 to --fp16."
    )


def report_nonfinite(
    output_dir: Path, step: int, batch: Batch | StepMetrics, train: TrainLoader | StreamLoader, loss: float, norm: float,
    say: Callable[[str], None] = print,
) -> None:  # fmt: skip
    """Report a skipped step, and write its rows to incidents/nonfinite.jsonl under `output_dir`."""
    file = output_dir / "incidents" / "nonfinite.jsonl"
    record = {"step": step, "position": batch.position, "loss": str(loss), "grad_norm": str(norm)}
    _write_incident(file, record, batch.examples, train, say)
    shown = ", ".join(map(str, batch.examples[:8])) + (", ..." if len(batch.examples) > 8 else "")
    say(f"WARNING: step {step} skipped: loss {loss}, gradient norm {norm}. Examples {shown}: their rows are in {file}")


def spike_above(loss: float, before: Sequence[float]) -> float | None:
    """The median of the losses before, where `loss` is a spike above it: a bad batch, or a learning rate that is too high."""
    if len(before) < SPIKE_STEPS // 2:
        return None
    median = statistics.median(before)
    usual = statistics.median(abs(each - median) for each in before)  # the median absolute deviation
    return median if loss > median + SPIKE_SPREADS * max(usual, 0.02 * abs(median)) else None


def report_incident(
    output_dir: Path, step: StepMetrics, spike_above: float | None, train: TrainLoader | StreamLoader,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Report a step that was not finite, or whose loss is a spike, with its rows; nothing for any other.

    `spike_above`: the median loss before it, where it is a spike. Its rows are written to incidents/loss_spikes.jsonl.
    """
    loss, file = step.values["loss"], output_dir / "incidents" / "loss_spikes.jsonl"
    if step.values.get("nonfinite"):
        report_nonfinite(output_dir, step.step, step, train, loss, step.values["grad_norm"], say)
    elif spike_above is not None:
        record = {"step": step.step, "position": step.position, "loss": loss, "median": spike_above}
        _write_incident(file, record, step.examples, train, say)
        say(f"WARNING: step {step.step}: loss {loss:.4g}, the median before it {spike_above:.4g}. Its rows are in {file}")


def report_rollback(output_dir: Path, record: dict[str, Any], say: Callable[[str], None]) -> None:
    """Report that the weights of an earlier step were put back (`RunState.go_back`), in incidents/rollbacks.jsonl too."""
    step, back, first, end = (record[name] for name in ("step", "weights_of_step", "first_example", "end_example"))
    say(
        f"WARNING: step {step}: back to the weights of step {back}. The {step - back} steps since count as not applied, and "
        f"their rows, examples {first} to {end - 1} of the order, are passed over"
    )
    file = output_dir / "incidents" / "rollbacks.jsonl"
    try:
        append_line(file, record)
    except OSError as error:
        say(f"WARNING: {file}: {error}")


def _write_incident(
    path: Path, record: dict[str, Any], examples: Sequence[int], train: TrainLoader | StreamLoader, say: Callable[[str], None]
) -> None:
    """Write a record with its rows; where that fails, there is a warning with the rows' origins, and the run continues."""
    rows = [describe_row(train, example) for example in examples]
    try:
        append_line(path, {**record, "rows": rows})
    except OSError as error:
        origins = [origin for row in rows for origin in row.get("origin", [])]
        say(f"WARNING: {path}: {error}. The rows of step {record['step']}: {', '.join(origins) or 'of unknown origin'}")


def describe_row(train: TrainLoader | StreamLoader, example: int) -> dict[str, Any]:
    """An example as it can be looked up again: its index, where its documents come from, and their tokens."""
    if not hasattr(train, "rows"):  # a stream is not read again
        return {"example": example}
    documents = train.rows.documents([example])
    tokens = [document["input_ids"].tolist() for document in documents]
    origins = [with_given_paths(origin) for origin in train.rows.origins(example)]
    return {"example": example, "origin": origins, "input_ids": tokens}
