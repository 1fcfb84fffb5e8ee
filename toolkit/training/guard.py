"""Steps that went wrong: not finite, or a loss far above those before. Named, counted, their rows written down."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.config import OptimConfig
from toolkit.data.loading.batch import Batch
from toolkit.data.sources.given_paths import with_given_paths
from toolkit.system.json_lines import append_line
from toolkit.tracking.step_metrics import StepFigures
from toolkit.training.divergence import Diverged


class Unstable(Exception):
    """Too many steps in a row were not finite; the parameters are those of the last good one."""

    exit_code = 1


class NonfiniteGuard:
    """Counts the skipped steps in a row. The update was already withheld, on the device; here it is said and written."""

    def __init__(self, config: OptimConfig, directory: Path) -> None:
        self.limit = 1 if config.nonfinite == "stop" else config.max_nonfinite_steps
        self.directory, self.in_row = directory, 0

    def check(self, step: StepFigures, train: Any, run: Any) -> None:
        """Report one step that was read; raises `Unstable` at the limit, or `Diverged` where the loss had risen before."""
        if not step.values.get("nonfinite"):
            self.in_row = 0
            return
        self.in_row += 1
        loss, norm = step.values["loss"], step.values["grad_norm"]
        if run.accelerator.is_main_process:
            report_nonfinite(self.directory.parent, step.step, step.batch, train, loss, norm, run.say)
        if self.in_row >= self.limit:
            if diverged := run.divergence.before_nonfinite():
                warning = f"{diverged}. Lower --learning-rate, or take more --warmup-steps"
                run.say(f"WARNING: {warning}")
                run.warnings.append(warning)
                raise Diverged(
                    f"stopped after step {step.step}, with {self.in_row} step(s) in a row that were not finite: {warning}. "
                    "The parameters are untouched by these steps, and not by those before them: take an earlier checkpoint."
                )
            raise Unstable(
                f"{self.in_row} step(s) in a row with a non-finite loss or gradient, the last one step {step.step}. The "
                "parameters are untouched by them. Look at the rows written, lower --learning-rate, or prefer --bf16 to --fp16."
            )


def report_nonfinite(
    output_dir: Path, step: int, batch: Batch, train: Any, loss: float, norm: float, say: Callable[[str], None] = print
) -> None:
    """Say that a step was skipped, and write its rows to incidents/nonfinite.jsonl under `output_dir`."""
    file = output_dir / "incidents" / "nonfinite.jsonl"
    record = {"step": step, "position": batch.position, "loss": str(loss), "grad_norm": str(norm)}
    _write_down(file, {**record, "rows": [describe_row(train, example) for example in batch.examples]}, say)
    shown = ", ".join(map(str, batch.examples[:8])) + (", ..." if len(batch.examples) > 8 else "")
    say(f"WARNING: step {step} skipped: loss {loss}, gradient norm {norm}. Examples {shown}: their rows are in {file}")


class LossSpikes:
    """Losses far above those before: a bad batch, or a learning rate that is too high. They are reported, nothing else."""

    SEEN, SPREADS = 50, 8.0  # compared with the last 50 steps; above their median by 8 of their usual distances from it

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.losses: list[float] = []

    def check(self, step: StepFigures, run: Any) -> bool:
        """Whether this step's loss is a spike; if so it was said and written down."""
        loss, before = step.values["loss"], self.losses[-self.SEEN :]
        if step.values.get("nonfinite"):
            return False
        self.losses = [*before, loss][-self.SEEN :]
        if len(before) < self.SEEN // 2:
            return False
        median = statistics.median(before)
        usual = statistics.median(abs(each - median) for each in before)  # the median absolute deviation
        if loss <= median + self.SPREADS * max(usual, 0.02 * abs(median)):
            return False
        if run.accelerator.is_main_process:
            record = {"step": step.step, "position": step.batch.position, "loss": loss, "median": median}
            rows = [describe_row(run.train, example) for example in step.batch.examples]
            _write_down(self.directory / "loss_spikes.jsonl", {**record, "rows": rows}, run.say)
        run.say(
            f"WARNING: step {step.step}: loss {loss:.4g}, where the last {len(before)} steps had {median:.4g}. "
            f"Its rows are in {self.directory / 'loss_spikes.jsonl'}"
        )
        return True


def _write_down(path: Path, record: dict[str, Any], say: Callable[[str], None]) -> None:
    """Keep a record of an incident; where it can't be written, it is said with its rows, and the run goes on."""
    try:
        append_line(path, record)
    except OSError as error:
        origins = [origin for row in record["rows"] for origin in row.get("origin", [])]
        say(f"WARNING: {path}: {error}. The rows of step {record['step']}: {', '.join(origins) or 'of unknown origin'}")


def describe_row(train: Any, example: int) -> dict[str, Any]:
    """An example as it can be looked up again: its index, where its documents come from, and their tokens."""
    if not hasattr(train, "rows"):
        return {"example": example}
    documents = train.rows.documents([example])
    tokens = [document["input_ids"].tolist() for document in documents]
    origins = [with_given_paths(origin) for origin in train.rows.origins(example)]
    return {"example": example, "origin": origins, "input_ids": tokens}
