"""Dropout on a CPU: the rate, the scale, one mask for both directions, and who gets it."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import toolkit as tk
from toolkit.models.dropout import FastDropout

SHAPE = (257, 1001)  # not a multiple of the four numbers that a draw gives


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.AdapterConfig, tk.DataConfig):
    model: str = "tiny-bert"
    hidden_size: int | None = 32
    num_hidden_layers: int | None = 2
    vocab_size: int | None = 300


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.97])
def test_numbers_are_left_out_at_the_rate_and_the_rest_keep_the_mean(dtype: torch.dtype, rate: float) -> None:
    """To five standard deviations of a fair draw; what is left is the number / (1 - rate). Fails when: the comparison is of unsigned
    bits, the scale is left out, or a draw serves several numbers (by the neighbors that go together)."""
    torch.manual_seed(0)
    numbers = torch.rand(SHAPE).add(1).to(dtype)
    found = FastDropout(rate)(numbers)
    left = found != 0
    spread = math.sqrt(rate * (1 - rate) / left.numel())
    assert abs(left.double().mean().item() - (1 - rate)) < 5 * spread
    assert torch.allclose(found[left].double(), numbers[left].double() / (1 - rate), rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=0)
    for apart in (1, 2, 3, 4, SHAPE[1]):
        both = (left.flatten()[apart:] & left.flatten()[:-apart]).double().mean().item()
        assert abs(both - (1 - rate) ** 2) < 5 * math.sqrt(both / left.numel()) + 1e-4, apart


def test_the_gradient_passes_where_the_number_did_and_recomputation_draws_the_same() -> None:
    """Fails when: the backward pass draws again, or has no scale."""
    numbers, of_output = torch.rand(SHAPE).add(1).requires_grad_(), torch.rand(SHAPE)
    outputs, gradients = [], []
    for forward in (FastDropout(0.3), lambda each: checkpoint(FastDropout(0.3), each, use_reentrant=False)):
        torch.manual_seed(1)
        outputs.append(forward(numbers))
        gradients.append(torch.autograd.grad(outputs[-1], numbers, of_output)[0])
    assert torch.allclose(gradients[0], of_output * outputs[0] / numbers, rtol=1e-5, atol=0)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(gradients[0], gradients[1])


def test_what_draws_nothing_or_is_not_on_a_cpu_is_torchs() -> None:
    """Fails when: evaluation or a rate of 0 or 1 draws, or a tensor of another device comes to the CPU's draw."""
    numbers = torch.rand(5, 7)
    for made, expected in ((FastDropout(0.0), numbers), (FastDropout(1.0), numbers * 0), (FastDropout(0.5).eval(), numbers)):
        assert torch.equal(made(numbers), expected)
    assert FastDropout(0.5)(torch.rand(3, device="meta")).is_meta
    in_place = numbers.clone()
    assert FastDropout(0.5, inplace=True)(in_place) is in_place


@pytest.mark.parametrize("use_peft", [False, True])
def test_a_model_and_its_adapter_have_it(use_peft: bool) -> None:
    """Fails when: load_model or add_adapter keeps torch's."""
    config = Config(dropout=0.1, max_length=16, **({"use_peft": True, "lora_dropout": 0.2} if use_peft else {}))
    model = tk.add_adapter(tk.load_model("AutoModelForSequenceClassification", config, num_labels=2), config)
    found = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert {module.p for module in found} == ({0.1, 0.2} if use_peft else {0.1})
    assert {type(module) for module in found} == {FastDropout}
    assert all(module.training for module in found)
