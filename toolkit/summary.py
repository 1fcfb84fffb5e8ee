"""What a run ends with."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Summary:
    """The final figures of a run, as in summary.json."""

    figures: dict[str, Any] = field(default_factory=dict)
