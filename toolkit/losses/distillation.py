"""Knowledge distillation: a student's distribution of the next token is drawn toward a teacher's, at supervised positions.

With teacher p and student q, both softmax(logits / temperature) over the tokens that they share, a token's loss is

    (1 - s) * temperature^2 * D(p, q)  +  s * cross-entropy of the data,        s = `cross_entropy_share`

The cross-entropy is that of `causal_lm_loss`, at temperature 1. temperature^2 keeps the size of D's gradient, which falls with
1 / temperature^2, so that the share means the same at every temperature (Hinton et al. 2015, arXiv:1503.02531, section 2).

| divergence | D(p, q) | source |
| --- | --- | --- |
| forward_kl | KL(p, q): covers all that the teacher holds possible | Hinton et al. |
| reverse_kl | KL(q, p): stays where the teacher is sure | MiniLLM, arXiv:2306.08543 |
| jsd | β KL(p, m) + (1 - β) KL(q, m), m = β p + (1 - β) q | generalized Jensen-Shannon, GKD, arXiv:2306.13649, section 2 |
| skewed_forward_kl | KL(p, α p + (1 - α) q) | DistiLLM, arXiv:2402.03898, equation 4 |
| skewed_reverse_kl | KL(q, (1 - α) p + α q) | the same |

TRL's `GKDTrainer.generalized_jsd_loss` has the jsd of the same β, which it defines as forward_kl for β = 0 and reverse_kl for
β = 1 (here jsd is 0 there, and such a β is refused). It leaves temperature^2 out, and divides by the tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from toolkit.data.loading.batch import MicroBatch, model_inputs, precise
from toolkit.losses.causal_lm import causal_lm_metrics, supervised
from toolkit.losses.chunked import Logits, added_in_chunks
from toolkit.losses.divergences import TeacherLogps, divergence_named, divergence_of_tokens
from toolkit.losses.selective_head import at_positions
from toolkit.losses.token_losses import token_losses
from toolkit.metrics.metric import Metrics, precise_sum, ratio

OfTeacher = Callable[[slice], TeacherLogps]  # of a piece of the supervised positions
Body = Callable[[OfTeacher, int], torch.Tensor]
# `teacher(micro_batch, temperature, body)` calls `body(of_teacher, shared)` with its log-probabilities, `shared`
# being the number of tokens that both have, and returns what that returned. A teacher whose weights are sharded has them
# together only while it is called itself, so the student is called within.
TeacherFn = Callable[[dict[str, Any], float, Body], torch.Tensor]


def distillation_loss(
    model: nn.Module,
    micro_batch: MicroBatch,
    totals: Mapping[str, float],
    *,
    teacher: TeacherFn,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    skew_alpha: float = 0.1,
    temperature: float = 1.0,
    cross_entropy_share: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the mean over all supervised tokens of the global batch of the loss above.

    Teacher and student have their logits for a chunk of the supervised positions at a time, never for all of them, and the
    gradient is taken while they are there. Logits are raised to float32 (float64 stays), sums are kept in float64.
    Micro-batches are those of `causal_lm_loss`. `teacher` is made by `build_teacher`, or a function of yours:
    `teacher(micro_batch, temperature, body)` returns `body(of_teacher, shared)`, where `of_teacher(piece)` are the
    `TeacherLogps` of a slice of the supervised positions, and `shared` is how many tokens both have.

    Returns the loss, 0-d, and likewise parts of means: `token_accuracy`; `divergence`, D in nats, without temperature^2; with a
    share of it `cross_entropy`.
    """
    kind = divergence_named(divergence, beta, skew_alpha)
    weight = (1 - cross_entropy_share) * temperature**2

    def values_of(
        logits: torch.Tensor, targets: torch.Tensor, of_teacher: TeacherLogps, shared: int, gradient: torch.Tensor | None
    ) -> list[torch.Tensor]:
        correct = torch.empty_like(targets, dtype=torch.bool)
        of_data = torch.empty_like(logits) if gradient is not None and cross_entropy_share else None
        nll = token_losses(logits, targets, gradient=of_data, correct=correct)
        of_shared = None if gradient is None else gradient[:, :shared]
        apart = divergence_of_tokens(of_teacher, logits[:, :shared], kind, temperature, of_shared, weight)
        if gradient is not None:
            gradient[:, shared:] = 0.0
            if of_data is not None:
                gradient.add_(of_data, alpha=cross_entropy_share)
        if not cross_entropy_share:
            return [weight * apart, correct, apart]
        return [weight * apart + cross_entropy_share * nll, correct, apart, nll]

    sums, _ = _sums(model, micro_batch, teacher, temperature, values_of)
    loss, *parts = sums / max(float(totals["tokens"]), 1.0)
    return loss, dict(zip(("token_accuracy", "divergence", "cross_entropy"), (part.detach() for part in parts), strict=False))


