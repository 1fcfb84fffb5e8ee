"""Log-probabilities and entropies of rows of logits on a GPU: read once, and twice for the gradient that is written over them.
`toolkit.losses.token_entropies` describes what is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolkit.losses.token_losses_gpu import normalizer

BLOCK, WARPS = 4096, 8  # numbers of a row that are looked at together, 16 by a thread


def values_into(values: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> None:
    """Fill `values` `[rows, 2]`, float32. Logits `[rows, V]` in at most float32, whose rows have their numbers together."""
    with torch.cuda.device(logits.device):  # Triton launches on the current one
        _values_of_rows[(len(logits),)](
            values, logits, targets.contiguous(), logits.stride(0), 1.0 / temperature, logits.shape[1], BLOCK, num_warps=WARPS
        )


def gradient_into(
    gradient: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, values: torch.Tensor, of_values: torch.Tensor,
    temperature: float, of_entropies: bool,
) -> None:  # fmt: skip
    """Fill `gradient` `[rows, V]`, which may be the logits: `of_values` `[rows, 2]` is that of the values."""
    with torch.cuda.device(logits.device):
        _gradient_of_rows[(len(logits),)](
            gradient, logits, targets.contiguous(), values, of_values.float().contiguous(), gradient.stride(0),
            logits.stride(0), 1.0 / temperature, logits.shape[1], of_entropies, BLOCK, num_warps=WARPS,
        )  # fmt: skip
    torch.autograd.graph.increment_version(gradient)  # as torch does for its own operations in place


@triton.jit
def _values_of_rows(values, logits, targets, logits_stride, scale, vocabulary: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    of_target = tl.load(logits + tl.load(targets + row)).to(tl.float32) * scale
    places = tl.arange(0, block)
    largest, total, weighted = -float("inf"), 0.0, 0.0
    for start in range(0, vocabulary, block):
        inside = start + places < vocabulary
        scores = tl.load(logits + start + places, mask=inside, other=-float("inf")).to(tl.float32) * scale
        before, largest = largest, tl.maximum(largest, tl.max(scores, 0))
        base = tl.where(largest == -float("inf"), 0.0, largest)  # so far every token may be ruled out
        lower = tl.where(before == -float("inf"), 0.0, before - base)
        each = tl.exp(scores - base)
        weighted = tl.exp(lower) * (weighted + lower * total) + tl.sum(tl.where(each == 0.0, 0.0, each * (scores - base)), 0)
        total = tl.exp(lower) * total + tl.sum(each, 0)
    tl.store(values + 2 * row, of_target - largest - tl.log(total))
    tl.store(values + 2 * row + 1, tl.log(total) - weighted / total)


@triton.jit
def _gradient_of_rows(
    gradient, logits, targets, values, of_values, gradient_stride, logits_stride, scale, vocabulary: tl.constexpr,
    of_entropies: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    gradient += row * gradient_stride
    target = tl.load(targets + row)
    entropy = tl.load(values + 2 * row + 1)
    of_logp = tl.load(of_values + 2 * row) * scale
    of_entropy = tl.load(of_values + 2 * row + 1) * scale
    places = tl.arange(0, block)
    largest, log_total = normalizer(logits, scale, vocabulary, block)
    for start in range(0, vocabulary, block):
        inside = start + places < vocabulary
        log_q = tl.load(logits + start + places, mask=inside, other=-float("inf")).to(tl.float32) * scale - largest - log_total
        q = tl.exp(log_q)
        slope = -q * of_logp
        if of_entropies:
            slope -= tl.where(q == 0.0, 0.0, q * of_entropy * (log_q + entropy))
        slope += tl.where(start + places == target, of_logp, 0.0)
        tl.store(gradient + start + places, slope.to(gradient.dtype.element_ty), mask=inside)
