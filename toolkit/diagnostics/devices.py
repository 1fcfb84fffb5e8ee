"""Devices and machines by name, and how much of their memory tensors can have."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config import Refusal
from toolkit.config.setting import nearest
from toolkit.system.free_memory import container_limit

if TYPE_CHECKING:
    from toolkit.diagnostics.plan import Plan

GIB = 2**30
# torch.cuda.get_device_properties(0).total_memory in GiB, as people report it; the data sheet's number counts otherwise.
_GPUS = {
    "b200": 178.4, "h200": 139.8, "h100": 79.1, "a100-80gb": 79.1, "a100": 39.4, "l40s": 44.4, "a10g": 22.1, "l4": 22.0,
    "t4": 14.6, "v100": 15.8, "v100-32gb": 31.7, "rtx-3090": 23.6, "rtx-4090": 23.6, "rtx-5090": 31.4,
}  # fmt: skip
# SageMaker's instances: the device and how many of them. The sizes of three families have as many each.
_SIZES = {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 1, "12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
_INSTANCES = {
    **{f"ml.{family}.{size}": (gpu, count) for family, gpu in (("g5", "a10g"), ("g6", "l4"), ("g6e", "l40s"))
       for size, count in _SIZES.items()},
    **{f"ml.g4dn.{size}": ("t4", count) for size, count in _SIZES.items() if size not in ("24xlarge", "48xlarge")},
    "ml.p3.2xlarge": ("v100", 1), "ml.p3.8xlarge": ("v100", 4), "ml.p3.16xlarge": ("v100", 8),
    "ml.p3dn.24xlarge": ("v100-32gb", 8),
    "ml.p4d.24xlarge": ("a100", 8), "ml.p4de.24xlarge": ("a100-80gb", 8), "ml.p5.4xlarge": ("h100", 1),
    "ml.p5.48xlarge": ("h100", 8), "ml.p5e.48xlarge": ("h200", 8), "ml.p5en.48xlarge": ("h200", 8),
    "ml.p6-b200.48xlarge": ("b200", 8),
}  # fmt: skip
_BEFORE_AMPERE = ("t4", "v100", "v100-32gb")
CONTEXT = round(0.6 * GIB)  # of CUDA with cuBLAS's and cuDNN's workspaces
FRAGMENTED = 0.05  # of the tensors, that the allocator of CUDA can't use
SLACK = 0.3  # the same on a CPU whose allocator is not asked: 22 to 40 % were measured with glibc
OTHERS = 40 * 2**20  # what a process on a CPU comes to hold besides in its first step


@dataclass(frozen=True)
class Device:
    """`memory`: bytes of one device; `kind`: torch's type of device; `count`: how many one machine has.

    `ampere`: whether a GPU has the compute capability 8.0 or later, as all that are known by their memory alone are taken to.
    """

    name: str
    kind: str
    memory: int
    count: int = 1
    ampere: bool = True


def find_device(name: str) -> Device:
    """A device or machine by name: a GPU, a SageMaker instance, `mac-32gb`, `cpu-64gb`, a size of GPU such as 24gb, or `this`.

    Raises:
        Refusal: none is called that.
    """
    low = re.sub(r"[\s_]+", "-", name.strip().lower())
    low = {"a100-40gb": "a100"}.get(low, f"rtx-{low}" if f"rtx-{low}" in _GPUS else low)
    if low == "this":
        return _this()
    if low in _INSTANCES:
        gpu, count = _INSTANCES[low]
        return Device(low, "cuda", round(_GPUS[gpu] * GIB), count, gpu not in _BEFORE_AMPERE)
    if low in _GPUS:
        return Device(low, "cuda", round(_GPUS[low] * GIB), ampere=low not in _BEFORE_AMPERE)
    sized = re.fullmatch(r"(?:(mac|cpu)-)?(\d+(?:\.\d+)?)gb", low)
    if sized and 0 < float(sized[2]) < 1e6:
        size = float(sized[2])
        if sized[1] == "mac":  # Metal recommends to hold so much at most
            return Device(low, "mps", round(size * GIB * (2 / 3 if size <= 36 else 0.75)))
        if sized[1] is None:  # an L4 of 24 GB has 23.6e9 bytes, and a T4 of 16 GB 15.7e9
            return Device(low, "cuda", round(0.98 * size * 1e9))
        return Device(low, sized[1], round(size * GIB))
    known = [*_GPUS, *_INSTANCES]
    near = nearest(low, known)
    meant = f"Did you mean {near}?" if near else f"There are {', '.join(_GPUS)}, SageMaker's instances such as ml.g5.xlarge."
    raise Refusal(f"--device {name}: not known. {meant} Or give its memory: 24gb (a GPU), mac-32gb, cpu-64gb.")


def _this() -> Device:
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        count, is_new = torch.cuda.device_count(), properties.major >= 8
        return Device(f"this {properties.name}", "cuda", properties.total_memory, count, is_new)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.backends.mps.is_available():
        return Device("this Mac", "mps", round(memory * 2 / 3))
    return Device("this CPU", "cpu", min(memory, container_limit() or memory))


def beyond_tensors(device: Device, plan: Plan) -> tuple[int, int]:
    """Bytes that a process holds on the device besides its tensors, and the margin for what an allocator can't use."""
    if device.kind == "cpu":
        return plan.process + OTHERS, round(SLACK * plan.peak) if plan.heap is None else max(0, plan.heap - plan.peak)
    return CONTEXT, round(FRAGMENTED * plan.peak)


def resident() -> int:
    """Bytes of memory that this process holds now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return GIB // 2
