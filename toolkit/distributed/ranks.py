"""Small agreements between the ranks. They travel on the CPU, so nobody waits for a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from toolkit.config import Refusal
from toolkit.distributed.compat import free_reducers
from toolkit.system.console import say

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

Result = TypeVar("Result")


def largest(accelerator: Accelerator, number: int) -> int:
    """The largest of the numbers that the ranks bring; every rank must call this, and gets the same."""
    if accelerator.num_processes == 1:
        return number
    numbers = torch.tensor([number])
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX, group=_cpu_group())
    return int(numbers)


def on_main(accelerator: Accelerator, action: Callable[[], Result], problem: type[Exception] = Refusal) -> Result:
    """What `action` returns on the main process, on every rank; what it refuses or can't write, every rank raises."""
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = action()
        except (Refusal, problem, OSError) as error:
            outcome[1] = str(error)
    if accelerator.num_processes > 1:
        torch.distributed.broadcast_object_list(outcome, src=0, group=_cpu_group())
    if outcome[1] is not None:
        raise problem(outcome[1])
    return outcome[0]


def on_all(accelerator: Accelerator, action: Callable[[], Result]) -> Result:
    """What `action` returns, on each rank its own; what one rank refuses or can't read, every rank refuses."""
    if accelerator.num_processes == 1:
        return action()
    result, problem = None, None
    try:
        result = action()
    except (Refusal, OSError) as error:
        problem = str(error)
    problems: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(problems, problem, group=_cpu_group())
    for rank, message in enumerate(problems):
        if message is not None:
            raise Refusal(message if rank == 0 else f"rank {rank}: {message}")
    return result  # type: ignore[return-value]  # an action that returned nothing returns None


def from_all(accelerator: Accelerator, action: Callable[[], Result]) -> list[Result]:
    """What `action` returned on each rank, on every rank; what one rank refuses or can't read, every rank refuses."""
    result = on_all(accelerator, action)
    if accelerator.num_processes == 1:
        return [result]
    results: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(results, result, group=_cpu_group())
    return results


def weights_apart(accelerator: Accelerator, model: nn.Module) -> float:
    """How far the trained weights of ranks that should hold the same are from each other: of up to 64 values of each tensor,
    the largest difference over the mean size of them all. 0 on one process. Every rank calls it."""
    trained = [weight.detach().flatten() for weight in model.parameters() if weight.requires_grad]
    if accelerator.num_processes == 1 or not trained:
        return 0.0
    some = torch.cat([weight[:: -(-weight.numel() // 64) or 1].float() for weight in trained]).cpu()
    least, most = some.clone(), some.clone()
    for values, operation in ((least, torch.distributed.ReduceOp.MIN), (most, torch.distributed.ReduceOp.MAX)):
        torch.distributed.all_reduce(values, operation, group=_cpu_group())
    return float((most - least).max() / most.abs().mean().clamp_min(torch.finfo(torch.float32).tiny))


@cache
def _cpu_group() -> torch.distributed.ProcessGroup | None:
    """A group that takes CPU tensors: the default one where it does, else one of its own."""
    if torch.distributed.get_backend() == "gloo":
        return None
    return torch.distributed.new_group(backend="gloo")


def close_process_group(accelerator: Accelerator, model: nn.Module) -> None:
    """The end of a run with this prepared model: trackers are closed, and the ranks part."""
    free_reducers(model)
    _cpu_group.cache_clear()
    accelerator.end_training()


def say_once(line: str) -> None:
    """Print a line on the first rank, also before there is an accelerator."""
    if os.environ.get("RANK", "0") == "0":
        say(line)
