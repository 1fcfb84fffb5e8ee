"""How fast a run is, and on how much: FLOPs of a token, the device's peak, memory in use."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import torch

from toolkit.data.loading.batch import MicroBatch
from toolkit.distributed.engines import element_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Dense bf16 products without sparsity, in FLOP/s, from the makers' data sheets; longest name first, so that
# "H100 PCIe" is found before "H100".
PEAK_FLOPS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12,
    "L4": 121e12, "A10G": 70e12, "A10": 125e12, "4090": 165e12, "3090": 71e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip


def peak_flops(device: torch.device) -> float | None:
    """The device's peak for bf16 matrix products in FLOP/s, where it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    by_length = sorted(PEAK_FLOPS, key=len, reverse=True)
    return next((PEAK_FLOPS[part] for part in by_length if re.search(rf"{part}(?![0-9A-Za-z])", name)), None)  # an L40 is no L4


def training_flops(model: PreTrainedModel, tokens: float, head_positions: float, pairs: float) -> float:
    """FLOPs of forward and backward (PaLM, https://arxiv.org/abs/2204.02311, appendix B), recomputation left out.

    A number in a matrix takes 2 forward, 2 for the gradient of what goes in, and 2 for its own where it is trained, with each
    of the `tokens`; the output head with the `head_positions` it is applied at. Attention takes 4 x heads x head dimension
    forward and twice that backward, in each layer, for each of the `pairs` of a token and one it sees. Look-ups, norms and
    biases take none. Of experts all are counted; of what lies below the first trained weight, a gradient that nobody needs.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    head_weights = {id(weight) for weight in head.parameters()} if head is not None else set()
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    flops = 0.0
    for name, weight in model.named_parameters():
        is_matrix = len(getattr(weight, "ds_shape", weight.shape)) >= 2
        if not is_matrix or id(weight) in looked_up - head_weights or ".original_module." in name:  # peft's, not in use
            continue
        quantized = getattr(weight, "quant_state", None)  # of bitsandbytes: two numbers lie in one byte
        numbers = quantized.shape.numel() if quantized is not None else element_count(weight)
        flops += (6 if weight.requires_grad else 4) * numbers * (head_positions if id(weight) in head_weights else tokens)
    shape = model.config.get_text_config()
    heads = getattr(shape, "num_attention_heads", None)
    if not heads:  # a model without attention
        return flops
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    return flops + 12.0 * shape.num_hidden_layers * heads * head_dim * pairs


def model_work(micro_batch: MicroBatch) -> dict[str, float]:
    """What a causal model does with a micro-batch: tokens that go through, positions of its head, pairs in full attention.

    A padded row counts as long as it is; with a window fewer pairs are seen, and without causality about twice as many.
    """
    tokens = micro_batch["input_ids"].numel()
    positions = micro_batch.get("supervised_positions", micro_batch.get("answer_positions"))
    if "cu_seq_lens_q" in micro_batch:
        own, seen = (micro_batch[f"cu_seq_lens_{side}"].diff().double() for side in "qk")
        pairs = float((own * (seen - own) + own * (own + 1) / 2).sum())
    else:
        rows, length = micro_batch["input_ids"].shape
        pairs = rows * length * (length + 1) / 2
    applied = tokens if positions is None else positions.numel()
    return {"model_tokens": float(tokens), "head_positions": float(applied), "pairs": pairs}


def peak_memory_gb(device: torch.device) -> float:
    """Most memory in use so far, in GB: allocated on a CUDA device, resident in the process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # Windows has no such metric in the standard library
        return float("nan")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
