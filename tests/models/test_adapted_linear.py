"""A linear layer with its LoRA update as one operation: what it computes is what peft's own layer does, wherever it does it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import pytest
import torch
from torch import nn

import toolkit as tk
from toolkit.models.adapted_linear import AdaptedLinear, take_fast_updates

DEVICES = [
    "cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])
]  # fmt: skip


class TwoLayers(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 40, bias=bias), nn.Linear(40, 7, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def pair(bias: bool = True, dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[Any, Any]:
    """The same adapted model twice, nowhere zero: with peft's layers, and with these."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=10, target_modules=["first", "second"], **settings)
    of_peft = peft.get_peft_model(TwoLayers(bias), config).to(dtype)
    for name, parameter in of_peft.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter)
    ours = copy.deepcopy(of_peft)
    take_fast_updates(ours)
    assert [type(module) for module in adapted(ours)] == [AdaptedLinear] * 2
    return of_peft, ours


def adapted(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, peft.tuners.lora.Linear)]


def results(model: Any, shape: tuple[int, ...] = (3, 5, 24)) -> dict[str, torch.Tensor]:
    """Outputs and the gradients of the input and of all parameters that have one."""
    first = next(model.parameters())
    x = torch.linspace(-2, 2, 360, dtype=torch.float64)[: torch.Size(shape).numel()].view(shape).sin()
    x = x.to(first).requires_grad_()
    torch.manual_seed(1)
    y = model(x)
    (y.double() * torch.linspace(-1, 1, y.numel()).to(y.device).double().view_as(y)).sum().backward()
    trained = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"y": y.detach(), "x": x.grad, **trained}


def farthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name].double() - value).norm() / value.double().norm()) for name, value in expected.items())


def computes_itself(layer: Any) -> bool:
    output = layer(torch.ones(2, layer.in_features).to(layer.base_layer.weight).requires_grad_())
    return type(output.grad_fn).__name__ == "_AdaptedBackward"


@pytest.mark.parametrize("shape", [(3, 5, 24), (7, 24), (24,)])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_pefts_layer(bias: bool, shape: tuple[int, ...]) -> None:
    """In float64, with a scale of 2.5. Fails when: the scale or the bias is left out anywhere, or the input's gradient lacks a part."""
    of_peft, ours = pair(bias)
    assert all(map(computes_itself, adapted(ours)))
    assert not any(map(computes_itself, adapted(of_peft)))
    found = results(ours, shape)
    assert len(found) == 6
    assert farthest(found, results(of_peft, shape)) < 1e-14


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", [torch.float32, torch.bfloat16])
def test_under_autocast_it_is_as_near_to_float64_as_pefts_layer(frozen: torch.dtype, device: str) -> None:
    """With the frozen weights in float32 or already in bfloat16. Fails when: an operand keeps its type."""
    of_peft, ours = pair(dtype=torch.float32)
    for model in (of_peft, ours):
        for layer in adapted(model.to(device)):
            layer.base_layer.weight.data = layer.base_layer.weight.data.bfloat16().to(frozen)
    exact = results(copy.deepcopy(of_peft).double())
    with torch.autocast(device, torch.bfloat16):
        assert all(map(computes_itself, adapted(ours)))
        errors = [farthest(results(model), exact) for model in (of_peft, ours)]
    assert 1e-3 < errors[1] < 1.3 * errors[0] < 0.03


def test_an_output_may_be_changed_in_place() -> None:
    """As that of any linear layer, by a model's own code. Fails when: a view is returned, which torch refuses to change."""
    layer, x = adapted(pair()[1])[0], torch.linspace(-1, 1, 48).double().view(2, 24).requires_grad_()
    expected = torch.autograd.grad((layer(x) * 2).sum(), x)[0]
    changed = layer(x).mul_(2)
    assert torch.equal(torch.autograd.grad(changed.sum(), x)[0], expected)


