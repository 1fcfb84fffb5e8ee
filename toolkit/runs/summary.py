"""What a run ends with."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Summary:
    """The final figures of a run, as in summary.json."""

    figures: dict[str, Any] = field(default_factory=dict)


def evaluations_by_step(events: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The metrics named eval_... by step, those that were logged in several calls at one step together."""
    evaluated: dict[int, dict[str, Any]] = {}
    for event in events:
        metrics = {name: value for name, value in event.items() if name.startswith("eval_")}
        if metrics:
            evaluated.setdefault(event["step"], {}).update(metrics)
    return evaluated
