"""What a run ends with."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.config import Settings
from toolkit.config.reading import public_settings, settings_read


@dataclass
class Summary:
    """The final metrics of a run, as in summary.json. `settings`: those that it has read, for the model card."""

    metrics: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] | None = None


def read_settings(config: Settings) -> dict[str, Any]:
    """The public settings that the run has read so far."""
    read = settings_read(config)
    return {name: value for name, value in public_settings(config).items() if name in read}


def evaluations_by_step(events: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The metrics named eval_... by step, those that were logged in several calls at one step together."""
    evaluated: dict[int, dict[str, Any]] = {}
    for event in events:
        metrics = {name: value for name, value in event.items() if name.startswith("eval_")}
        if metrics:
            evaluated.setdefault(event["step"], {}).update(metrics)
    return evaluated