ValuesOf = Callable[[torch.Tensor, torch.Tensor, TeacherLogps, int, torch.Tensor | None], Sequence[torch.Tensor]]


def _sums(
    model: nn.Module, micro_batch: MicroBatch, teacher: TeacherFn, temperature: float, values_of: ValuesOf
) -> tuple[torch.Tensor, int]:
    """What `values_of(logits, targets, of_teacher, shared, gradient)` makes of a chunk of positions, summed, `[n]`; and their
    number. The first is a loss; `gradient`, where it is one, is filled with that of the chunk's logits, and may be they."""
    positions, targets = supervised(micro_batch)
    inputs = model_inputs(micro_batch)

    def of_student(of_teacher: OfTeacher, shared: int) -> torch.Tensor:
        def compute(
            logits_of: Logits, parameters: Sequence[nn.Parameter], rows: torch.Tensor, vocabulary: int
        ) -> torch.Tensor:
            there = targets.to(rows.device)

            def sums_of(piece: slice, logits: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
                found = values_of(logits, there[piece], of_teacher(piece), shared, gradient)
                return torch.stack([precise_sum(each) for each in found])

            return added_in_chunks(sums_of, logits_of, parameters, rows, vocabulary + shared)

        return at_positions(model, inputs, positions, compute)

    return teacher(micro_batch, temperature, of_student), len(positions)


def distillation_metrics(teacher: TeacherFn, temperature: float = 1.0) -> Metrics:
    """Means over the supervised tokens of a split: those of `causal_lm_metrics`, and how far the student is from its teacher.

    `kl`: KL(p, q) in nats, at the temperature, whatever is trained on. Of a teacher of which only the k most probable
    tokens are known, it counts all others as one, which makes it smaller; `kl_at_most` is what it is with all of them at most
    (`most_of_the_rest`).
    """

    forward_kl = divergence_named("forward_kl")

    def values_of(
        logits: torch.Tensor, targets: torch.Tensor, of_teacher: TeacherLogps, shared: int, _: torch.Tensor | None
    ) -> list[torch.Tensor]:
        correct = torch.empty_like(targets, dtype=torch.bool)
        nll = token_losses(logits, targets, correct=correct)
        apart = divergence_of_tokens(of_teacher, logits[:, :shared], forward_kl, temperature)
        rest = most_of_the_rest(precise(logits), of_teacher, shared, temperature)
        return [nll, correct, apart, *([] if rest is None else [apart + rest])]

    def update(model: nn.Module, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        sums, tokens = _sums(model, micro_batch, teacher, temperature, values_of)
        nll, correct, *apart = sums
        found = dict(zip(("kl", "kl_at_most"), apart, strict=False))
        return {"nll": nll, "correct": correct.round().long(), **found, "tokens": torch.tensor(tokens, device=nll.device)}

    def finalize(sums: dict[str, np.ndarray]) -> dict[str, float]:
        kl: dict[str, float] = {n: ratio(sums[n], sums["tokens"]) for n in ("kl", "kl_at_most") if n in sums}
        return {**causal_lm_metrics.finalize(sums), **kl}

    return Metrics(update=update, finalize=finalize)


def most_of_the_rest(
    logits: torch.Tensor, of_teacher: TeacherLogps, shared: int, temperature: float
) -> torch.Tensor | None:
    """How much KL(p, q) grows at most if its tail is not counted as one token, nats `[positions]`; None without a tail.

    With tail masses P and Q, a tail token i adds p_i log(p_i / q_i), where p_i is at most P and at most that of the least
    likely token that is known, p_k, and q_i at least the smallest in the tail: all of them together at most
    P log(min(P, p_k) / min q), of which P log(P / Q) was counted already.
    """
    if of_teacher.ids is None:
        return None
    every = (logits[:, :shared] / temperature).log_softmax(-1)
    least = every.scatter(1, of_teacher.ids, torch.inf).amin(-1)
    rest_of_student = every.scatter(1, of_teacher.ids, -torch.inf).logsumexp(-1)
    rest, of_least = of_teacher.logps[:, -1], of_teacher.logps[:, -2]
    gap = (torch.minimum(of_least, rest) - least) - (rest - rest_of_student)
    return (rest.exp() * gap.masked_fill(rest == -torch.inf, 0.0)).clamp_min(0.0)
