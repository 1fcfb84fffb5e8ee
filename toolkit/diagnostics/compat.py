"""Names of other libraries that are not public, which commands need that look at a recipe; tests/diagnostics/test_compat.py
fails when one moves.

Seen in torch 2.13 and transformers 5.23.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "tree_flatten", "tree_leaves", "tree_unflatten"]

# -- torch -----------------------------------------------------------------------------------------------------------

# What changes many tensors in place, in one call.
WRITES_OF_MANY = ("_foreach_mul_", "_foreach_div_", "_foreach_sub_", "_foreach_add_")
# The operations by which an index or a mask chooses elements, forward and backward.
INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_)


def reads_a_value(function: object) -> bool:
    """Whether an operation of a dispatch mode is `tensor.item()`."""
    return function is torch.ops.aten._local_scalar_dense.default


def storage_key(storage: torch.UntypedStorage) -> int:
    """Of no other storage that is live, and the same whichever view it is asked of; fake ones have no address."""
    return storage._cdata


def own_tables(module: nn.Module) -> Iterator[dict[str, torch.Tensor | None]]:
    """The dictionaries in which a module itself keeps its parameters and its buffers."""
    yield module._parameters  # type: ignore[misc]
    yield module._buffers


def as_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors, traced when it is first called and cut into a forward and a backward as inductor cuts it."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.compilers import nop
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    def cut(joint: Any, inputs: Any, **named: Any) -> Any:
        mode = next((each.fake_mode for each in tree_leaves(inputs) if isinstance(each, FakeTensor)), None)
        with V.set_fake_mode(mode):  # asked for by the random numbers of dropout
            return partition_fn(joint, inputs, **named)

    return aot_function(function, nop, nop, cut, select_decomp_table())


def with_tensors(module: nn.Module, tensors: dict[str, torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """A block in which a module has other tensors as its parameters."""
    return torch.nn.utils.stateless._reparametrize_module(module, tensors)


def record_gpu_memory() -> None:
    """From now on CUDA's allocator notes where each block is asked for."""
    torch.cuda.memory._record_memory_history()


def write_gpu_memory(path: Path) -> None:
    """Write what was noted since `record_gpu_memory`, for https://pytorch.org/memory_viz, and end it."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def start_group_of_nobody(start: Callable[..., None], rank: int, world_size: int) -> None:
    """Make the default group one whose collectives move nothing and return at once; torch has it for its own tests."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # which registers it
    start("fake", rank=rank, world_size=world_size, store=torch.distributed.HashStore())


def calling_engine() -> str:
    """Which engine itself calls the operation that a dispatch mode has before it: "deepspeed", "fsdp", or none ("")."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/deepspeed/" in file:
            return "deepspeed"
        if "/torch/distributed/fsdp/" in file:
            return "fsdp"
        if "/torch/" not in file or file.endswith("/torch/autograd/graph.py"):  # from there, C++ calls the model's backward
            return ""
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def resized_storages(see: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `see` with each storage whose size is changed in this block: no dispatch mode sees that."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        changed = resize(storage, size)
        see(storage)
        return changed

    torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def shapes_of_whole_tensors() -> tuple[type, str]:
    """The class and its method that make fake tensors of a DTensor's whole shape, the first time that an operation comes."""
    propagation = importlib.import_module("torch.distributed.tensor._sharding_prop")
    return propagation.ShardingPropagator, "_propagate_tensor_meta_non_cached"


# -- DeepSpeed -------------------------------------------------------------------------------------------------------


def forget_deepspeed() -> None:
    """As before the first engine of the process, where DeepSpeed was imported."""
    if "deepspeed" in sys.modules:
        sys.modules["deepspeed.comm.comm"].cdb = None  # type: ignore[attr-defined]
        groups = sys.modules["deepspeed.utils.groups"]
        for name, value in list(vars(groups).items()):  # it keeps the group that was destroyed
            if isinstance(value, torch.distributed.ProcessGroup):
                setattr(groups, name, None)


# -- transformers ----------------------------------------------------------------------------------------------------


def random_model(model_class: type, config: PretrainedConfig) -> PreTrainedModel:
    """A model with random weights of a class of transformers or an Auto class, of the type that the config names."""
    build: Any = getattr(model_class, "_from_config", None) or model_class.from_config  # type: ignore[attr-defined]
    return build(config)


def products_of_experts() -> ModuleType:
    """Where transformers multiplies weights of experts; its `_can_use_grouped_mm` says whether torch does that."""
    return importlib.import_module("transformers.integrations.moe")
