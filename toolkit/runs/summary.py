"""What a run ends with."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Summary:
    """The final figures of a run, as in summary.json."""

    figures: dict[str, Any] = field(default_factory=dict)


def summarize(run: Any) -> Summary:
    """How a run stands: its counts, the figures of its model, and the first evaluation's to compare them with.

    The model is the last one, or the best one once that is loaded.
    """
    from toolkit.tracking.throughput import (
        peak_memory_gb,  # with torch: a recipe names Summary, and its help page must not wait
    )

    evaluated = evaluations_by_step(run.events)
    first = {f"first_{name}": value for name, value in next(iter(evaluated.values())).items()} if len(evaluated) > 1 else {}
    of_model = [metrics for step, metrics in evaluated.items() if run.figures_of in (None, step)]
    losses = run.history("loss")
    return Summary({
        "status": run.status, "steps": run.step, "applied_steps": run.applied, "examples": run.position, "epoch": run.epoch,
        "supervised_tokens": run.tokens, "seconds": run.seconds, "peak_memory_gb": peak_memory_gb(run.accelerator.device),
        **({"train_loss": losses[-1]} if losses else {}), **first, **(of_model[-1] if of_model else {}),
        "warnings": run.warnings, "best": run.best, "baselines": run.baselines,
        "failed_saves": run.failed_saves, "loss_spikes": run.loss_spikes,
    })  # fmt: skip


def evaluations_by_step(events: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The metrics named eval_... by step, those that were logged in several calls at one step together."""
    evaluated: dict[int, dict[str, Any]] = {}
    for event in events:
        metrics = {name: value for name, value in event.items() if name.startswith("eval_")}
        if metrics:
            evaluated.setdefault(event["step"], {}).update(metrics)
    return evaluated
