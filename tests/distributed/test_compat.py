"""Names of other libraries that are not public, and that the engines need: each is where it was, and does what it did.

A failure here after an upgrade says which function of toolkit/distributed/compat.py needs another name.
"""

import copy
import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from toolkit.distributed import compat


def test_the_state_that_accelerate_keeps_for_a_process_is_found_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: Accelerate renames a key of its states, or keeps them elsewhere."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    for state in (PartialState, AcceleratorState):
        monkeypatch.setattr(state, "_shared_state", {})
    assert (compat.process_state(), compat.settled_precision()) == ({}, None)
    state = Accelerator(mixed_precision="bf16", cpu=True).state
    assert (compat.process_state()["device"].type, compat.settled_precision()) == ("cpu", "bf16")
    compat.settle_distributed_type(DistributedType.FSDP)
    assert state.distributed_type == PartialState().distributed_type == DistributedType.FSDP
    compat.forget_process_state()
    assert (compat.process_state(), compat.settled_precision()) == ({}, None)


def test_a_copy_of_a_prepared_model_computes_as_before() -> None:
    """Fails when: Accelerate keeps the forward pass that it has replaced under another name (accelerator.py: prepare_model)."""
    from accelerate import Accelerator

    compat.forget_process_state()
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare(nn.Linear(2, 2))
    copied = copy.deepcopy(model)
    assert vars(copied).keys() - vars(nn.Linear(2, 2)).keys() == {"forward", "_original_forward", "_is_accelerate_prepared"}
    compat.as_before_prepare(copied)
    assert not vars(copied).keys() & {"forward", "_original_forward"}
    assert (model(torch.ones(1, 2)) != copied(torch.ones(1, 2))).any()
    assert "forward" in vars(model)
    compat.forget_process_state()


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_prepare_goes_through_the_method_that_is_replaced(engine: str) -> None:
    """Fails when: `accelerator.prepare` no longer calls the method of that name."""
    from accelerate import Accelerator

    assert f"self._prepare_{engine}(" in inspect.getsource(Accelerator.prepare)
    seen: list[nn.Module] = []
    accelerator, model = SimpleNamespace(**{f"_prepare_{engine}": lambda *objects: objects}), nn.Linear(2, 2)
    compat.before_prepare(accelerator, engine, seen.append)
    assert getattr(accelerator, f"_prepare_{engine}")(3, model) == (3, model)
    assert seen == [model]


def test_a_launch_file_is_read_by_accelerates_own_parser(tmp_path) -> None:
    """Fails when: accelerate.commands.launch has no `_validate_launch_command`, or it returns something else."""
    from accelerate.commands.launch import launch_command_parser

    path = tmp_path / "launch.yaml"
    path.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16\n")
    arguments, has_precision = compat.checked_launch_arguments(launch_command_parser().parse_args(["--config_file", str(path), "x.py"]))
    assert (arguments.num_processes, arguments.mixed_precision, has_precision) == (2, "bf16", True)


def test_names_of_torch_are_where_they_were() -> None:
    """Fails when: torch moves one of them. That a shard is found right is proven by tests/devices/."""
    from torch.distributed import distributed_c10d
    from torch.distributed.tensor import _utils

    parameters = inspect.signature(_utils.compute_local_shape_and_global_offset).parameters
    assert list(parameters)[:3] == ["global_shape", "mesh", "placements"]
    assert callable(distributed_c10d._get_default_store)
    assert isinstance(distributed_c10d._world.pg_map, dict)
    assert callable(torch.distributed.ProcessGroup._get_sequence_number_for_group)
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    compat.scale_together(tensors, 0.5)
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [1.0, 1.0, 1.0]]
    model = nn.Linear(2, 2)
    compiled = torch.compile(model)
    assert compat.is_compiled_whole(compiled)
    assert not compat.is_compiled_whole(model)
    assert compat.original_of(compiled) is model


def test_a_model_names_the_layers_that_stay_whole() -> None:
    """Fails when: transformers' models have no `_no_split_modules`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
    assert compat.layer_classes(model) == {"LlamaDecoderLayer"}
    assert compat.layer_classes(nn.Linear(1, 1)) == set()


def test_names_of_deepspeed_are_where_they_were() -> None:
    """Fails when: DeepSpeed moves one of them. That pieces and norms are right is proven by tests/devices/."""
    pytest.importorskip("deepspeed")
    communication = importlib.import_module("deepspeed.comm.torch")
    tensor_fragment = importlib.import_module("deepspeed.utils.tensor_fragment")  # the package has a class of that name
    from deepspeed.runtime.zero import stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    assert callable(communication.build_shm_op)
    assert callable(DeepSpeedZeroOptimizer.scaled_global_norm)
    assert "self._get_norm_groups()" in inspect.getsource(stage3)
    assert "._hp_mapping" in inspect.getsource(tensor_fragment)
    fields = tensor_fragment.tensor_fragment.__dataclass_fields__
    assert {"lp_fragment_address", "hp_fragment_address"} <= fields.keys()
    assert {"start", "numel"} <= tensor_fragment.fragment_address.__dataclass_fields__.keys()
    sharded = SimpleNamespace()
    with compat.infinite_norm(sharded):
        assert sharded.scaled_global_norm() == float("inf")
        assert sharded._get_norm_groups() == [float("inf")]
    assert vars(sharded) == {}
