"""Where a stream is in its source."""

import json
from typing import Any


def state_of(stream: Any) -> dict[str, Any] | None:
    """The state of a source that tells it, when JSON holds it."""
    if not hasattr(stream, "state_dict"):
        return None
    state = stream.state_dict()
    try:
        return json.loads(json.dumps(state)) if state else None
    except TypeError:
        return None
