"""Where the steps of a recipe wait for the GPU: `python -m benchmarks.gpu_syncs RECIPE WARM_UP FLAGS`.

Runs the recipe with torch's sync debug mode on during each `train_step` behind the warm-up, and prints each place that waited,
with how often: "SYNC 4 training/step.py:120 < ...". What a run reads on purpose at logging events is outside of a step.
"""

from __future__ import annotations

import runpy
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import toolkit.training.step as step
from toolkit.training.step import train_step

ROOT = Path(__file__).parents[1]


def main() -> None:
    recipe, warm_up, *flags = sys.argv[1:]
    places: Counter[str] = Counter()
    taken = 0

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if "synchroniz" in str(message).lower():
            places[_place()] += 1

    def watched(*values: Any, **named: Any) -> dict[str, torch.Tensor]:
        nonlocal taken
        taken += 1
        torch.cuda.set_sync_debug_mode("warn" if taken > int(warm_up) else "default")
        try:
            return train_step(*values, **named)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    warnings.simplefilter("always")
    warnings.showwarning = show
    step.train_step = watched
    sys.argv = [recipe, *flags]
    try:
        runpy.run_path(recipe, run_name="__main__")
    finally:
        print(f"{taken} steps, of which {max(0, taken - int(warm_up))} were watched")
        for place, count in places.most_common():
            print(f"SYNC {count} {place}")


def _place() -> str:
    """The innermost lines of the toolkit and of what it called."""
    frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).name not in ("gpu_syncs.py", "warnings.py")]
    shown = [f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}" for frame in frames]
    return " < ".join(reversed(shown[-6:]))


if __name__ == "__main__":
    main()
