"""Learning-rate schedules as pure functions of progress.

A schedule has no state: its factor at progress p is that of step p × num_steps in a run of num_steps. So nothing about it
is saved, and a run continued with another batch size goes on at the right place.
"""

import math
from collections.abc import Callable

from toolkit.config import OptimConfig

Curve = Callable[[float], float]


def build_schedule(config: OptimConfig, num_steps: int) -> Callable[[float], float]:
    """The factor in [0, 1] on the learning rate, as a function of progress in [0, 1].

    Where transformers has the schedule, its value at progress k / num_steps is that of `transformers.get_scheduler` at
    step k. `exponential` and `step` follow torch's ExponentialLR and StepLR over the part of the run after warm-up.
    `min_lr_ratio` rescales the linear, polynomial and cosine families so that they end at the floor; the others have no
    end, and stop falling when they reach it.
    """
    warmup = warmup_length(config, num_steps)
    curve = _CURVES[config.lr_scheduler_type](config, num_steps, warmup)
    # transformers starts this one schedule's warm-up at the floor and all others at zero.
    start = config.min_lr_ratio if config.lr_scheduler_type == "warmup_stable_decay" else 0.0

    def factor(progress: float) -> float:
        step = _nearest_whole(min(max(progress, 0.0), 1.0) * num_steps)
        if step < warmup:
            return start + (1.0 - start) * step / warmup
        return curve(step)

    return factor


def warmup_length(config: OptimConfig, num_steps: int) -> int:
    """Steps of warm-up; a fraction of the run is rounded up, as transformers does."""
    if config.lr_scheduler_type == "constant":
        return 0
    given = config.warmup_steps
    return int(given) if given >= 1 else math.ceil(num_steps * given)


def _nearest_whole(step: float) -> float:
    """k / n × n is not always k in floating point, and a step that falls short of k would take the side before a drop."""
    nearest = round(step)
    return float(nearest) if math.isclose(step, nearest, rel_tol=1e-12, abs_tol=1e-9) else step


def _above_floor(share: float, config: OptimConfig) -> float:
    return share * (1.0 - config.min_lr_ratio) + config.min_lr_ratio


def _after_warmup(step: float, num_steps: int, warmup: int) -> float:
    return (step - warmup) / max(1, num_steps - warmup)


def _constant(config: OptimConfig, num_steps: int, warmup: int) -> Curve:
    return lambda step: 1.0


def _linear(config: OptimConfig, num_steps: int, warmup: int) -> Curve:
    return lambda step: _above_floor((num_steps - step) / max(1, num_steps - warmup), config)


def _cosine(config: OptimConfig, num_steps: int, warmup: int) -> Curve:
    """SGDR without restarts (Loshchilov and Hutter, https://arxiv.org/abs/1608.03983)."""
    return lambda step: _above_floor(_half_cosine(_after_warmup(step, num_steps, warmup)), config)


def _cosine_with_restarts(config: OptimConfig, num_steps: int, warmup: int) -> Curve:
    def curve(step: float) -> float:
        done = _after_warmup(step, num_steps, warmup)
        return _above_floor(0.0 if done >= 1.0 else _half_cosine((config.lr_cycles * done) % 1.0), config)

    return curve


def _half_cosine(done: float) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))


def _polynomial(config: OptimConfig, num_steps: int, warmup: int) -> Curve:
    return lambda step: _above_floor((1.0 - _after_warmup(step, num_steps, warmup)) ** config.lr_power, config)


def _inverse_sqrt(config: OptimConfig, num_steps: int, warmup: int) -> Curve:
    timescale = warmup or 10_000  # transformers' own choice where there is no warm-up to take it from
    return lambda step: max(config.min_lr_ratio, 1.0 / math.sqrt((step + timescale - warmup) / timescale))


def _exponential(config: OptimConfig, num_steps: int, warmup: int) -> Curve:
    return lambda step: max(config.min_lr_ratio, config.lr_gamma ** _after_warmup(step, num_steps, warmup))


def _step(config: OptimConfig, num_steps: int, warmup: int) -> Curve:
    """lr_cycles drops cut the run after warm-up into lr_cycles + 1 parts of whole steps, the last the shortest."""
    part = max(1, math.ceil((num_steps - warmup) / (config.lr_cycles + 1)))

    def curve(step: float) -> float:
        drops = min(config.lr_cycles, int((step - warmup) // part))
        return max(config.min_lr_ratio, config.lr_gamma**drops)

    return curve


def _warmup_stable_decay(config: OptimConfig, num_steps: int, warmup: int) -> Curve:
    """Flat, then half a cosine over the last lr_decay_ratio of the run (https://arxiv.org/abs/2404.06395, section 4).

    Warm-up comes first: in a run too short for both, what it leaves is all decay.
    """
    decay = min(math.ceil(num_steps * config.lr_decay_ratio), max(0, num_steps - warmup))
    stable_end = num_steps - decay

    def curve(step: float) -> float:
        if step < stable_end:
            return 1.0
        return _above_floor(_half_cosine((step - stable_end) / decay) if step < num_steps else 0.0, config)

    return curve


_CURVES: dict[str, Callable[[OptimConfig, int, int], Curve]] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
    "exponential": _exponential,
    "step": _step,
    "warmup_stable_decay": _warmup_stable_decay,
}
