"""Stochastic rounding: against the float32 step of the same optimizer, and through whole runs with weights in bfloat16."""

import contextlib
import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import toolkit as tk
from tests.optim.test_optim import DECAY, RATE, tiny_bert, tiny_llama
from toolkit.command_line.reading import read_command_line
from toolkit.config import OptimConfig, Refusal
from toolkit.config.rules import check_together
from toolkit.distributed.engines import plain
from toolkit.distributed.engines.choice import EngineChoice, FsdpChoice
from toolkit.distributed.engines.start import check_engine
from toolkit.optim import rounding
from toolkit.optim.optimizers import build_optimizer
from toolkit.optim.rounding import StochasticRounding, rounded_at_random
from toolkit.runs.run_card import describe_optimizer
from toolkit.system.devices import planned_for
from toolkit.training.anomalies import RANKS_APART
from toolkit.training.memory import _fits

OPTIMIZERS = ["adamw_torch", "sgd", "adafactor", "nadam", "radam", "rmsprop", "adagrad", "muon"]
HALF = ["--dtype", "bfloat16", "--stochastic-rounding", "--dropout", "0.1", "--model", "tiny-bert"]


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.RunConfig):
    pass


def settings(optim: str = "adamw_torch", **more: Any) -> OptimConfig:
    return OptimConfig(optim=optim, learning_rate=RATE, weight_decay=DECAY, stochastic_rounding=True, **more)


def give_gradients(model: torch.nn.Module, step: int) -> None:
    """The same for a copy in another type: a pure function of the parameter's place and the step."""
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * step + index)
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(model, step)
        optimizer.step()
        model.zero_grad(set_to_none=True)


def neighbors(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bfloat16 numbers next to float32 ones, towards zero and away from it."""
    inner = (numbers.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return inner, torch.where(inner == numbers, inner, (inner.view(torch.int32) + 0x10000).view(torch.float32))


def test_a_number_becomes_one_of_its_neighbors_and_their_mean_is_the_number() -> None:
    """Over 20,000 draws, to five standard errors. Fails when: a bit of the noise is missing, it is added with its sign, or to
    what was rounded to the nearest already."""
    numbers = torch.tensor([1 + 1 / 512, 1 + 1 / 300, -1 - 1 / 1024, 3e-40, -7.3e-12, 3.3e38])
    generator, inner, outer = torch.Generator().manual_seed(0), *neighbors(numbers)
    drawn = torch.stack([rounded_at_random(numbers, generator) for _ in range(20_000)]).float()
    assert bool(((drawn == inner) | (drawn == outer)).all())
    error = (drawn.double().mean(0) - numbers).abs() / (drawn.double().std(0) / 20_000**0.5)
    assert float(error.max()) < 5


def test_what_bfloat16_has_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks, the last of them short. Fails when: noise is drawn from 0 to 2**16, a block is left out, or NaN becomes zero."""
    monkeypatch.setattr(rounding, "_BLOCK", 16)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(7, 11, generator=generator).bfloat16()
    numbers[0, :4] = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0])
    found = rounded_at_random(numbers.float(), generator)
    assert torch.equal(found.view(torch.int16)[~numbers.isnan()], numbers.view(torch.int16)[~numbers.isnan()])
    assert bool(found[0, 2].isnan())


