"""What a SageMaker container gives a recipe: where to write, that it may continue there, where data lie, where the model goes.

Each function reads the environment that it is given; outside a container none of them changes anything.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# How long a file may take from its place in the container to S3: SageMaker does not report when it is there.
COPYING_BEGINS = 60.0  # seconds
COPYING_SPEED = 50e6  # bytes a second


def in_container(environment: Mapping[str, str] = os.environ) -> bool:
    return "SM_MODEL_DIR" in environment and "SM_HOSTS" in environment


def checkpoint_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that SageMaker keeps equal to a prefix in S3, /opt/ml/checkpoints; None where the job has none."""
    if not in_container(environment):
        return None
    folder = Path(environment["SM_MODEL_DIR"]).parent / "checkpoints"
    return folder if folder.is_dir() else None


def waits_for_s3(checkpoints: Sequence[Path], now: float | None = None) -> list[Path]:
    """Of checkpoints, oldest first, those that must stay although newer ones are there: S3 may hold no newer one whole yet.

    Deleting a file in the container deletes it in S3, at once or later, while copying a checkpoint takes minutes. So two stay:
    the newest one that has had the time to be copied, and the one after it, which will be that next. Nothing has to stay
    outside a container.
    """
    folder = checkpoint_folder()
    if folder is None or not checkpoints or folder.resolve() not in checkpoints[0].resolve().parents:
        return []
    now = time.time() if now is None else now
    copied = [path for path in checkpoints if _seconds_to_copy(path) <= now - _written(path)]
    newest_copied = copied[-1:]
    after = checkpoints[checkpoints.index(newest_copied[0]) + 1 :] if newest_copied else checkpoints
    return [*newest_copied, *after[:1]]


def _seconds_to_copy(checkpoint: Path) -> float:
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    return COPYING_BEGINS + size / COPYING_SPEED


def _written(checkpoint: Path) -> float:
    return max((file.stat().st_mtime for file in checkpoint.iterdir()), default=0.0)
