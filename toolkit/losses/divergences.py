"""Divergences of a student's rows of logits from what a teacher says, and their gradient, in blocks that stay in a CPU's cache.

All five are a KL(p, m) + b KL(q, m) with m = s p + (1 - s) q, p the teacher's distribution, q the student's. Of log q the
derivative, as if its entries were free, is

    b q (log q - log m)  -  (a p + b q) (1 - s) q / m,

up to a multiple of q, of which nothing is left behind the softmax: a softmax's logits have d - q sum(d) of a derivative d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from toolkit.losses.token_losses import rows_of_a_block, runs_as_kernel

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl")


@dataclass(frozen=True)
class TeacherLogps:
    """A teacher's log-probabilities at some positions, of its distribution at a temperature, nats, without a gradient.

    `logps` `[positions, V]`: of the first V tokens, which are those that it shares with the student. Or, with `ids`
    `[positions, k]`, of these k tokens, and behind them of all other ones together: `[positions, k + 1]`.
    """

    logps: torch.Tensor
    ids: torch.Tensor | None = None


class Divergence(NamedTuple):
    """a KL(p, m) + b KL(q, m) with m = `share` p + (1 - `share`) q: `of_teacher` is a, `of_student` b."""

    of_teacher: float
    of_student: float
    share: float


def divergence_named(name: str, beta: float = 0.5, skew_alpha: float = 0.1) -> Divergence:
    """The one of `DIVERGENCES`; `toolkit.losses.distillation` has their formulas."""
    if name == "forward_kl":
        return Divergence(1, 0, 0)
    if name == "reverse_kl":
        return Divergence(0, 1, 1)
    if name == "jsd":
        return Divergence(beta, 1 - beta, beta)
    if name == "skewed_forward_kl":
        return Divergence(1, 0, skew_alpha)
    if name == "skewed_reverse_kl":
        return Divergence(0, 1, 1 - skew_alpha)
    raise ValueError(f"divergence {name}: one of {', '.join(DIVERGENCES)}")


def divergence_of_tokens(
    teacher: TeacherLogps,
    logits: torch.Tensor,
    divergence: Divergence,
    temperature: float = 1.0,
    gradient: torch.Tensor | None = None,
    weight: float = 1.0,
) -> torch.Tensor:
    """D of each position, nats, `[positions]`, float32 or wider.

    `logits` `[positions, V]`: the student's, of which no graph is made, of the tokens that both have; divided by `temperature`
    here. `gradient` `[positions, V]` is filled with that of `weight` times the sum; it may be the logits themselves.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    values = logits.new_empty(len(logits), dtype=wide)
    log_p = teacher.logps
    in_order = logits.stride(-1) == 1 == log_p.stride(-1)
    if teacher.ids is None and runs_as_kernel(logits.device, logits.dtype) and in_order and len(logits):
        if logits.is_cuda:  # no fake tensors
            from toolkit.losses.divergences_gpu import divergences_into

            divergences_into(values, log_p, logits, divergence, temperature, gradient, weight)
        return values
    size = rows_of_a_block(logits)
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        for start in range(0, len(logits), size):
            block = slice(start, start + size)
            scores, known = logits[block].to(wide), log_p[block].to(wide)
            if temperature != 1.0:
                scores = scores / temperature
            if teacher.ids is None:
                values[block], slope = _values_and_slope(known, scores.log_softmax(-1), divergence, gradient is not None)
            else:
                ids = teacher.ids[block]
                scores, of_known, others = _known_and_others(scores, ids)
                values[block], slope = _values_and_slope(known, of_known, divergence, gradient is not None)
            if gradient is None:
                continue
            slope *= weight / temperature
            if teacher.ids is not None:  # how the sum of the others changes with each of them
                of_others = scores.sub_(others.clamp_min(torch.finfo(wide).min)).exp_()
                slope = of_others.mul_(slope[:, -1:]).scatter_(1, ids, slope[:, :-1])
            gradient[block] = slope
    return values


def _known_and_others(scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores without those of `ids` `[rows, k]`; log-probabilities of these and of all others together `[rows, k + 1]`; and
    the logarithm of the others' sum `[rows, 1]`: -inf where all are known."""
    without = scores.scatter(1, ids, -math.inf)
    others = without.logsumexp(-1, keepdim=True)
    return without, torch.cat([scores.gather(1, ids), others], dim=1).log_softmax(-1), others


def _values_and_slope(
    log_p: torch.Tensor, log_q: torch.Tensor, divergence: Divergence, with_slope: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """D `[rows]`, and its derivative by what `log_q` is the log-softmax of `[rows, n]`. What p or q never gives counts as 0."""
    p, q, (a, b, share) = log_p.exp(), log_q.exp(), divergence
    m, log_m = (p, log_p) if share == 1 else (q, log_q)
    if share not in (0, 1):
        m = torch.add(q * (1 - share), p, alpha=share).clamp_min_(torch.finfo(p.dtype).tiny)
        log_m = m.log()
    slope = _where_there(q, log_q - log_m).mul_(b) if b else torch.zeros_like(q)
    values = slope.sum(-1)
    if a:
        values += a * _where_there(p, log_p - log_m).sum(-1)
    if with_slope:
        if share != 1:
            slope -= torch.add(a * p, q, alpha=b).mul_(1 - share).mul_(q / m if share else 1.0)
        slope -= q.mul_(slope.sum(-1, keepdim=True))
    return values, slope


def _where_there(of: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """of * ratio, 0 where `of` is: the limit of x log x."""
    return ratio.masked_fill_(of == 0, 0.0).mul_(of)
