"""Divergences of rows of logits on a GPU: they are read three times, the teacher's log-probabilities twice, and the gradient is
written over the logits, where torch's own operations make about twenty passes. `toolkit.losses.divergences` has the formulas.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolkit.losses.divergences import Divergence
from toolkit.losses.token_losses_gpu import normalizer

BLOCK, WARPS = 4096, 8  # numbers of a row that are looked at together, 16 by a thread


def divergences_into(
    values: torch.Tensor,
    log_p: torch.Tensor,
    logits: torch.Tensor,
    divergence: Divergence,
    temperature: float,
    gradient: torch.Tensor | None,
    weight: float,
) -> None:
    """Fill `values` `[rows]`, float32, and `gradient` where it is given, with that of `weight` times their sum.

    `log_p`, logits and `gradient` `[rows, V]` in at most float32, whose rows have their numbers next to each other.
    """
    a, b, share = (float(each) for each in divergence)  # an int of 1 would be a constant of the kernel
    with torch.cuda.device(logits.device):  # Triton launches on the current one
        _divergence_of_rows[(len(logits),)](
            values, log_p, logits, logits if gradient is None else gradient, log_p.stride(0), logits.stride(0),
            0 if gradient is None else gradient.stride(0), a, b, share, 1.0 / temperature, float(weight) / temperature,
            logits.shape[1], a != 0, b != 0, share == 0, share == 1, gradient is not None, BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
    if gradient is not None:
        torch.autograd.graph.increment_version(gradient)  # as torch does for its own operations in place


@triton.jit
def _divergence_of_rows(
    values, log_p, logits, gradient, p_stride, logits_stride, gradient_stride, a, b, share, scale, weight,
    vocabulary: tl.constexpr, has_a: tl.constexpr, has_b: tl.constexpr, at_student: tl.constexpr, at_teacher: tl.constexpr,
    has_gradient: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    log_p += row * p_stride
    logits += row * logits_stride
    places = tl.arange(0, block)
    largest, log_total = normalizer(logits, scale, vocabulary, block)
    value, slopes = 0.0, 0.0
    for start in range(0, vocabulary, block):
        inside = start + places < vocabulary
        of_p = tl.load(log_p + start + places, mask=inside, other=-float("inf")).to(tl.float32)
        scores = tl.load(logits + start + places, mask=inside, other=-float("inf")).to(tl.float32) * scale
        term, slope, _ = _terms(
            of_p, scores - largest - log_total, a, b, share, has_a, has_b, at_student, at_teacher
        )
        value += tl.sum(term, 0)
        slopes += tl.sum(slope, 0)
    tl.store(values + row, value)
    if has_gradient:
        gradient += row * gradient_stride
        for start in range(0, vocabulary, block):
            inside = start + places < vocabulary
            of_p = tl.load(log_p + start + places, mask=inside, other=-float("inf")).to(tl.float32)
            scores = tl.load(logits + start + places, mask=inside, other=-float("inf")).to(tl.float32) * scale
            _, slope, q = _terms(
                of_p, scores - largest - log_total, a, b, share, has_a, has_b, at_student, at_teacher
            )
            of_score = (slope - q * slopes) * weight
            tl.store(gradient + start + places, of_score.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _terms(
    log_p, log_q, a, b, share, has_a: tl.constexpr, has_b: tl.constexpr, at_student: tl.constexpr,
    at_teacher: tl.constexpr,
):  # fmt: skip
    """What each token adds to D; D's derivative by log q, up to a multiple of q; and q."""
    p, q = tl.exp(log_p), tl.exp(log_q)
    if at_student:
        m, log_m = q, log_q
    elif at_teacher:
        m, log_m = p, log_p
    else:
        m = tl.maximum(share * p + (1 - share) * q, 1.1754944e-38)
        log_m = tl.log(m)
    term = tl.zeros_like(p)
    slope = tl.zeros_like(p)
    if has_b:
        slope = tl.where(q == 0.0, 0.0, b * q * (log_q - log_m))
        term = slope
    if has_a:
        term += tl.where(p == 0.0, 0.0, a * p * (log_p - log_m))
    if at_student:
        slope -= a * p + b * q
    elif not at_teacher:
        slope -= (a * p + b * q) * (1 - share) * (q / m)
    return term, slope, q