@pytest.mark.parametrize("make_model", [tiny_llama, tiny_bert])
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_each_step_is_the_float32_step_rounded_to_a_neighbor(optim: str, make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps, each compared with one that the same optimizer takes from the same weights and state in float32.

    Fails when: the state is kept in bfloat16, a part of the parameters is passed over or stepped twice, or gradients are lost.
    """
    monkeypatch.setattr(rounding, "_PART", 300)  # several parts
    half, whole = make_model().bfloat16(), make_model()
    optimizer, _ = build_optimizer(half, settings(optim), 10)
    reference, _ = build_optimizer(whole, OptimConfig(optim=optim, learning_rate=RATE, weight_decay=DECAY), 10)
    assert isinstance(optimizer, StochasticRounding)
    differ = 0
    for step in range(4):
        with torch.no_grad():
            for ours, theirs in zip(half.parameters(), whole.parameters(), strict=True):
                theirs.copy_(ours)
        train_steps(half, optimizer, range(step, step + 1))
        train_steps(whole, reference, range(step, step + 1))
        for (name, ours), theirs in zip(half.named_parameters(), whole.parameters(), strict=True):
            assert ours.dtype == torch.bfloat16
            inner, outer = neighbors(theirs.detach())
            assert bool(((ours == inner) | (ours == outer)).all()), name
            differ += int((ours != theirs.bfloat16()).sum())
            for key, value in reference.state[theirs].items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(optimizer.state[ours][key], value), (name, key)
    assert differ > 100  # rounded at random, not to the nearest


def test_small_updates_add_up() -> None:
    """1,000 SGD steps of 1e-5 from 1: nearest rounding never leaves 1. Fails when: every step draws the same random bits."""
    parameter = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = StochasticRounding(torch.optim.SGD([parameter], lr=1e-5))
    for _ in range(1000):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert float(parameter.detach().double().mean()) == pytest.approx(0.99, abs=5e-4)
    assert len(parameter.unique()) > 3  # each number draws bits of its own


def test_a_saved_optimizer_continues_to_the_bit() -> None:
    """Fails when: `rounded_updates` is not in the groups, or a loaded state is rounded to the type of the weights."""
    model = tiny_llama().bfloat16()
    optimizer, _ = build_optimizer(model, settings("nadam"), 10)
    train_steps(model, optimizer, range(2))
    other = copy.deepcopy(model)
    again, _ = build_optimizer(other, settings("nadam"), 10)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, stepped in ((model, optimizer), (other, again)):
        train_steps(each, stepped, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_clipping_and_a_gradient_that_is_not_finite(optim: str) -> None:
    """The engine's step, fused and not. Fails when: `grad_scale` or `found_inf` does not reach the inner optimizer."""
    accelerator = type("Plain", (), {"scaler": None})()
    model, loss = tiny_llama().bfloat16(), torch.tensor(1.0)
    optimizer, _ = build_optimizer(model, settings(optim), 10)
    give_gradients(model, 0)
    reference, scaled = copy.deepcopy(model), {}
    for (name, parameter), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        scaled[name] = parameter.grad.double()
        theirs.data = theirs.data.float()
    norm = torch.stack([gradient.norm() for gradient in scaled.values()]).norm()
    for name, parameter in reference.named_parameters():
        parameter.grad = (scaled[name] / (norm + 1e-6) * 0.5).float()
    plain_optimizer, _ = build_optimizer(reference, OptimConfig(optim=optim, learning_rate=RATE, weight_decay=DECAY), 10)
    plain_optimizer.step()
    metrics = plain.clip_and_update(accelerator, model, optimizer, loss, 0.5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(norm), rel=1e-5)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert float((ours.float() - theirs).abs().max()) <= 2**-7 * float(theirs.abs().max())
        key = "exp_avg" if optim == "adamw_torch" else None
        if key:
            torch.testing.assert_close(optimizer.state[ours][key], plain_optimizer.state[theirs][key], rtol=1e-5, atol=1e-9)
    before = copy.deepcopy([*model.parameters()])
    give_gradients(model, 1)
    next(iter(model.parameters())).grad[0, 0] = float("nan")
    assert float(plain.clip_and_update(accelerator, model, optimizer, loss, 0.5)["applied"]) == 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_micro_batches_add_up_in_float32() -> None:
    """1 and 2**-9, 512 times: in bfloat16 the sum stays 1. Fails when: `grad_dtype` is not set."""
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    build_optimizer(model, settings(), 10)
    for part in [1.0] + [2**-9] * 512:
        (model(torch.ones(1, 1, dtype=torch.bfloat16)).sum() * part).backward()
    assert model.weight.grad is not None
    assert float(model.weight.grad) == 2.0


def test_it_is_refused_or_named_where_it_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails when: the setting is taken with float32 weights or an engine that shards, or nobody hears of lost updates."""
    for engine in (EngineChoice("zero", zero_stage=2, mixed_precision="bf16"), EngineChoice("fsdp", fsdp=FsdpChoice())):
        with pytest.raises(Refusal, match="--stochastic-rounding"):
            check_engine(engine, Config(dtype="bfloat16", stochastic_rounding=True))
        check_engine(engine, Config(dtype="bfloat16"))
    with pytest.raises(Refusal, match=r"--stochastic-rounding .*float32"):
        check_together(read_command_line(Config, ["--stochastic-rounding"], {}, ""))
    check_together(read_command_line(Config, ["--stochastic-rounding", "--dtype", "bfloat16"], {}, ""))
    build_optimizer(tiny_llama(), settings(), 10)
    assert "--stochastic-rounding" in capsys.readouterr().out
    optimizer, _ = build_optimizer(tiny_llama().bfloat16(), OptimConfig(), 10)
    assert not isinstance(optimizer, StochasticRounding)
    assert "--stochastic-rounding" in capsys.readouterr().out


def test_the_run_card_has_the_optimizer_that_steps_and_that_it_rounds_at_random() -> None:
    """Fails when: the card names the wrapper, or leaves out the rounding."""
    plain, rounded = (describe_optimizer(build_optimizer(model, settings(), 10)[0]) for model in (tiny_llama(), tiny_llama().bfloat16()))
    assert plain is not None
    assert rounded == {**plain, "rounding": "stochastic"}


def test_the_trial_of_a_micro_batch_reserves_moments_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, 8 bytes a weight. Fails when: they are taken to have the type of the weights."""
    model, empty_like, reserved = tiny_llama().bfloat16(), torch.empty_like, []
    monkeypatch.setattr(torch, "empty_like", lambda p: reserved.append(p.nbytes) or empty_like(p))
    accelerator = SimpleNamespace(device=torch.device("cpu"), autocast=contextlib.nullcontext)
    train = SimpleNamespace(longest_micro_batch=lambda: {"input_ids": torch.ones(1, 5, dtype=torch.long)})
    optimizer = build_optimizer(model, settings(), 10)[0]
    assert _fits(accelerator, model, optimizer, train, lambda plain, inputs, _: (plain(**inputs).logits.float().sum(), {}), {})
    assert sum(reserved) == 8 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.fast(1)
@pytest.mark.parametrize("flags", [["--optim", "muon"], ["--gradient-accumulation-steps", "3", "--optim", "adamw_torch"]], ids=str)
def test_a_resumed_run_ends_in_the_same_bits(tiny: Any, flags: list[str]) -> None:
    """Stopped after step 3 of 8. Fails when: random bits follow a generator that no checkpoint has."""
    flags = [*HALF, "--max-steps", "8", "--save-steps", "2", *flags]
    whole = tiny.reference(*flags)
    stopped = tiny(*flags, "--stop-at-step", "3")
    assert stopped.code == 75, stopped.out[-2000:]
    resumed = tiny(*flags, "--resume")
    assert resumed.code == 0, resumed.out[-2000:]
    assert resumed.outcome == whole.outcome


@pytest.mark.slow
def test_two_ranks_hold_the_same_weights_and_learn_as_one(tiny: Any) -> None:
    """Losses as far as their rounding lets them agree. Fails when: a rank's own generator draws the random bits."""
    flags = ["--dtype", "bfloat16", "--stochastic-rounding", "--dropout", "0", "--max-steps", "6"]
    one = tiny.reference(*flags)
    two = tiny.ranks(2, *flags)
    assert [rank.code for rank in two] == [0, 0], two[0].out[-3000:]
    assert RANKS_APART not in two[0].out
    assert [event[1] for event in two[0].curve] == pytest.approx([event[1] for event in one.curve], rel=0.1)


def test_a_plan_for_a_gpu_rounds_a_tensor_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the GPU does; blocks for a CPU's cache are 122,000 of a model of eight billion.

    Fails when: the kind of device is that of the plan's tensors."""
    monkeypatch.setattr(rounding, "_BLOCK", 16)
    numbers, sizes = torch.randn(640), list[int]()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.overloadpacket is torch.ops.aten.random_:
                sizes.append(args[0].numel())
            return function(*args, **(kwargs or {}))

    for kind, wanted in (("cpu", [4] * 40), ("cuda", [160])):
        with planned_for(kind), Sizes():
            rounded_at_random(numbers, torch.Generator().manual_seed(0))
        assert sizes == wanted
        sizes.clear()
