"""Metrics of steps on their way from the device to a logging event: means, throughput, FLOPs, memory in use."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from toolkit.data.loading.batch import Batch, MicroBatch
from toolkit.distributed.engines import element_count

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

WORK = ("model_tokens", "head_positions", "pairs", "decoder_tokens")  # of this rank's model, for its FLOPs
FLAGS = ("applied", "nonfinite")  # of a step, not metrics to average


@dataclass
class StepMetrics:
    """What one step returned, 0-d tensors until they are read, and of its batch what JSON holds: no tensors of examples."""

    step: int
    values: dict[str, Any]
    totals: dict[str, float]
    position: int
    size: int
    examples: list[int]


@dataclass
class Window:
    """The steps since the last logging event. Their metrics stay on the device until they are read, all at once."""

    unread: list[StepMetrics] = field(default_factory=list)
    steps: list[StepMetrics] = field(default_factory=list)
    seconds: float = 0.0  # in training steps: evaluating, sampling and saving are not part of any rate
    waiting: float = 0.0  # of these, for data
    since: float = field(default_factory=time.monotonic)

    def resume_clock(self) -> None:
        """A step begins."""
        self.since = time.monotonic()

    def stop_clock(self) -> None:
        """A step has ended."""
        self.seconds += time.monotonic() - self.since

    def wait_for(self, batches: Iterator[Batch]) -> Batch | None:
        """The next batch, None after the last one; the time until it is there counts as waiting."""
        began = time.monotonic()
        batch = next(batches, None)
        self.waiting += time.monotonic() - began
        return batch

    def add(self, step: int, batch: Batch, metrics: Mapping[str, torch.Tensor | float]) -> None:
        """Take the metrics that a step returned: 0-d tensors, and numbers that a recipe adds to them.

        Raises:
            ValueError: a value is something else, or there is no `loss` or `grad_norm`.
        """
        if missing := [name for name in ("loss", "grad_norm") if name not in metrics]:
            raise ValueError(
                f"metrics of a step, recognized by tensors or grad_norm, have no {' and no '.join(missing)}: log them "
                "in one call with what tk.train_step returns, or in another one as numbers"
            )
        for name, value in metrics.items():
            if not isinstance(value, int | float) and getattr(value, "shape", None) != ():
                found = f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
                raise ValueError(f"a metric of a step is a number or a 0-d tensor; {name} is {found}")
        work = dict.fromkeys(WORK, 0.0)
        for micro_batch in batch.micro_batches:
            if "input_ids" in micro_batch:
                work |= {name: work[name] + value for name, value in model_work(micro_batch).items()}
        totals = {**batch.totals, **work}
        self.unread.append(StepMetrics(step, dict(metrics), totals, batch.position, batch.size, batch.examples))

    def read(self) -> list[StepMetrics]:
        """Wait for the device once and turn the unread metrics into numbers; returns those steps."""
        fresh, self.unread = self.unread, []
        on_devices: dict[torch.device, list[tuple[StepMetrics, str]]] = {}  # of rollouts on the CPU, of a step elsewhere
        for step in fresh:
            step.values = {name: step.values[name] for name in sorted(step.values)}
            for name, value in step.values.items():
                if isinstance(value, torch.Tensor):
                    on_devices.setdefault(value.device, []).append((step, name))
        for device, places in on_devices.items():
            kind = torch.float32 if device.type == "mps" else torch.float64
            numbers = torch.stack([step.values[name].to(kind) for step, name in places]).tolist()
            for (step, name), number in zip(places, numbers, strict=True):
                step.values[name] = number
        self.steps += fresh
        return fresh

    def event(self, optimizer: torch.optim.Optimizer, model: PreTrainedModel, accelerator: Accelerator) -> dict[str, float]:
        """One logging event for the read steps: means over those that count (extremes of `*_max`, `*_min`), and rates.

        The window is empty then. `data_wait` is the share of the time that this rank waited for batches.
        A step that was not finite is counted in `nonfinite_steps` and enters no mean. Nor does a metric that is not a number,
        as that of desirable answers is in a step that has none. A metric of some steps alone is the mean over those.
        """
        seconds, waiting, self.seconds, self.waiting = self.seconds, self.waiting, 0.0, 0.0
        steps, self.steps = self.steps, []
        good = [step.values for step in steps if not step.values.get("nonfinite")]
        event = {}
        for name in sorted({name for values in good for name in values}):
            known = [values[name] for values in good if name in values and not math.isnan(values[name])]
            if known and name not in FLAGS:
                extreme = {"_max": max, "_min": min}.get(name[-4:])
                event[name] = extreme(known) if extreme else sum(known) / len(known)
        event["learning_rate"] = max(group["lr"] for group in optimizer.param_groups)
        event["examples_per_second"] = sum(step.totals["examples"] for step in steps) / seconds
        if "tokens" in steps[0].totals:
            event["tokens_per_second"] = sum(step.totals["tokens"] for step in steps) / seconds
        event["data_wait"] = waiting / seconds
        work = [sum(step.totals.get(name, 0.0) for step in steps) for name in WORK]
        peak = peak_flops(accelerator.device)
        if peak and any(work):  # a batch of prompts doesn't have the tokens of the completions
            event["mfu"] = training_flops(model, *work) / seconds / peak
        if len(good) < len(steps):
            event["nonfinite_steps"] = len(steps) - len(good)
        return event


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


def training_flops(
    model: PreTrainedModel, tokens: float, head_positions: float, pairs: float, decoder_tokens: float = 0.0
) -> float:
    """FLOPs of forward and backward (PaLM, https://arxiv.org/abs/2204.02311, appendix B), recomputation left out.

    A number in a matrix takes 2 forward, 2 for the gradient of what goes in, and 2 for its own where it is trained, with each
    of the `tokens`, in the decoder behind an encoder with each of the `decoder_tokens`; the output head with the
    `head_positions` it is applied at. Attention takes 4 x heads x head dimension forward and twice that backward, in each
    layer, for each of the causal `pairs` of a token and one it sees, and for those after it where attention is of both sides.
    Look-ups, norms and biases take none. Of experts those count that a token goes through; of what lies below the first
    trained weight, a gradient that nobody needs.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    head_weights = {id(weight) for weight in head.parameters()} if head is not None else set()
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    decoder = {id(weight) for weight in model.get_decoder().parameters()} if decoder_tokens else set()
    shape = model.config.get_text_config()
    flops = 0.0
    for name, weight in model.named_parameters():
        dimensions = getattr(weight, "ds_shape", weight.shape)
        is_matrix = len(dimensions) >= 2
        if not is_matrix or id(weight) in looked_up - head_weights or ".original_module." in name:  # peft's, not in use
            continue
        quantized = getattr(weight, "quant_state", None)  # of bitsandbytes: two numbers lie in one byte
        numbers: float = quantized.shape.numel() if quantized is not None else element_count(weight)
        if len(dimensions) == 3 and ".experts." in name:
            numbers *= getattr(shape, "num_experts_per_tok", dimensions[0]) / dimensions[0]
        times = tokens
        if id(weight) in head_weights:
            times = head_positions
        elif id(weight) in decoder and not _OF_ENCODED.search(name):
            times = decoder_tokens
        flops += (6 if weight.requires_grad else 4) * numbers * times
    heads = getattr(shape, "num_attention_heads", None)
    if not heads:  # a model without attention
        return flops
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    directions = {module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)}
    if not decoder_tokens and directions == {False}:
        pairs = _both_sides(pairs, tokens)
    return flops + 12.0 * shape.num_hidden_layers * heads * head_dim * pairs


