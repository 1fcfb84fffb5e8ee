"""Which evaluation was the best, and when to stop looking for a better one."""

import math
from typing import Any

from toolkit import checkpoint as ckpt
from toolkit.config import Refusal, RunConfig
from toolkit.engines import engine_of
from toolkit.ranks import on_all, on_main
from toolkit.run_state import check_saves
from toolkit.tracking import show_number


def load_best(run: Any) -> None:
    """Put the best evaluated weights into the run's model, when `load_best_model_at_end` asks for it."""
    if not run.config.load_best_model_at_end or not run.best or run.best["step"] == run.step:
        return
    check_saves(run, run.writer.wait())
    run.accelerator.wait_for_everyone()
    path = on_main(run.accelerator, lambda: ckpt.read_pointer(run.checkpoints, "best"))
    if path is None or path.name != f"step-{run.best['step']}":
        run.say(f"WARNING: the best weights (step {run.best['step']}) were not saved; the last ones are kept")
        return
    try:
        state = on_all(run.accelerator, lambda: ckpt.load_checkpoint(path))
        _put_model(run, state)
    except Refusal as refusal:
        run.say(f"WARNING: the best weights can't be loaded ({refusal}); the last ones are kept")
        return
    run.figures_of = run.best["step"]
    run.say(f"best {run.best['name']} {show_number(run.best['value'])} at step {run.best['step']}: its weights are loaded")


def _put_model(run: Any, state: ckpt.State) -> None:
    if engine_of(run.accelerator).shards:
        ckpt.apply_sharded_state(run.accelerator, state, run.model, run.optimizer, only_model=True)
    else:
        on_all(run.accelerator, lambda: ckpt.apply_state(state, run.model, None))


def stopped_improving(values: list[float], config: RunConfig) -> bool:
    """Whether the last `early_stopping_patience` values of the deciding metric brought nothing better than those before."""
    patience, values = config.early_stopping_patience, [value for value in values if math.isfinite(value)]
    if patience is None or len(values) <= patience:
        return False
    best = max if greater_is_better(config.metric_for_best_model, config.greater_is_better) else min
    earlier = best(values[:-patience])
    return best(earlier, *values[-patience:]) == earlier


def greater_is_better(name: str, given: bool | None = None) -> bool:
    """Which way a figure improves: what was said, else downward for losses, errors and perplexities."""
    if given is not None:
        return given
    return not any(word in name for word in ("loss", "perplexity", "error", "bits_per", "mse", "mae"))
