"""Frozen weights in 4 bits, for adapters on top of them (QLoRA, https://arxiv.org/abs/2305.14314)."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from toolkit.config import Refusal

_COMPUTING = {"bf16": "bfloat16", "fp16": "float16"}


def in_4_bits(config: Any, device: str) -> dict[str, Any]:
    """What `from_pretrained` needs to round the linear layers to 4 bits as it reads them; nothing where that is not asked for.

    Args:
        config: a recipe's settings; those without an AdapterConfig ask for nothing.
        device: the kind of device that training will be on.

    Raises:
        Refusal: bitsandbytes is missing, or a CUDA device.
    """
    if not getattr(config, "load_in_4bit", False):
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Refusal("--load-in-4bit needs bitsandbytes, which is not installed. Install it: pip install bitsandbytes")
    if device != "cuda":
        raise Refusal(
            f"--load-in-4bit needs a CUDA device, and training would be on the {device.upper()}. Leave it out; --dtype "
            "bfloat16 halves the memory of the weights anywhere."
        )
    from transformers import BitsAndBytesConfig

    computing = next((dtype for setting, dtype in _COMPUTING.items() if getattr(config, setting, False)), "float32")
    quantisation = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=computing, bnb_4bit_quant_type=config.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=config.bnb_4bit_use_double_quant,
    )  # fmt: skip
    # Read where they will stay: accelerate does not move 4-bit weights from one device to another.
    return {"quantization_config": quantisation, "device_map": {"": torch.cuda.current_device()}}