_OF_ENCODED = re.compile(r"\.(EncDecAttention|encoder_attn)\.[kv]")  # keys and values in a decoder, of the encoder's tokens


def _both_sides(pairs: float, tokens: float) -> float:
    """The pairs of documents without causality: each of n tokens has n (n + 1) / 2 with it, and n^2."""
    return 2 * pairs - tokens


def model_work(micro_batch: MicroBatch) -> dict[str, float]:
    """What a model does with a micro-batch: tokens that go through, positions of its head, pairs in full causal attention.

    Where padding is computed, a padded row counts as long as it is; with a window fewer pairs are seen. `decoder_tokens`: those
    of the targets behind an encoder, whose own pairs are of both sides.
    """
    positions = micro_batch.get("supervised_positions", micro_batch.get("answer_positions"))
    if "cu_seq_lens_q" in micro_batch:  # padded rows may have them too, whose padding the model's body leaves out
        own, seen = (micro_batch[f"cu_seq_lens_{side}"].diff().double() for side in "qk")
        tokens, pairs = float(own.sum()), float((own * (seen - own) + own * (own + 1) / 2).sum())
    else:
        groups = [micro_batch["input_ids"].shape]
        if "groups" in micro_batch and not torch.distributed.is_initialized():  # as `score_lists` reads them
            groups = micro_batch["groups"]
        tokens = float(sum(rows * length for rows, length in groups))
        pairs = sum(rows * length * (length + 1) / 2 for rows, length in groups)
    work = {"model_tokens": tokens, "head_positions": tokens if positions is None else float(positions.numel()), "pairs": pairs}
    if "decoder_input_ids" in micro_batch:
        rows, length = micro_batch["decoder_input_ids"].shape
        seen_each = (length + 1) / 2 + micro_batch["input_ids"].shape[1]
        work |= {"pairs": _both_sides(pairs, tokens) + rows * length * seen_each, "decoder_tokens": float(rows * length)}
    return work


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
