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

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from toolkit.data.loading.batch import MicroBatch, model_inputs, precise
from toolkit.losses.causal_lm import causal_lm_metrics, supervised
from toolkit.losses.chunked import Logits, added_in_chunks
from toolkit.losses.selective_head import at_positions
from toolkit.metrics.metric import Metrics, precise_sum, ratio

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl")


@dataclass(frozen=True)
class TeacherLogps:
    """A teacher's log-probabilities at some positions, of its distribution at a temperature, nats, without a gradient.

    `logps` `[positions, V]`: of the first V tokens, which are those that it shares with the student. Or, with `ids`
    `[positions, k]`, of these k tokens, and behind them of all other ones together: `[positions, k + 1]`.
    """

    logps: torch.Tensor
    ids: torch.Tensor | None = None


OfTeacher = Callable[[slice], TeacherLogps]  # of a piece of the supervised positions
Body = Callable[[OfTeacher, int], torch.Tensor]
# `teacher(micro_batch, temperature, body)` calls `body(of_teacher, shared)` with its log-probabilities, `shared`
# being the number of tokens that both have, and returns what that returned. A teacher whose weights are sharded has them
# together only while it is called itself, so the student is called within.
TeacherFn = Callable[[dict[str, Any], float, Body], torch.Tensor]


