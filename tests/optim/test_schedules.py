"""Schedules against transformers' and torch's own schedulers, step by step."""

import math

import pytest
import torch
from transformers import get_scheduler

from toolkit.config import OptimConfig, Refusal
from toolkit.optim.optimizers import build_optimizer
from toolkit.optim.schedules import build_schedule, plateau

RATE = 3e-3


def optimizer_at(rate: float = RATE) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def rates_of(scheduler: torch.optim.lr_scheduler.LRScheduler, num_steps: int) -> list[float]:
    """The rate in force at steps 0 .. num_steps of a scheduler that is stepped after each update."""
    rates = []
    for _ in range(num_steps + 1):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def rates_of_ours(config: OptimConfig, num_steps: int) -> list[float]:
    factor = build_schedule(config, num_steps)
    return [RATE * factor(step / num_steps) for step in range(num_steps + 1)]




PEERS = [
    # our settings, transformers' name and its own arguments
    ({"lr_scheduler_type": "constant"}, "constant", {}),
    ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 7}, "constant_with_warmup", {}),
    ({"lr_scheduler_type": "linear"}, "linear", {}),
    ({"lr_scheduler_type": "linear", "warmup_steps": 0.07}, "linear", {}),
    ({"lr_scheduler_type": "linear", "warmup_steps": 5, "min_lr_ratio": 0.2}, "polynomial", {"lr_end": 0.2 * RATE}),
    ({"lr_scheduler_type": "cosine", "warmup_steps": 0.1}, "cosine", {}),
    ({"lr_scheduler_type": "cosine", "warmup_steps": 9, "min_lr_ratio": 0.05}, "cosine_with_min_lr", {"min_lr_rate": 0.05}),
    ({"lr_scheduler_type": "cosine_with_min_lr", "min_lr_ratio": 0.2}, "cosine_with_min_lr", {"min_lr_rate": 0.2}),
    ({"lr_scheduler_type": "cosine_with_min_lr", "warmup_steps": 5, "min_lr": 4e-4}, "cosine_with_min_lr", {"min_lr": 4e-4}),
    ({"lr_scheduler_type": "linear", "min_lr": 4e-4}, "polynomial", {"lr_end": 4e-4}),
    ({"lr_scheduler_type": "cosine_with_restarts", "lr_cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
    (
        {"lr_scheduler_type": "cosine_with_restarts", "lr_cycles": 4, "warmup_steps": 3},
        "cosine_with_restarts",
        {"num_cycles": 4},
    ),
    (
        {"lr_scheduler_type": "polynomial", "lr_power": 2.5, "min_lr_ratio": 0.1, "warmup_steps": 4},
        "polynomial",
        {"power": 2.5, "lr_end": 0.1 * RATE},
    ),
    ({"lr_scheduler_type": "polynomial"}, "polynomial", {"lr_end": 0.0}),
    ({"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 10}, "inverse_sqrt", {}),
    ({"lr_scheduler_type": "inverse_sqrt"}, "inverse_sqrt", {}),
]


@pytest.mark.parametrize("num_steps", [1, 10, 97])
@pytest.mark.parametrize(("settings", "name", "arguments"), PEERS)
def test_rate_is_that_of_transformers_at_every_step(settings, name, arguments, num_steps):
    """Fails when: `_nearest_whole` returns step unchanged (97 steps, restarts), or warmup_length rounds down."""
    given = settings.get("warmup_steps", 0)
    warmup = given if given >= 1 else math.ceil(num_steps * given)
    peer = get_scheduler(name, optimizer_at(), warmup, num_steps, scheduler_specific_kwargs=arguments)
    ours = rates_of_ours(OptimConfig(learning_rate=RATE, **settings), num_steps)
    assert ours == pytest.approx(rates_of(peer, num_steps), rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("num_steps", [1, 10, 97])
@pytest.mark.parametrize(("warmup", "floor"), [(0, {"min_lr_ratio": 0.1}), (1, {"min_lr_ratio": 0.1}), (7, {"min_lr": 2e-4})])
def test_a_warm_up_that_begins_above_zero_is_that_of_transformers(num_steps, warmup, floor):
    """Fails when: the warm-up, or the cosine, of cosine_warmup_with_min_lr is not one step ahead."""
    arguments = {"min_lr_rate": floor.get("min_lr_ratio", 2e-4 / RATE)}
    peer = get_scheduler("cosine_warmup_with_min_lr", optimizer_at(), warmup, num_steps, scheduler_specific_kwargs=arguments)
    ours = rates_of_ours(OptimConfig(learning_rate=RATE, lr_scheduler_type="cosine_warmup_with_min_lr", warmup_steps=warmup, **floor), num_steps)
    assert ours[:num_steps] == pytest.approx(rates_of(peer, num_steps)[:num_steps], rel=1e-12, abs=1e-18)
    assert ours[0] > 0


@pytest.mark.parametrize("warmup_type", ["linear", "cosine", "1-sqrt"])
@pytest.mark.parametrize("decay_type", ["cosine", "linear", "1-sqrt"])
@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.1])
def test_shapes_of_warm_up_and_decay_are_those_of_transformers(warmup_type, decay_type, min_lr_ratio):
    """Fails when: the root is taken of the share that is left (1-sqrt), or the rising cosine is the falling one."""
    arguments = {"num_decay_steps": 30, "min_lr_ratio": min_lr_ratio, "warmup_type": warmup_type, "decay_type": decay_type}
    peer = get_scheduler("warmup_stable_decay", optimizer_at(), 11, 100, scheduler_specific_kwargs=arguments)
    settings = {"warmup_steps": 11, "warmup_type": warmup_type, "lr_decay_type": decay_type, "lr_decay_ratio": 0.3}
    config = OptimConfig(
        learning_rate=RATE, lr_scheduler_type="warmup_stable_decay", min_lr_ratio=min_lr_ratio, **settings
    )
    assert rates_of_ours(config, 100) == pytest.approx(rates_of(peer, 100), rel=1e-12, abs=1e-18)
    if min_lr_ratio == 0:  # every other schedule rises in the same shape
        linear = OptimConfig(learning_rate=RATE, lr_scheduler_type="linear", warmup_steps=11, warmup_type=warmup_type)
        assert rates_of_ours(linear, 100)[:12] == pytest.approx(rates_of(peer, 100)[:1] + rates_of_ours(config, 100)[1:12])


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(("patience", "threshold", "factor", "min_lr"), [(0, 1e-4, 0.5, 0.0), (2, 0.02, 0.1, 1e-5), (5, 0.0, 0.7, 3e-4)])
def test_reduction_on_a_plateau_is_that_of_torch_after_every_evaluation(mode, patience, threshold, factor, min_lr):
    """Fails when: the rate falls at the patience-th bad evaluation, the bad ones are not counted again after a reduction, or a
    value that is not finite counts as better."""
    draw = torch.Generator().manual_seed(3)
    values = (2 - torch.arange(60) / 60 + 0.3 * torch.rand(60, generator=draw)).tolist()
    values[20], values[33] = math.nan, math.inf if mode == "min" else -math.inf
    values = [math.nan, *values, *[values[-1]] * 20]
    peer = get_scheduler(
        "reduce_lr_on_plateau", optimizer_at(),
        scheduler_specific_kwargs={"mode": mode, "patience": patience, "threshold": threshold, "factor": factor, "min_lr": min_lr, "eps": 0},
    )
    config = OptimConfig(
        learning_rate=RATE, lr_scheduler_type="reduce_lr_on_plateau", lr_patience=patience, lr_threshold=threshold,
        lr_gamma=factor, min_lr=min_lr,
    )
    schedule, seen, reductions = build_schedule(config, 100), [], 0
    for number, value in enumerate(values):
        better_is_less = -value if mode == "max" else value
        peer.step(value)
        seen.append(better_is_less)
        rate = peer.optimizer.param_groups[0]["lr"]
        assert RATE * schedule(number / 100, seen) == pytest.approx(rate, rel=1e-12), number
        reductions = reductions + (rate < RATE)
    assert reductions > 20
    assert plateau()([]) == 1.0


def test_warm_up_comes_before_a_plateau_and_its_evaluations_are_asked_for():
    """Fails when: the schedule takes evaluations that nobody passes for "none yet": the rate would never fall, in silence."""
    schedule = build_schedule(OptimConfig(lr_scheduler_type="reduce_lr_on_plateau", warmup_steps=4, lr_patience=0), 10)
    assert [schedule(step / 10, []) for step in (0, 1, 4, 9)] == [0.0, 0.25, 1.0, 1.0]
    assert schedule(0.1, [1.0, 2.0]) == 0.25 * 0.1
    with pytest.raises(Refusal, match=r"run\.objective"):
        schedule(0.5)


@pytest.mark.parametrize("num_steps", [10, 97])
@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 6, 9])
def test_warmup_stable_decay_is_that_of_transformers(num_steps, min_lr_ratio, warmup):
    """Fails when: its warm-up starts at 0 in place of the floor, or the decay is not cut to what warm-up leaves (9 of 10)."""
    settings = {"warmup_steps": warmup, "min_lr_ratio": min_lr_ratio, "lr_decay_ratio": 0.3}
    arguments = {"num_decay_steps": min(math.ceil(0.3 * num_steps), num_steps - warmup), "min_lr_ratio": min_lr_ratio}
    peer = get_scheduler("warmup_stable_decay", optimizer_at(), warmup, num_steps, scheduler_specific_kwargs=arguments)
    config = OptimConfig(learning_rate=RATE, lr_scheduler_type="warmup_stable_decay", **settings)
    assert rates_of_ours(config, num_steps) == pytest.approx(rates_of(peer, num_steps), rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("warmup", [0, 7])
def test_exponential_is_torchs_over_the_steps_after_warm_up(warmup):
    """Fails when: the exponent counts the steps of warm-up."""
    num_steps = 60
    peer = torch.optim.lr_scheduler.ExponentialLR(optimizer_at(), gamma=0.02 ** (1 / (num_steps - warmup)))
    config = OptimConfig(lr_scheduler_type="exponential", lr_gamma=0.02, warmup_steps=warmup)
    assert rates_of_ours(config, num_steps)[warmup:] == pytest.approx(rates_of(peer, num_steps - warmup), rel=1e-9)


@pytest.mark.parametrize(("drops", "warmup"), [(1, 0), (3, 0), (2, 10)])
def test_step_is_torchs_until_the_run_ends(drops, warmup):
    """Fails when: the parts are rounded down: the run would then hold one drop too many."""
    num_steps = 61
    part = math.ceil((num_steps - warmup) / (drops + 1))
    peer = torch.optim.lr_scheduler.StepLR(optimizer_at(), step_size=part, gamma=0.5)
    config = OptimConfig(lr_scheduler_type="step", lr_gamma=0.5, lr_cycles=drops, warmup_steps=warmup)
    ours = rates_of_ours(config, num_steps)
    assert ours[warmup:num_steps] == pytest.approx(rates_of(peer, num_steps - warmup)[:-1], rel=1e-12)
    assert ours[num_steps - 1] == pytest.approx(RATE * 0.5**drops)


@pytest.mark.parametrize("name", ["inverse_sqrt", "exponential", "step"])
def test_floor_stops_the_fall_of_schedules_without_an_end(name):
    """Fails when: the floor is dropped from any of the three."""
    config = OptimConfig(lr_scheduler_type=name, warmup_steps=2, min_lr_ratio=0.6)
    factor = build_schedule(config, 50)
    free = build_schedule(OptimConfig(lr_scheduler_type=name, warmup_steps=2), 50)
    points = [step / 50 for step in range(2, 51)]
    assert [factor(p) for p in points] == [max(0.6, free(p)) for p in points]
    assert factor(1.0) == 0.6


def test_warm_up_longer_than_the_run_is_all_warm_up_and_stays_in_bounds():
    """Fails when: the warm-up is cut to the run's length."""
    for name in ("linear", "cosine", "cosine_with_restarts", "polynomial", "step", "exponential", "warmup_stable_decay"):
        factor = build_schedule(OptimConfig(lr_scheduler_type=name, warmup_steps=100), 10)
        assert [factor(step / 10) for step in range(10)] == pytest.approx([step / 100 for step in range(10)]), name


def test_a_run_whose_only_step_has_rate_0_says_so(capsys):
    """Fails when: it is passed over, or said of a run that learns."""
    said = []
    for num_steps, warmup_steps in ((1, 0.05), (1, 0), (2, 0.05)):
        build_optimizer(torch.nn.Linear(2, 2), OptimConfig(warmup_steps=warmup_steps), num_steps)
        said.append("nothing is learned" in capsys.readouterr().out)
    assert said == [True, False, False]


def test_progress_between_steps_falls_between_their_rates():
    """Fails when: the step is rounded to a whole one: progress counts examples, and a last batch may be short."""
    factor = build_schedule(OptimConfig(lr_scheduler_type="cosine", warmup_steps=4), 20)
    for step in (2, 10):
        low, high = sorted((factor(step / 20), factor((step + 1) / 20)))
        assert low < factor((step + 0.5) / 20) < high
