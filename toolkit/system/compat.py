"""Names of torch that are not public; tests/system/test_compat.py fails when one moves. Seen in torch 2.13."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import torch

_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"}  # oneDNN's names


def bf16_units(device_type: str) -> bool:
    """Whether the device here of a type ("cuda", "cpu") has units for products in bfloat16.

    On a CPU, within what oneDNN, which computes the products, may use of it (its variable ONEDNN_MAX_CPU_ISA).
    """
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type != "cpu" or os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _WITHOUT_BF16:
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def multiplies_bf16(device_type: str) -> bool:
    """Whether it multiplies bfloat16 faster than float32.

    AVX512-BF16 of Intel's processors does not, which is all that a virtual machine may show of one with AMX: 90 to 100 GFLOP/s
    a core of a Sapphire Rapids, next to 150 to 190 in float32 (torch 2.13).
    """
    is_fast = device_type != "cpu" or torch.cpu._is_amx_tile_supported() or not _is_intel()
    return bf16_units(device_type) and bool(is_fast)


@functools.cache
def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()[:4096]
    except OSError:  # not Linux
        return "GenuineIntel" in platform.processor()
