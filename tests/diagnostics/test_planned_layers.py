"""What a plan keeps of compiled layers, next to layers that torch.compile has compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import toolkit as tk
from toolkit.diagnostics.compat import as_compiled
from toolkit.diagnostics.ledger import FAKE, Ledger, as_fake
from toolkit.diagnostics.planned_layers import PlannedLayers
from toolkit.diagnostics.replacements import Replacements
from toolkit.models.attention import kernels
from toolkit.models.layers import compile_layers


def kept(logits: torch.Tensor, model: torch.nn.Module) -> list[list[tuple[torch.Size, torch.dtype]]]:
    """Shapes and types of what each compiled function keeps for backward, but for parameters, from the last to the first."""
    found, nodes, seen = [], [logits.grad_fn], set()
    parameters = {id(parameter) for parameter in model.parameters()}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CompiledFunction" in type(node).__name__:
            tensors = [each for each in node.saved_tensors if id(each) not in parameters]
            found.append(sorted(((each.shape, each.dtype) for each in tensors), key=str))
        nodes += [earlier for earlier, _ in node.next_functions]
    return found


def run(model: torch.nn.Module) -> torch.Tensor:
    """With a mask that is given: transformers looks into ids for one, and a fake tensor has no values."""
    ids, mask = torch.zeros(2, 24, dtype=torch.long), torch.ones(2, 1, 24, 24, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        logits: torch.Tensor = model(ids, attention_mask=mask, use_cache=False).logits
    return logits


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_a_planned_layer_keeps_what_a_compiled_one_keeps(name: str) -> None:
    """Dynamo, AOTAutograd and inductor's partitioner on real tensors, without inductor's C++: the same tensors, for each layer.

    Fails when: `as_compiled` cuts with torch's default partition, which keeps all that backward reads.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compilers import nop
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table

    def load() -> Any:
        return tk.load_model("AutoModelForCausalLM", tk.ModelConfig(model=name, num_hidden_layers=2)).train()

    real = load()
    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=nop, bw_compiler=nop, partition_fn=partition_fn, decompositions=select_decomp_table()
    )
    for layer in real.model.layers:
        layer.compile(backend=backend)
    expected = kept(run(real), real)

    planned, ledger = load(), Ledger()
    layers = PlannedLayers(ledger)
    with Replacements() as replace:
        layers.replace(replace)
        compile_layers(planned, recomputed=False)
        as_fake(planned)
        with ledger, FAKE:
            first, second = run(planned), run(planned)
    assert len(expected) == 2
    assert kept(first, planned) == kept(second, planned) == expected
    assert not layers.given_up


def test_a_compiled_layer_that_is_recomputed_can_be_traced() -> None:
    """Fails when: the checkpoint around a layer counts what its trace saves, and finds less when it runs the layer again."""
    planned, ledger = tk.load_model("AutoModelForCausalLM", tk.ModelConfig(model="tiny-llama", num_hidden_layers=2)), Ledger()
    layers = PlannedLayers(ledger)
    with Replacements() as replace:
        layers.replace(replace)
        compile_layers(planned.train(), recomputed=True)
        as_fake(planned)
        with ledger, FAKE:
            run(planned).sum().backward()
    assert planned.model.layers[0].mlp.up_proj.weight.grad.shape == planned.model.layers[0].mlp.up_proj.weight.shape
    assert not layers.given_up


def test_a_layer_that_cannot_be_traced_runs_as_it_is_written() -> None:
    """Fails when: the exception of a trace ends the plan, the layer is traced again in each call, or what a trace makes is counted."""
    traced, ledger = [], Ledger()

    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = ledger.total
            made = torch.empty(1000)
            traced.append(ledger.total > before)
            if isinstance(x, torch._subclasses.functional_tensor.FunctionalTensor):
                raise NotImplementedError
            return super().forward(x) + made[0]

    layers, layer = PlannedLayers(ledger), as_fake(Layer(3, 3))
    with Replacements() as replace:
        layers.replace(replace)
        layer.compile()
        with ledger, FAKE:
            x = torch.ones(2, 3)
            assert layer(x).shape == layer(x).shape == (2, 3)
    assert layers.given_up
    assert traced == [False, True, True]


def test_a_loop_over_documents_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace would take the lengths of fake documents for those of the row, for good. Fails when: `_loop` lets it in."""

    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return kernels.loop_kernel(super().forward(x))

    monkeypatch.setattr(kernels, "loop_kernel", lambda states: states)
    layers, layer = PlannedLayers(Ledger()), as_fake(Layer(3, 3))
    with Replacements() as replace:
        layers.replace(replace)
        layer.compile()
        with FAKE:
            assert layer(torch.ones(2, 3)).shape == (2, 3)
    assert layers.given_up


def test_a_traced_function_is_what_it_was() -> None:
    """Fails when: forward and backward of `as_compiled` are those of another function."""
    x, weight = torch.randn(5, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)

    def function(weights: list[torch.Tensor], tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.silu(tensors[0] @ weights[0])

    for compute in (function, as_compiled(function)):
        grads = torch.autograd.grad(compute([weight], [x]).square().sum(), [x, weight])
        assert torch.allclose(grads[0], torch.autograd.grad(function([weight], [x]).square().sum(), x)[0], atol=1e-6)


def test_dropout_is_traced() -> None:
    """What is dropped has no gradient. Fails when: inductor's passes find no fake mode, and the layer is given up."""

    def function(weights: list[torch.Tensor], tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.dropout(tensors[0] * weights[0], 0.5)

    x, weight = torch.ones(200, requires_grad=True), torch.ones(200, requires_grad=True)
    output = as_compiled(function)([weight], [x])
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(gradient, output)
    assert 40 < int((output == 0).sum()) < 160


def test_a_layer_of_sharded_weights_is_not_traced() -> None:
    """Fails when: the trace goes through an engine's hooks, which gather weights around the modules in it."""
    layers, layer = PlannedLayers(Ledger()), as_fake(torch.nn.Linear(3, 3))
    layers.has_whole_weights = False
    with Replacements() as replace:
        layers.replace(replace)
        layer.compile()
        with FAKE:
            layer(torch.ones(2, 3))
    assert layers.given_up
