"""Frozen weights in 4 bits, for adapters on top of them (QLoRA, https://arxiv.org/abs/2305.14314)."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from toolkit.config import AdapterConfig, Refusal


def in_4_bits(config: AdapterConfig, device: str, compute_dtype: str) -> dict[str, Any]:
    """What `from_pretrained` needs to round the linear layers to 4 bits as it reads them; nothing where that is not requested.

    Args:
        device: the kind of device that training will be on.
        compute_dtype: "bfloat16", "float16" or "float32".

    Raises:
        Refusal: bitsandbytes is missing, or training would be on a device that it has no kernels for.
    """
    if not config.load_in_4bit:
        return {}
    _check_installed("--load-in-4bit")
    if device not in ("cuda", "cpu"):
        raise Refusal(
            f"--load-in-4bit: bitsandbytes trains on CUDA devices and CPUs, and training would be on the {device.upper()}. "
            "Leave it out; --dtype bfloat16 halves the memory of the weights anywhere."
        )
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=compute_dtype, bnb_4bit_quant_type=config.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=config.bnb_4bit_use_double_quant,
    )  # fmt: skip
    # Read where they will stay: accelerate does not move 4-bit weights from one device to another.
    where = torch.cuda.current_device() if device == "cuda" else "cpu"
    return {"quantization_config": quantization, "device_map": {"": where}}


def keep_gradients(model: torch.nn.Module) -> None:
    """Make sure that a model in 4 bits trains right on a CPU after it was evaluated.

    In the first pass without gradients bitsandbytes 0.50 lays the weights out again, where the CPU has bfloat16 instructions,
    for a kernel that has no backward: training that continues gets no gradient through these layers, and a warning at most.
    """
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def as_trained(settings: dict[str, Any]) -> dict[str, Any]:
    """What `from_pretrained` needs to round a model once more as in its `quantization_config`, computing in float32 on a CPU.

    Raises:
        Refusal: bitsandbytes is missing.
    """
    _check_installed("A base that was held in 4 bits")
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig.from_dict({**settings, "bnb_4bit_compute_dtype": "float32"}),
        "device_map": {"": "cpu"},
    }


def _check_installed(who: str) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Refusal(f"{who} needs bitsandbytes, which is not installed. Install it: pip install bitsandbytes")
