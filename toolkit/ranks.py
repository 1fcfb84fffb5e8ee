"""Small agreements between the ranks. They travel on the CPU, so nobody waits for a device."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from toolkit.config import Refusal

Result = TypeVar("Result")


def largest(accelerator: Any, number: int) -> int:
    """The largest of the numbers that the ranks bring; every rank must call this, and gets the same."""
    if accelerator.num_processes == 1:
        return number
    numbers = torch.tensor([number])
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX, group=_cpu_group())
    return int(numbers)


def on_main(accelerator: Any, action: Callable[[], Result]) -> Result | None:
    """What `action` returns on the main process, None on the others; what it refuses, every rank refuses."""
    if accelerator.num_processes == 1:
        return action()
    result, refusal = None, [None]
    if accelerator.is_main_process:
        try:
            result = action()
        except Refusal as problem:
            refusal = [str(problem)]  # type: ignore[list-item]
    torch.distributed.broadcast_object_list(refusal, src=0, group=_cpu_group())
    if refusal[0] is not None:
        raise Refusal(refusal[0])
    return result


@cache
def _cpu_group() -> Any:
    """A group that takes CPU tensors: the default one where it does, else one of its own."""
    if torch.distributed.get_backend() == "gloo":
        return None
    return torch.distributed.new_group(backend="gloo")
