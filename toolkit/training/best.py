"""Which evaluation was the best, and when to stop looking for a better one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit import checkpoint as ckpt
from toolkit.config import Refusal
from toolkit.distributed.ranks import on_all, on_main
from toolkit.system.numbers import show_decimals

if TYPE_CHECKING:
    from toolkit.training.run import Run


def load_best(run: Run) -> None:
    """Put the best evaluated weights into the run's model, when `load_best_model_at_end` asks for it."""
    run.check_decided()
    best, ranked = run.state.best, run.state.ranked
    if not run.config.load_best_model_at_end or not best or best["step"] == run.step:
        return
    run.saver.check(run.step, wait=True)
    run.accelerator.wait_for_everyone()
    path = on_main(run.accelerator, lambda: ckpt.read_pointer(run.checkpoints, "best"))
    if path is None or path.name != f"step-{best['step']}":
        run.say(f"WARNING: the best weights (step {best['step']}) were not saved; the last ones are kept")
        return
    try:
        run.saver.put_model(on_all(run.accelerator, lambda: ckpt.load_checkpoint(path)), best["step"])
    except Refusal as refusal:
        run.say(f"WARNING: the best weights can't be loaded ({refusal}); the last ones are kept")
        return
    if len(ranked) > 1:
        kept = ", ".join(f"step-{step} ({show_decimals(value)})" for value, step in ranked)
        run.say(f"the best checkpoints by {best['name']}, all kept: {kept}")
    run.say(f"best {best['name']} {show_decimals(best['value'])} at step {best['step']}: its weights are loaded")


def stopped_improving(values: Sequence[float], patience: int | None, greater_is_better: bool = False) -> bool:
    """Whether the last `patience` values of a metric brought nothing better than those before; never where it is None."""
    values = [value for value in values if math.isfinite(value)]
    if patience is None or len(values) <= patience:
        return False
    best = max if greater_is_better else min
    earlier = best(values[:-patience])
    return best(earlier, *values[-patience:]) == earlier
