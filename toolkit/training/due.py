"""When logging, evaluations and saves are due by the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.config import RunConfig

_PREFIX = {"log": "logging", "eval": "eval", "save": "save"}  # of the settings


def is_due(
    what: str, config: RunConfig, step: int, before: int, position: int, epoch_size: int | None, is_last: bool
) -> bool:
    """Whether "log", "eval" or "save" is due after a step. After the last one each is, unless its strategy is "no".

    Args:
        before: examples consumed before the step; `position`: after it.
        epoch_size: examples of an epoch; None for a stream without an end.
    """
    strategy, size = getattr(config, f"{_PREFIX[what]}_strategy"), epoch_size or 0
    if strategy == "no":
        return False
    # read before the last step returns: in a run of one step they are no settings that nothing has read
    every = getattr(config, f"{_PREFIX[what]}_steps") if strategy == "steps" else None
    delay = config.eval_delay if what == "eval" else 0
    if step == 0 or is_last:
        return is_last and step > 0
    epoch = position / size if size else 0.0
    if (epoch if every is None else step) < delay:
        return False
    if every is not None:
        return step % every == 0
    return size > 0 and position // size > before // size
