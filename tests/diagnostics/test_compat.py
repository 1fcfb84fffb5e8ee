"""Names of torch and transformers that are not public, and that plan, doctor and profile need: each is where it was, and does
what it did.

A failure here after an upgrade says which function of toolkit/diagnostics/compat.py needs another name.
"""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from toolkit.diagnostics import compat
from toolkit.diagnostics.ledger import ENGINE, FAKE, Ledger, remember_operations
from toolkit.diagnostics.one_rank import as_first_rank


def test_a_mode_sees_every_operation_and_which_of_them_reads_a_value() -> None:
    """Fails when: `item()` is another operation, or a mode gets other arguments."""
    seen: list[bool] = []

    class Mode(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(compat.reads_a_value(func))
            return func(*args, **(kwargs or {}))

    one = torch.ones(1)
    with Mode():
        (one + one).item()
    assert seen == [False, True]
    assert compat.tree_leaves([one, {"a": (2, one)}]) == [one, 2, one]


@pytest.mark.parametrize("name", compat.WRITES_OF_MANY)
def test_many_tensors_are_changed_by_one_call(name: str) -> None:
    """Fails when: torch renames one, so that doctor no longer sees who changes gradients."""
    tensors = [torch.full((2,), 4.0), torch.full((1,), 6.0)]
    getattr(torch, name)(tensors, 2.0)
    made = {"mul": (8.0, 12.0), "div": (2.0, 3.0), "sub": (2.0, 4.0), "add": (6.0, 8.0)}[name.split("_")[2]]
    assert tuple(tensor[0].item() for tensor in tensors) == made


def test_an_index_is_chosen_and_written_by_these_operations_forward_and_backward() -> None:
    """By a mask and by places. Fails when: torch has another operation for one of them, which a plan would not know."""
    seen: set[object] = set()

    class Mode(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    rows = torch.ones(3, 2, requires_grad=True)
    with Mode():
        rows[torch.tensor([True, False, True])].sum().backward()
        torch.zeros(3)[torch.tensor([0, 1])] = 1.0
        torch.zeros(3).index_put((torch.tensor([0]),), torch.ones(1))
        torch.ops.aten._index_put_impl_(torch.zeros(3), [torch.tensor([0])], torch.ones(1), unsafe=True)
    assert seen >= set(compat.INDEXING)


def test_a_fake_tensor_has_a_device_and_a_storage_without_contents() -> None:
    """Fails when: torch moves fake tensors, or their storages have no keys of their own."""
    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        whole, other = torch.empty(10**12), torch.empty(10**12)
        view = whole[1:]
    assert isinstance(whole, compat.FakeTensor)
    assert (whole.device.type, whole.untyped_storage().nbytes()) == ("cpu", 4 * 10**12)
    keys = [compat.storage_key(tensor.untyped_storage()) for tensor in (view, whole, other)]
    assert keys[0] == keys[1] != keys[2]


def test_fake_tensors_of_a_plan_for_a_cpu_are_in_no_cache() -> None:
    """Nor is what one for a GPU left there. Fails when: torch names its switch otherwise, and the cache holds tensors and pieces
    of the heap that a run has not."""
    for kind, is_kept in (("cpu", False), ("cuda", True), ("cpu", False)):
        remember_operations(kind)
        with FAKE:
            torch.empty(3, 5, 7) + 1
        assert (compat.FakeTensorMode.cache_info().size > 0) == is_kept, kind


def test_what_is_written_to_a_modules_tables_are_its_parameters_and_buffers() -> None:
    """Fails when: a module keeps them elsewhere."""
    module = nn.BatchNorm1d(2)
    for table in compat.own_tables(module):
        for name, tensor in table.items():
            assert tensor is not None
            table[name] = nn.Parameter(tensor + 1) if isinstance(tensor, nn.Parameter) else tensor + 1
    assert (module.weight.tolist(), module.running_var.tolist()) == ([2.0, 2.0], [2.0, 2.0])


def test_the_history_of_cudas_allocator_is_recorded_by_these_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the names and their parameters alone. Fails when: torch renames one."""
    history, snapshot = torch.cuda.memory._record_memory_history, torch.cuda.memory._dump_snapshot
    assert list(inspect.signature(history).parameters)[:1] == ["enabled"]
    assert list(inspect.signature(snapshot).parameters)[:1] == ["filename"]
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled="all": calls.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    compat.record_gpu_memory()
    compat.write_gpu_memory(Path("here"))
    assert calls == ["all", "here", None]


def test_a_random_model_has_the_type_of_its_config() -> None:
    """Fails when: `_from_config` of transformers' models is renamed: those of their constructor are float32."""
    from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9, dtype="bfloat16"
    )
    for kind in (LlamaForCausalLM, AutoModel):
        model = compat.random_model(kind, config)
        assert next(model.parameters()).dtype == torch.bfloat16


def test_transformers_says_in_one_place_whether_torch_multiplies_experts_weights() -> None:
    """Fails when: the function has another name or takes other arguments, and a plan of experts in float32 is refused."""
    weight = torch.zeros(2, 4, 4)
    assert compat.products_of_experts()._can_use_grouped_mm(input=weight[0], weight=weight, offs=torch.tensor([2, 4])) is True


def test_a_group_of_nobody_has_ranks_and_shards_at_once() -> None:
    """Layers that FSDP2 shards over two ranks, of which there is one: half of the weights, and a gathered layer besides.

    Fails when: torch renames its fake group, FSDP2 resizes no storage of `torch.UntypedStorage`, or moves to another folder.
    """
    from torch.distributed.fsdp import fully_shard

    ledger, one = Ledger(), 4 * 64 * 64
    with as_first_rank(2, {}), compat.resized_storages(ledger.resized):
        torch.distributed.init_process_group("gloo")
        with compat.FakeTensorMode(allow_non_fake_inputs=True):
            model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        with ledger:
            for layer in (*model, model):
                fully_shard(layer)
            for parameter in model.parameters():
                ledger.see(parameter, "weights")
            model(torch.zeros(1, 64))
        assert torch.distributed.get_world_size() == 2
    assert ledger.at_peak["weights"] == 2 * one
    assert one <= ledger.at_peak[ENGINE] <= 4 * one
    assert not torch.distributed.is_initialized()
