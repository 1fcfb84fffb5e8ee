"""Steps that were not finite: named, counted, and the end of the run when too many follow each other."""

from pathlib import Path
from typing import Any

from toolkit import output
from toolkit.config import OptimConfig
from toolkit.figures import StepFigures


class Unstable(Exception):
    """Too many steps in a row were not finite; the parameters are those of the last good one."""

    exit_code = 1


class NonfiniteGuard:
    """Counts the skipped steps in a row. The update was already withheld, on the device; here it is said and written."""

    def __init__(self, config: OptimConfig, directory: Path) -> None:
        self.limit = 1 if config.nonfinite == "stop" else config.max_nonfinite_steps
        self.directory, self.in_row = directory, 0

    def check(self, step: StepFigures, train: Any, run: Any) -> None:
        """Report one step that was read; raises `Unstable` at the limit."""
        if not step.values.get("nonfinite"):
            self.in_row = 0
            return
        self.in_row += 1
        loss, norm, examples = step.values["loss"], step.values["grad_norm"], step.batch.examples
        if run.accelerator.is_main_process:
            self.directory.mkdir(exist_ok=True)
            record = {"step": step.step, "position": step.batch.position, "loss": str(loss), "grad_norm": str(norm)}
            rows = [describe_row(train, example) for example in examples]
            output.append_line(self.directory / "nonfinite.jsonl", {**record, "rows": rows})
        shown = ", ".join(map(str, examples[:8])) + (", ..." if len(examples) > 8 else "")
        run.say(
            f"WARNING: step {step.step} skipped: loss {loss}, gradient norm {norm}. Examples {shown}: their rows are in "
            f"{self.directory / 'nonfinite.jsonl'}"
        )
        if self.in_row >= self.limit:
            raise Unstable(
                f"{self.in_row} step(s) in a row with a non-finite loss or gradient, the last one step {step.step}. The "
                "parameters are untouched by them. Look at the rows written, lower --learning-rate, or prefer --bf16 to --fp16."
            )


def describe_row(train: Any, example: int) -> dict[str, Any]:
    """An example as it can be looked up again: its index, where its documents come from, and their tokens."""
    if not hasattr(train, "rows"):
        return {"example": example}
    documents = train.rows.documents([example])
    tokens = [document["input_ids"].tolist() for document in documents]
    return {"example": example, "origin": train.rows.origins(example), "input_ids": tokens}