def test_hooks_of_accelerate_and_of_gradients_are_called() -> None:
    """Fails when: has_hooks knows the hooks of forward passes alone."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Thrice(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 3

    models, called = pair(), list[Any]()
    for model in models:
        first, second = adapted(model)
        add_hook_to_module(first.base_layer, Thrice())
        second.lora_B["default"].register_full_backward_hook(lambda *_: called.append(1))
    assert farthest(results(models[1]), results(models[0])) == 0
    assert len(called) == 2


def test_a_model_without_memory_gives_shapes() -> None:
    """Fails when: torch is asked whether there is autocast on the meta device, which it refuses."""
    ours = pair(dtype=torch.float32)[1].to("meta")
    assert ours(torch.empty(2, 24, device="meta")).shape == (2, 7)


def test_autocast_leaves_float64_alone() -> None:
    """Fails when: operands in float64 are cast."""
    of_peft, ours = pair()
    with torch.autocast("cpu", torch.bfloat16):
        assert farthest(results(ours), results(of_peft)) < 1e-14


def _second_adapter(model: Any) -> None:
    torch.manual_seed(2)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["first", "second"], init_lora_weights=False))
    model.double().base_model.set_adapter(["default", "other"])


def _trained_base(model: Any) -> None:
    for layer in adapted(model):
        layer.base_layer.requires_grad_(True)


def _hook(part: str) -> Callable[[Any], None]:
    def add(model: Any) -> None:
        for layer in adapted(model):
            module = layer.base_layer if part == "base_layer" else getattr(layer, part)["default"]
            module.register_forward_hook(lambda module, inputs, output: output * 3)

    return add


def _hook_before(model: Any) -> None:
    for layer in adapted(model):
        layer.lora_B["default"].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3,))


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _other_class(model: Any) -> None:
    for layer in adapted(model):
        layer.base_layer.__class__ = Doubled


def _other_type(model: Any) -> None:
    for layer in adapted(model):
        layer.base_layer.float()


OTHER_CASES: dict[str, tuple[dict[str, Any], Callable[[Any], object]]] = {
    "dropout": ({"lora_dropout": 0.5}, lambda model: None),
    "DoRA": ({"use_dora": True}, lambda model: None),
    "a bias of the update": ({"lora_bias": True}, lambda model: None),
    "merged": ({}, lambda model: model.merge_adapter()),
    "disabled": ({}, lambda model: model.base_model.disable_adapter_layers()),
    "two adapters": ({}, _second_adapter),
    "weights that train": ({}, _trained_base),
    "a hook on the layer": ({}, _hook("base_layer")),
    "a hook on A": ({}, _hook("lora_A")),
    "a hook on B": ({}, _hook("lora_B")),
    "a hook before B": ({}, _hook_before),
    "a layer of another class": ({}, _other_class),
    "weights of another type": ({}, _other_type),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_CASES)
def test_whatever_else_there_is_stays_pefts(case: str) -> None:
    """The same numbers and the same gradients, to the bit. Fails when: the condition that keeps the case out is removed."""
    settings, change = OTHER_CASES[case]
    of_peft, ours = pair(**settings)
    for model in (of_peft, ours):
        change(model)
    found, expected = results(ours), results(of_peft)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert not all(map(computes_itself, adapted(ours)))


def test_rows_that_name_their_adapter_are_pefts() -> None:
    """Fails when: what a call has next to the rows is dropped."""
    of_peft, ours = pair()
    of_peft.eval(), ours.eval()
    x, names = torch.ones(2, 24, dtype=torch.float64), ["__base__", "default"]
    found, expected, whole = (adapted(model)[0](x, **settings) for model, settings in (
        (ours, {"adapter_names": names}), (of_peft, {"adapter_names": names}), (ours, {}),
    ))  # fmt: skip
    assert torch.equal(found, expected)
    assert not torch.equal(found[0], whole[0])


def test_compiled_layers_are_pefts_for_the_compiler_to_fuse() -> None:
    """Fails when: the operation is a block in the graph that nothing is fused with."""
    graphs: list[str] = []

    def kept(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph.code)
        return graph.forward

    of_peft, ours = pair()
    compiled = torch.compile(ours, backend=kept, fullgraph=True)
    assert farthest(results(compiled._orig_mod), results(of_peft)) < 1e-14
    assert torch.allclose(compiled(torch.ones(2, 24).double()), of_peft(torch.ones(2, 24).double()))
    assert graphs
    assert not any("autograd" in code for code in graphs)


def test_dropout_that_is_off_stands_in_the_way_of_nothing() -> None:
    """In evaluation. Fails when: a layer with dropout is peft's at all times."""
    of_peft, ours = pair(lora_dropout=0.5)
    assert all(map(computes_itself, adapted(ours.eval())))
    assert farthest(results(ours), results(of_peft.eval())) < 1e-14


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.AdapterConfig, tk.DataConfig):
    use_peft: bool = True
    vocab_size: int | None = 300
    hidden_size: int | None = 32
    num_hidden_layers: int | None = 1


def test_the_recipes_adapter_has_these_layers_and_merges_as_pefts() -> None:
    """Fails when: add_adapter leaves peft's layers in place, or what is merged is not what was computed."""
    config = Config()
    model = tk.add_adapter(tk.load_model("AutoModelForCausalLM", config, None), config)
    assert len(adapted(model)) == 7
    assert all(map(computes_itself, adapted(model)))
    for layer in adapted(model):
        nn.init.normal_(layer.lora_B["default"].weight)
    ids = torch.arange(12)[None]
    before = model(input_ids=ids).logits
    merged = model.merge_and_unload()
    assert not adapted(merged)
    assert torch.allclose(merged(input_ids=ids).logits, before, atol=1e-4)
