"""Frozen weights in 4 bits, for adapters on top of them (QLoRA, https://arxiv.org/abs/2305.14314)."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.config import AdapterConfig, Refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


@dataclass(frozen=True)
class PackedShape:
    """What stands for bitsandbytes' `quant_state` where there are no weights: shape and type of what is packed."""

    shape: torch.Size
    dtype: torch.dtype


def pack_shapes(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    """Give a model on the meta device the shapes that `from_pretrained` makes with the settings of `in_4_bits`, in place.

    Two numbers of a linear layer lie in one byte; next to them lies the largest of each 64, in float32, or with
    `bnb_4bit_use_double_quant` in one byte and a float32 for each 256 of those.
    """
    from bitsandbytes.nn import Linear4bit
    from transformers.quantizers.auto import AutoHfQuantizer

    dtypes = {name: module.weight.dtype for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    quantizer = AutoHfQuantizer.from_config(settings["quantization_config"])
    quantizer.preprocess_model(model=model, device_map=settings["device_map"])
    for name, layer in model.named_modules():
        if isinstance(layer, Linear4bit):
            made: Any = layer.weight  # bitsandbytes' own kind of parameter
            nested, kind, numbers = made.compress_statistics, made.quant_type, made.numel()
            blocks, packed = -(-numbers // 64), torch.empty(-(-numbers // 2), 1, dtype=torch.uint8, device="meta")
            state = PackedShape(layer.weight.shape, dtypes[name])
            layer.weight = nn.Parameter(packed, requires_grad=False)
            vars(layer.weight).update(quant_state=state, compress_statistics=nested, quant_type=kind)
            statistics = {"largest": torch.empty(blocks, dtype=torch.uint8 if nested else torch.float32, device="meta")}
            if nested:
                statistics["largest_of_those"] = torch.empty(-(-blocks // 256), device="meta")
            for part, tensor in statistics.items():
                layer.register_buffer(part, tensor, persistent=False)
    quantizer.postprocess_model(model)
    keep_gradients(model)


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
