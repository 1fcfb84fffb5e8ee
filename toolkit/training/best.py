"""Which evaluation was the best, and when to stop looking for a better one."""

import math
from typing import Any

from toolkit import checkpoint as ckpt
from toolkit.config import Refusal, RunConfig
from toolkit.config.conditions import is_decided_by_a_metric
from toolkit.distributed.engines import engine_of
from toolkit.distributed.ranks import on_all, on_main
from toolkit.metrics.direction import greater_is_better
from toolkit.system.console import show_number
from toolkit.training.run_state import check_saves


def load_best(run: Any) -> None:
    """Put the best evaluated weights into the run's model, when `load_best_model_at_end` asks for it."""
    check_decided(run)
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
    if len(run.ranked) > 1:
        kept = ", ".join(f"step-{step} ({show_number(value)})" for value, step in run.ranked)
        run.say(f"the best checkpoints by {run.best['name']}, all kept: {kept}")
    run.say(f"best {run.best['name']} {show_number(run.best['value'])} at step {run.best['step']}: its weights are loaded")


def note_evaluation(run: Any, figures: dict[str, float]) -> bool:
    """Whether an evaluation is among the `save_best_limit` best ones so far; the run remembers these.

    Metrics of one step may be logged in several calls: whether one has had the deciding metric, `check_decided` asks later.
    """
    config, name = run.config, run.config.metric_for_best_model
    name = name if name in figures else f"eval_{name}"
    if name not in figures:
        run.undecided += [each for each in figures if each.startswith("eval_")]
        return False
    sign = 1 if greater_is_better(name, config.greater_is_better) else -1
    if run.step > 0:  # Trainer doesn't count the evaluation before training either
        run.objective.append(-sign * figures[name])
    if not math.isfinite(figures[name]):
        return False
    if run.best and (run.best["name"], run.best.get("sign", sign)) != (name, sign):
        run.say(f"the best so far was judged by {run.best['name']}; from here on by {name}")
        run.best, run.ranked = {}, []
    run.ranked = best_evaluations(run.ranked, figures[name], run.step, sign, config.save_best_limit)
    if not run.best or sign * figures[name] > sign * run.best["value"]:
        run.best = {"name": name, "value": figures[name], "step": run.step, "sign": sign}
        there = run.checkpoints / f"step-{run.step}"
        if run.accelerator.is_main_process and there.is_dir():  # an evaluation made up for after its step was saved
            ckpt.write_pointer(run.checkpoints, "best", there)
    return [figures[name], run.step] in run.ranked


def check_decided(run: Any) -> None:
    """Refuse a step that was evaluated when the deciding metric was never logged, where something depends on it.

    Raises:
        Refusal: at the end of the step, on every rank alike.
    """
    name, logged = run.config.metric_for_best_model, run.undecided
    run.undecided = []
    if not logged or not is_decided_by_a_metric(run.config):
        return
    if not run.history(name):
        raise Refusal(f"--metric-for-best-model {name}: not a metric of the evaluation: {', '.join(logged)}")


def best_evaluations(ranked: list[list[float]], value: float, step: int, sign: int, most: int) -> list[list[float]]:
    """The best `most` evaluations as [value, step], the best first, of equal ones the earlier; `sign` 1: more is better."""
    return sorted([*ranked, [value, step]], key=lambda each: -sign * each[0])[:most]


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
