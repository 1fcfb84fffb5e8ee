"""Names of torch that are not public; tests/system/test_compat.py fails when one moves. Seen in torch 2.13."""

from __future__ import annotations

import os

import torch

_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"}  # oneDNN's names


def multiplies_bf16(device_type: str) -> bool:
    """Whether the device here of a type ("cuda", "cpu") has units for products in bfloat16.

    On a CPU, within what oneDNN, which computes the products, may use of it (its variable ONEDNN_MAX_CPU_ISA).
    """
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type != "cpu" or os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _WITHOUT_BF16:
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
