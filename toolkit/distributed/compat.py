"""Names of other libraries that are not public, which the engines need; tests/distributed/test_compat.py fails when one moves.

Seen in Accelerate 1.15, DeepSpeed 0.19.8, torch 2.13, transformers 5.23.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from argparse import Namespace

    from accelerate import Accelerator
    from accelerate.utils import DistributedType
    from torch.distributed import Store
    from torch.distributed.tensor import DTensor

# -- Accelerate ------------------------------------------------------------------------------------------------------


def process_state() -> dict[str, Any]:
    """What Accelerate has settled for this process: device, distributed type; empty before the first Accelerator."""
    from accelerate.state import PartialState

    return PartialState._shared_state


def settled_precision() -> str | None:
    """The mixed precision of this process's Accelerators, None before the first."""
    from accelerate.state import AcceleratorState

    return AcceleratorState._shared_state.get("_mixed_precision")


def forget_process_state() -> None:
    """As before the first Accelerator of the process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def settle_distributed_type(kind: DistributedType) -> None:
    """Change what Accelerate has found: it takes FSDP for accelerators only, and torch shards over CPU ranks as well."""
    from accelerate.state import AcceleratorState, PartialState

    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = kind


def before_prepare(accelerator: Accelerator, engine: str, action: Callable[[nn.Module], None]) -> None:
    """Call `action(model)` when `accelerator.prepare` gets the model; `engine`: "deepspeed" or "fsdp2"."""
    name = f"_prepare_{engine}"
    prepare = getattr(accelerator, name)

    def prepared(*objects: Any) -> Any:
        for model in (each for each in objects if isinstance(each, nn.Module)):
            action(model)
        return prepare(*objects)

    setattr(accelerator, name, prepared)


def as_before_prepare(copied: nn.Module) -> None:
    """Take from a copy of a prepared model the forward pass in the run's precision, which is the original's own."""
    for name in ("forward", "_original_forward"):
        vars(copied).pop(name, None)


def checked_launch_arguments(arguments: Namespace) -> tuple[Namespace, bool]:
    """What `accelerate launch` makes of its arguments and its file, and whether the file has the precision."""
    from accelerate.commands.launch import _validate_launch_command

    arguments, _, has_precision = _validate_launch_command(arguments)
    return arguments, has_precision


# -- torch -----------------------------------------------------------------------------------------------------------


def local_shape_and_offset(parameter: DTensor) -> tuple[torch.Size, tuple[int, ...]]:
    """Of this rank's part of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, first = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return torch.Size(shape), first


def default_store() -> Store:
    """The store in which the ranks of the default group have met."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def collectives_entered() -> int:
    """How many collectives this process has entered, of the groups that every rank is in and whose backend counts them."""
    from torch.distributed import distributed_c10d

    entered, everyone = 0, torch.distributed.get_world_size()
    for group in list[Any](distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # of a backend that doesn't count
            entered += group._get_sequence_number_for_group() if group.size() == everyone else 0
    return entered


def import_before_the_default_group() -> None:
    """To be called before the default group is made: imported later, as DDP does, this module takes it as the default of its
    arguments, and so it's never destroyed. Gloo's threads then outlive Python, and may abort the process (pytorch#190489)."""
    importlib.import_module("torch.distributed.nn.functional")


def free_reducers(model: nn.Module) -> None:
    """Take from DDP the C++ objects that hold its process group, while torch.distributed still holds it too.

    Were one of them the last to hold it, the group would be destroyed under Python's lock, and wait for Gloo's threads, which
    need that lock to drop the tensors of a collective that has just ended: the process would never end (pytorch#56297). The
    model computes as before, but gradients are no longer exchanged.
    """
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module.reducer = module.logger = None


def scale_together(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply tensors in place, many in one kernel."""
    torch._foreach_mul_(tensors, factor)


def is_compiled_whole(model: nn.Module) -> bool:
    """Whether a model is torch.compile's wrapper of another."""
    return type(model).__name__ == "OptimizedModule"


def original_of(compiled: nn.Module) -> nn.Module:
    """What torch.compile has wrapped."""
    return compiled._orig_mod  # type: ignore[return-value]


# -- transformers ----------------------------------------------------------------------------------------------------


def layer_classes(model: nn.Module) -> set[str]:
    """The class names of the layers that a model's author would place whole on one device."""
    return set(getattr(model, "_no_split_modules", None) or ())


# -- DeepSpeed -------------------------------------------------------------------------------------------------------


class Fragment(NamedTuple):
    """Where elements of a parameter are in this rank's flat partition: `start` in the
    parameter, `offset` in the partition."""

    start: int
    offset: int
    length: int


def fragment_of(parameter: Any) -> Fragment | None:
    """What of a parameter is in this rank's partition under ZeRO-1 and 2; None where all of it is in others'."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
    return Fragment(there.start, here.start, there.numel)


@contextlib.contextmanager
def infinite_norm(sharded: object) -> Iterator[None]:
    """While open, the step of ZeRO's optimizer takes the gradient's norm for infinite, and so updates nothing."""
    infinite = torch.tensor(float("inf"))
    replaced = {"scaled_global_norm": lambda *_: infinite, "_get_norm_groups": lambda *_: [infinite]}
    for name, function in replaced.items():
        setattr(sharded, name, function)
    try:
        yield
    finally:
        for name in replaced:
            delattr(sharded, name)


def leave_communication_to_gloo() -> None:
    """Without DeepSpeed's own exchange between CPU ranks, which it compiles at the first start.

    That takes a compiler and half a minute, and a process that is killed meanwhile leaves torch's lock (torch.utils.file_baton)
    behind, for which every later run waits for ever.
    """
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
