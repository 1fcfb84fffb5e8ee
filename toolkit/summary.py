"""What a run ends with."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Summary:
    """The final figures of a run, as in summary.json."""

    figures: dict[str, Any] = field(default_factory=dict)


def summarise(run: Any) -> Summary:
    """How a run stands: its counts, the figures of its model, and the first evaluation's to compare them with.

    The model is the last one, or the best one once that is loaded.
    """
    from toolkit.tracking import peak_memory_gb  # with torch: a recipe names Summary, and its help page must not wait

    evaluated = [(event["step"], {k: v for k, v in event.items() if k.startswith("eval_")}) for event in run.events]
    evaluations = [figures for _, figures in evaluated if figures]
    first = {f"first_{name}": value for name, value in evaluations[0].items()} if len(evaluations) > 1 else {}
    of_model = [figures for step, figures in evaluated if figures and run.figures_of in (None, step)]
    losses = run.history("loss")
    return Summary({
        "status": run.status, "steps": run.step, "applied_steps": run.applied, "examples": run.position, "epoch": run.epoch,
        "supervised_tokens": run.tokens, "seconds": run.seconds, "peak_memory_gb": peak_memory_gb(run.accelerator.device),
        **({"train_loss": losses[-1]} if losses else {}), **first, **(of_model[-1] if of_model else {}),
        "best": run.best, "baselines": run.baselines, "failed_saves": run.failed_saves, "loss_spikes": run.loss_spikes,
    })  # fmt: skip
