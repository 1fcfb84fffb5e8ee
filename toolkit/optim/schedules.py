"""Learning-rate schedules as pure functions of progress, and for reduce_lr_on_plateau of the evaluations so far.

A schedule has no state: its factor at progress p is that of step p × num_steps in a run of num_steps. So nothing about it
is saved, and a run continued with another batch size continues at the right place.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from toolkit.config import OptimConfig, Refusal

Curve = Callable[[float], float]
Schedule = Callable[..., float]  # (progress, objective of the evaluations so far) -> factor


def build_schedule(config: OptimConfig, num_steps: int) -> Schedule:
    """The factor in [0, 1] on the learning rate, as a function of progress in [0, 1].

    `reduce_lr_on_plateau` also takes the evaluations so far, `run.objective`; the others ignore them.

    Where transformers has the schedule, its value at progress k / num_steps is that of `transformers.get_scheduler` at
    step k. `exponential` and `step` follow torch's ExponentialLR and StepLR over the part of the run after warm-up. All
    settings that the schedule needs are read here, so that those that were given and have no effect are known before a step.
    `min_lr_ratio` rescales the linear, polynomial and cosine families so that they end at the floor; the others have no
    end, and stop falling when they reach it.

    Step 1 of a warm-up has rate 0, as in Trainer: the rate of a step is that of the steps before it. It costs one step and
    keeps every later rate comparable; `cosine_warmup_with_min_lr` begins at the first fraction in its place.
    """
    name = config.lr_scheduler_type
    warmup = 0 if name == "constant" else warmup_length(config.warmup_steps, num_steps)
    curve_of, takes = _CURVES[name]
    curve = curve_of(num_steps, warmup, **{each: _value(config, each) for each in takes})
    # transformers starts this one schedule's warm-up at the floor and all others at zero.
    start = _value(config, "floor") if name == "warmup_stable_decay" else 0.0
    ahead = 1.0 if name == "cosine_warmup_with_min_lr" else 0.0
    rise = _RISES[config.warmup_type]
    reduced = None
    if name == "reduce_lr_on_plateau":
        reduced = plateau(config.lr_patience, config.lr_threshold, config.lr_gamma, _value(config, "floor"))

    def factor(progress: float, objective: Sequence[float] | None = None) -> float:
        step = _nearest_whole(min(max(progress, 0.0), 1.0) * num_steps)
        share = start + (1.0 - start) * rise(min(1.0, (step + ahead) / warmup)) if step < warmup else curve(step)
        if reduced is None:
            return share
        if objective is None:
            raise Refusal(
                "--lr-scheduler-type reduce_lr_on_plateau: this recipe does not pass its evaluations to the schedule. Take "
                "another schedule, such as cosine, or write schedule(run.progress, run.objective) in a copy of the recipe."
            )
        return share * reduced(objective)

    return factor


def warmup_length(warmup_steps: float, num_steps: int) -> int:
    """Steps of warm-up; a fraction of the run is rounded up, as transformers does."""
    return int(warmup_steps) if warmup_steps >= 1 else math.ceil(num_steps * warmup_steps)


def _value(config: OptimConfig, name: str) -> Any:
    """A setting; "floor" is the lowest factor, `min_lr` as a share of the learning rate, else `min_lr_ratio`."""
    if name == "floor":
        return config.min_lr_ratio if config.min_lr is None else config.min_lr / config.learning_rate
    return getattr(config, name)


def plateau(
    lr_patience: int = 10, lr_threshold: float = 1e-4, lr_gamma: float = 0.1, floor: float = 0.0
) -> Callable[[Sequence[float]], float]:
    """What is left of the rate after the evaluations so far: torch's ReduceLROnPlateau, computed again from all of them.

    It takes the deciding metric at each evaluation, smaller is better. After more than `lr_patience` evaluations in a
    row that are not better by `lr_threshold` of the best, the rate is multiplied by `lr_gamma`, down to the floor. For
    objectives below 0 that come from a metric where more is better, that is torch's mode "max". torch's `eps`, which leaves
    rates below 1e-8 as they are, is left out.
    """

    def share_after(objective: Sequence[float]) -> float:
        share, best, waited = 1.0, math.inf, 0
        for value in objective:
            if value < best * (1.0 - math.copysign(lr_threshold, best)):
                best, waited = value, 0
            else:
                waited += 1
            if waited > lr_patience:
                share, waited = max(share * lr_gamma, floor), 0
        return share

    return share_after


# -- curves: the factor at each step after warm-up. `floor` is the lowest factor -------------------------------------------


def constant(num_steps: int, warmup: int = 0) -> Curve:
    return lambda step: 1.0


def linear(num_steps: int, warmup: int = 0, floor: float = 0.0) -> Curve:
    return lambda step: _above_floor((num_steps - step) / max(1, num_steps - warmup), floor)


def cosine(num_steps: int, warmup: int = 0, floor: float = 0.0) -> Curve:
    """SGDR without restarts (Loshchilov and Hutter, https://arxiv.org/abs/1608.03983)."""
    return lambda step: _above_floor(_half_cosine(_after_warmup(step, num_steps, warmup)), floor)


def cosine_one_ahead(num_steps: int, warmup: int = 0, floor: float = 0.0) -> Curve:
    """The cosine whose first step has fallen already, as transformers has it with a warm-up that begins above zero."""
    return lambda step: _above_floor(_half_cosine(min(1.0, _after_warmup(step + 1.0, num_steps, warmup))), floor)


def cosine_with_restarts(num_steps: int, warmup: int = 0, lr_cycles: int = 1, floor: float = 0.0) -> Curve:
    def curve(step: float) -> float:
        done = _after_warmup(step, num_steps, warmup)
        return _above_floor(0.0 if done >= 1.0 else _half_cosine((lr_cycles * done) % 1.0), floor)

    return curve


def polynomial(num_steps: int, warmup: int = 0, lr_power: float = 1.0, floor: float = 0.0) -> Curve:
    return lambda step: _above_floor((1.0 - _after_warmup(step, num_steps, warmup)) ** lr_power, floor)


def inverse_sqrt(num_steps: int, warmup: int = 0, floor: float = 0.0) -> Curve:
    timescale = warmup or 10_000  # transformers' own choice where there is no warm-up to take it from
    return lambda step: max(floor, 1.0 / math.sqrt((step + timescale - warmup) / timescale))


def exponential(num_steps: int, warmup: int = 0, lr_gamma: float = 0.1, floor: float = 0.0) -> Curve:
    return lambda step: max(floor, lr_gamma ** _after_warmup(step, num_steps, warmup))


def steps(num_steps: int, warmup: int = 0, lr_cycles: int = 1, lr_gamma: float = 0.1, floor: float = 0.0) -> Curve:
    """lr_cycles drops cut the run after warm-up into lr_cycles + 1 parts of whole steps, the last the shortest."""
    part = max(1, math.ceil((num_steps - warmup) / (lr_cycles + 1)))

    def curve(step: float) -> float:
        drops = min(lr_cycles, int((step - warmup) // part))
        return max(floor, lr_gamma**drops)

    return curve


def warmup_stable_decay(
    num_steps: int, warmup: int = 0, lr_decay_ratio: float = 0.2, lr_decay_type: str = "cosine", floor: float = 0.0
) -> Curve:
    """Flat, then a fall over the last lr_decay_ratio of the run (https://arxiv.org/abs/2404.06395, section 4).

    Warm-up comes first: in a run too short for both, what it leaves is all decay.
    """
    decay = min(math.ceil(num_steps * lr_decay_ratio), max(0, num_steps - warmup))
    stable_end, fall = num_steps - decay, _FALLS[lr_decay_type]

    def curve(step: float) -> float:
        if step < stable_end:
            return 1.0
        return _above_floor(fall((step - stable_end) / decay) if step < num_steps else 0.0, floor)

    return curve


def _nearest_whole(step: float) -> float:
    """k / n × n is not always k in floating point, and a step that falls short of k would take the side before a drop."""
    nearest = round(step)
    return float(nearest) if math.isclose(step, nearest, rel_tol=1e-12, abs_tol=1e-9) else step


def _above_floor(share: float, floor: float) -> float:
    return share * (1.0 - floor) + floor


def _after_warmup(step: float, num_steps: int, warmup: int) -> float:
    return (step - warmup) / max(1, num_steps - warmup)


def _half_cosine(done: float) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))


# Shapes by transformers' names in its warmup_stable_decay. "1-sqrt" falls by one minus the root of the share that is done.
_RISES: dict[str, Curve] = {
    "linear": lambda done: done,
    "cosine": lambda done: 0.5 * (1.0 - math.cos(math.pi * done)),
    "1-sqrt": lambda done: 1.0 - math.sqrt(1.0 - done),
}
_FALLS: dict[str, Curve] = {
    "cosine": _half_cosine, "linear": lambda done: 1.0 - done, "1-sqrt": lambda done: 1.0 - math.sqrt(done),
}  # fmt: skip

# Each schedule by its name in the settings, and the settings that it takes.
_CURVES: dict[str, tuple[Callable[..., Curve], tuple[str, ...]]] = {
    "constant": (constant, ()),
    "constant_with_warmup": (constant, ()),
    "linear": (linear, ("floor",)),
    "cosine": (cosine, ("floor",)),
    "cosine_with_min_lr": (cosine, ("floor",)),
    "cosine_warmup_with_min_lr": (cosine_one_ahead, ("floor",)),
    "cosine_with_restarts": (cosine_with_restarts, ("lr_cycles", "floor")),
    "polynomial": (polynomial, ("lr_power", "floor")),
    "inverse_sqrt": (inverse_sqrt, ("floor",)),
    "exponential": (exponential, ("lr_gamma", "floor")),
    "step": (steps, ("lr_cycles", "lr_gamma", "floor")),
    "warmup_stable_decay": (warmup_stable_decay, ("lr_decay_ratio", "lr_decay_type", "floor")),
    "reduce_lr_on_plateau": (constant, ()),
}