def divergence_of_tokens(
    teacher: torch.Tensor, student: torch.Tensor, divergence: str, *, beta: float = 0.5, skew_alpha: float = 0.1
) -> torch.Tensor:
    """D(p, q) of each position, nats, `[...]`, from log-probabilities of both, `[..., V]`; D is of the table above.

    The gradient is the student's; jsd has none for a teacher.
    """
    if divergence == "forward_kl":
        return _kl(teacher, student)
    if divergence == "reverse_kl":
        return _kl(student, teacher)
    if divergence == "jsd":
        value: torch.Tensor = _JensenShannon.apply(teacher, student, beta)
        return value
    if divergence == "skewed_forward_kl":
        return _kl(teacher, _mixture(teacher, student, skew_alpha))
    if divergence == "skewed_reverse_kl":
        return _kl(student, _mixture(teacher, student, 1 - skew_alpha))
    raise ValueError(f"divergence {divergence}: one of {', '.join(DIVERGENCES)}")


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p, q) over the last dimension; what p never gives counts as 0, as its limit is."""
    return (p.exp() * (p - q).masked_fill(p == -math.inf, 0.0)).sum(-1)


class _JensenShannon(torch.autograd.Function):
    """β KL(p, m) + (1 - β) KL(q, m) of log-probabilities, whose derivative by log q is (1 - β) q (log q - log m).

    m's own part of it is β p + (1 - β) q over m, which is 1, so that it falls out. In half the time that autograd takes, which
    goes back through a dozen operations as large as the logits.
    """

    @staticmethod
    def forward(ctx: Any, p: torch.Tensor, q: torch.Tensor, beta: float) -> torch.Tensor:
        middle = _mixture(p, q, beta)
        each = (q.exp() * (q - middle).masked_fill(q == -math.inf, 0.0)).mul_(1 - beta)
        ctx.save_for_backward(each)
        return beta * _kl(p, middle) + each.sum(-1)

    @staticmethod
    def backward(ctx: Any, *of_values: torch.Tensor) -> Any:
        (each,) = ctx.saved_tensors
        return None, each * of_values[0].unsqueeze(-1), None


def _mixture(p: torch.Tensor, q: torch.Tensor, share: float) -> torch.Tensor:
    """log(share * p + (1 - share) * q), from logarithms."""
    if share in (0.0, 1.0):
        return p if share else q
    return torch.logaddexp(p + math.log(share), q + math.log1p(-share))


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

    def values_of(logits: torch.Tensor, targets: torch.Tensor, of_teacher: TeacherLogps, shared: int) -> list[torch.Tensor]:
        student = student_logps(logits, of_teacher, shared, temperature)
        apart = divergence_of_tokens(of_teacher.logps, student, divergence, beta=beta, skew_alpha=skew_alpha)
        loss, found = apart * ((1 - cross_entropy_share) * temperature**2), [apart]
        if cross_entropy_share:
            found += [nn.functional.cross_entropy(logits, targets, reduction="none")]
            loss = loss + cross_entropy_share * found[1]
        return [loss, logits.argmax(-1) == targets, *found]

    sums, _ = _sums(model, micro_batch, teacher, temperature, values_of)
    loss, *parts = sums / max(float(totals["tokens"]), 1.0)
    return loss, dict(zip(("token_accuracy", "divergence", "cross_entropy"), (part.detach() for part in parts), strict=False))


def student_logps(logits: torch.Tensor, of_teacher: TeacherLogps, shared: int, temperature: float) -> torch.Tensor:
    """A student's log-probabilities of what its teacher's are of, from its logits `[positions, vocabulary]`.

    `shared`: the first tokens of the vocabulary that the teacher has too.
    """
    logits = logits[:, :shared] if temperature == 1.0 else logits[:, :shared] / temperature
    if of_teacher.ids is None:
        return logits.log_softmax(-1)
    # the sum over all tokens follows from that of the others: one pass over the vocabulary less
    others = logits.scatter(1, of_teacher.ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logits.gather(1, of_teacher.ids), others], dim=1).log_softmax(-1)


ValuesOf = Callable[[torch.Tensor, torch.Tensor, TeacherLogps, int], Sequence[torch.Tensor]]


def _sums(
    model: nn.Module, micro_batch: MicroBatch, teacher: TeacherFn, temperature: float, values_of: ValuesOf
) -> tuple[torch.Tensor, int]:
    """What `values_of(logits, targets, of_teacher, shared)` makes of a chunk of positions, summed, `[n]`; and their number."""
    positions, targets = supervised(micro_batch)
    inputs = model_inputs(micro_batch)

    def of_student(of_teacher: OfTeacher, shared: int) -> torch.Tensor:
        def compute(
            logits_of: Logits, parameters: Sequence[nn.Parameter], rows: torch.Tensor, vocabulary: int
        ) -> torch.Tensor:
            there = targets.to(rows.device)

            def sums_of(piece: slice, logits: torch.Tensor) -> torch.Tensor:
                logits = precise(logits)
                return torch.stack([precise_sum(each) for each in values_of(logits, there[piece], of_teacher(piece), shared)])

            return added_in_chunks(sums_of, logits_of, parameters, rows, vocabulary + shared)

        return at_positions(model, inputs, positions, compute)

    return teacher(micro_batch, temperature, of_student), len(positions)


def distillation_metrics(teacher: TeacherFn, temperature: float = 1.0) -> Metrics:
    """Means over the supervised tokens of a split: those of `causal_lm_metrics`, and how far the student is from its teacher.

    `kl`: KL(p, q) in nats, at the temperature, whatever is trained on. Of a teacher of which only the k most probable
    tokens are known, it counts all others as one, which makes it smaller; `kl_at_most` is what it is with all of them at most
    (`most_of_the_rest`).
    """

    def values_of(logits: torch.Tensor, targets: torch.Tensor, of_teacher: TeacherLogps, shared: int) -> list[torch.Tensor]:
        nll = nn.functional.cross_entropy(logits, targets, reduction="none")
        apart = _kl(of_teacher.logps, student_logps(logits, of_teacher, shared, temperature))
        rest = most_of_the_rest(logits, of_teacher, shared, temperature)
        return [nll, logits.argmax(-1) == targets, apart, *([] if rest is None else [apart + rest])]

    def update(model: nn.Module, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        sums, tokens = _sums(model, micro_batch, teacher, temperature, values_of)
        nll, correct, *kl = sums
        found = dict(zip(("kl", "kl_at_most"), kl, strict=False))
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
