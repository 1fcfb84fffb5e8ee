"""How much memory a device has left, what limits the memory of this process, and the error where none is left."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from toolkit.system.control_groups import memory_of_groups

if TYPE_CHECKING:
    import torch


class OutOfMemory(Exception):
    """A device, or the CPU, ran out of memory; the message has what to change."""

    exit_code = 1
    on_every_rank = True  # it may be the only one with this error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch, Python or another library is that a device, or the CPU, has no memory left.

    Torch may not be loaded, and what loads it or pyarrow may be what there is no memory for.
    """
    if isinstance(error, ImportError):  # glibc says the same of a disk without permission to execute
        return "failed to map segment" in str(error) and _address_space() >= 0
    return isinstance(error, MemoryError) or any(
        words in str(error)  # torch's, of a device and of the CPU, and the system's
        for words in ("out of memory", "can't allocate memory", os.strerror(errno.ENOMEM))
    )


def container_limit() -> int | None:
    """Bytes that the container of this process may hold; None where there is none, or no limit."""
    return min((limit for limit, _ in memory_of_groups()), default=None)


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process may still take on a device; a CPU's are shared with the ranks next to it. None: not known."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    import psutil  # with accelerate

    left = [psutil.virtual_memory().available, *(limit - used for limit, used in memory_of_groups())]
    if (limit := _address_space()) >= 0:
        left.append(limit - psutil.Process().memory_info().vms)
    return max(0, min(left)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def memory_held(device: torch.device) -> int:
    """Bytes that this process holds on a device."""
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    import psutil

    return int(psutil.Process().memory_info().rss)


def _address_space() -> int:
    """Bytes of addresses that this process may take (`ulimit -v`); -1: any number."""
    try:
        import resource
    except ImportError:  # Windows
        return -1
    return resource.getrlimit(resource.RLIMIT_AS)[0]
