"""Cross-entropy of rows of logits on a GPU: they are read twice and the gradient is written over them, where torch's own
operations go over a copy in float32 about nine times. `toolkit.losses.token_losses` describes what is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 4096, 8  # numbers of a row that are looked at together, 16 by a thread


def token_losses_into(
    losses: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    label_smoothing_factor: float,
    z_loss: float,
    weights: torch.Tensor | None,
    gradient: torch.Tensor | None,
    correct: torch.Tensor | None,
) -> None:
    """Fill `losses` `[rows]`, float32, not weighted, and `gradient` and `correct` where they are given.

    Logits `[rows, V]` in at most float32, whose rows have their numbers next to each other, as have those of `gradient`.
    """
    targets, weights = targets.contiguous(), None if weights is None else weights.contiguous()
    with torch.cuda.device(logits.device):  # Triton launches on the current one
        _losses_of_rows[(len(logits),)](
            logits, targets, losses, losses if weights is None else weights, logits if gradient is None else gradient,
            losses if correct is None else correct, logits.stride(0), 0 if gradient is None else gradient.stride(0),
            float(label_smoothing_factor), float(z_loss), logits.shape[1], label_smoothing_factor != 0, weights is not None,
            gradient is not None, correct is not None, BLOCK, num_warps=WARPS,
        )  # fmt: skip
    if gradient is not None:
        torch.autograd.graph.increment_version(gradient)  # as torch does for its own operations in place


@triton.jit
def _losses_of_rows(
    logits, targets, losses, weights, gradient, correct, logits_stride, gradient_stride, smoothing, z_loss,
    vocabulary: tl.constexpr, smoothed: tl.constexpr, has_weights: tl.constexpr, has_gradient: tl.constexpr,
    has_correct: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    target = tl.load(targets + row)
    of_target = tl.load(logits + target).to(tl.float32)
    places = tl.arange(0, block)
    largest, first, total, sum_of_scores = -float("inf"), 0, 0.0, 0.0
    for start in range(0, vocabulary, block):
        inside = start + places < vocabulary
        scores = tl.load(logits + start + places, mask=inside, other=-float("inf")).to(tl.float32)
        here, index = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
        first = tl.where(here > largest, start + index, first)
        before, largest = largest, tl.maximum(largest, here)
        base = tl.where(largest == -float("inf"), 0.0, largest)  # so far every token may be ruled out
        total = total * tl.exp(before - base) + tl.sum(tl.exp(scores - base), 0)
        if smoothed:  # else a token that is ruled out would make it 0 * inf
            sum_of_scores += tl.sum(tl.where(inside, scores, 0.0), 0)
    log_z = largest + tl.log(total)
    loss = largest - of_target + tl.log(total)  # log_z is rounded: of a token that is almost certain nothing would be left
    loss += smoothing * (of_target - sum_of_scores / vocabulary) + z_loss * log_z * log_z
    tl.store(losses + row, loss)
    if has_correct:
        tl.store(correct + row, first == target)
    if has_gradient:
        gradient += row * gradient_stride
        weight = 1.0
        if has_weights:
            weight = tl.load(weights + row).to(tl.float32)
        scale = (1 + 2 * z_loss * log_z) / total
        for start in range(0, vocabulary, block):
            inside = start + places < vocabulary
            scores = tl.load(logits + start + places, mask=inside, other=-float("inf")).to(tl.float32)
            of_score = tl.exp(scores - largest) * scale - smoothing / vocabulary
            of_score += tl.where(start + places == target, smoothing - 1.0, 0.0)
            tl.store(gradient + start + places, (of_score * weight).to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def normalizer(logits, scale, vocabulary: tl.constexpr, block: tl.constexpr):
    """The largest of a row's logits times `scale`, and the logarithm of the sum of their exponentials over its own."""
    places = tl.arange(0, block)
    largest, total = -float("inf"), 0.0
    for start in range(0, vocabulary, block):
        inside = start + places < vocabulary
        scores = tl.load(logits + start + places, mask=inside, other=-float("inf")).to(tl.float32) * scale
        before, largest = largest, tl.maximum(largest, tl.max(scores, 0))
        base = tl.where(largest == -float("inf"), 0.0, largest)  # so far every token may be ruled out
        total = total * tl.exp(before - base) + tl.sum(tl.exp(scores - base), 0)
    return largest, tl.log(total)
