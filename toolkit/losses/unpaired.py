"""Losses of single answers that are marked desirable or undesirable, KTO and its relative, and their metrics.

The mean is over `totals["examples"]`, the answers of the global batch. KTO couples them: its reference point z is the mean
over mismatched answers of the *global batch*, known before the loss of any of its micro-batches
(`toolkit.preference.reference`). With z given the loss is a sum over answers, so a step is exact for the global batch,
however that is cut.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

from toolkit.data.loading.batch import MicroBatch
from toolkit.metrics.classes import area_under_curve
from toolkit.metrics.metric import Metrics

# of the policy and of the reference, each `[answers]`, for (model, micro-batch)
LogpsOf = Callable[[nn.Module, MicroBatch], tuple[torch.Tensor, torch.Tensor]]


def unpaired_loss(
    policy: torch.Tensor,
    reference: torch.Tensor,
    desirable: torch.Tensor,
    kl: torch.Tensor | float,
    totals: Mapping[str, float],
    *,
    loss_type: str = "kto",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the mean loss over the answers of the global batch: `kto_loss` or `apo_zero_unpaired_loss`.

    Args:
        policy, reference: log-probabilities of the answers, `[answers]`, nats.
        desirable: `[answers]`, bool.
        kl: z of the step, 0 for apo_zero_unpaired.
        totals: "examples", "desirable" and "undesirable" ones of the global batch.

    Returns the loss, 0-d, and metrics, likewise parts of means:

    - `rewards_desirable`, `rewards_undesirable`: the mean implicit reward beta * (log π - log π_ref) of answers of that kind,
      nats. Not a number in a step that has none of it; such steps enter no mean of a log event.
    - `reward_margin`: rewards_desirable - rewards_undesirable.
    - `reward_accuracy`: share of answers on their side of the loss's reference point: desirable ones whose reward is above
      beta * z, undesirable ones whose is below. A tie counts as 0, so a policy that is still its own reference has 0.
    - `logps_desirable`, `logps_undesirable`: the mean log π of an answer, nats.
    - `kl`, of kto: z, an estimate of KL(policy || reference) in nats per answer that is never below 0.
    """
    kl = torch.as_tensor(kl, dtype=policy.dtype, device=policy.device)
    values = {"beta": beta, "desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    if loss_type == "kto":
        losses = kto_loss(policy, reference, desirable, kl, **values)
    else:
        losses = apo_zero_unpaired_loss(policy, reference, desirable, **values)
    rewards, logps = beta * (policy - reference).detach(), policy.detach()
    kinds = (("desirable", desirable), ("undesirable", ~desirable))
    metrics = {f"rewards_{kind}": (rewards * of_it).sum() / _or_nan(totals[kind]) for kind, of_it in kinds}
    metrics["reward_margin"] = metrics["rewards_desirable"] - metrics["rewards_undesirable"]
    is_right = torch.where(desirable, rewards > beta * kl, rewards < beta * kl)
    metrics["reward_accuracy"] = is_right.sum() / totals["examples"]
    metrics |= {f"logps_{kind}": (logps * of_it).sum() / _or_nan(totals[kind]) for kind, of_it in kinds}
    if loss_type == "kto":
        metrics["kl"] = kl * len(policy) / totals["examples"]
    return losses.sum() / totals["examples"], metrics


def unpaired_metrics(
    logps_of: LogpsOf,
    logps_of_mismatched: LogpsOf,
    *,
    loss_type: str = "kto",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Metrics:
    """Exact metrics over the answers of a split: `loss` and those of `unpaired_loss`, with z the mean over the whole split.

    And `reward_auc`: the share of all couples of a desirable and an undesirable answer in which the desirable one has the
    greater reward, ties counting half. No reference point enters it; 0.5 is chance.

    Args:
        logps_of, logps_of_mismatched: log-probabilities of the policy and of the reference for (model, micro-batch), of the
            answers and of the mismatched ones.
    """

    def gather(model: nn.Module, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        policy, reference = logps_of(model, micro_batch)
        rows = {"policy": policy, "reference": reference, "desirable": micro_batch["desirable"].to(policy.dtype)}
        if loss_type == "kto":
            policy, reference = logps_of_mismatched(model, micro_batch)
            rows["mismatched"] = policy - reference
        return rows

    def finalize(rows: dict[str, np.ndarray]) -> dict[str, float]:
        policy, reference = (torch.from_numpy(rows[name].astype(np.float64)) for name in ("policy", "reference"))
        desirable = torch.from_numpy(rows["desirable"] > 0)
        mismatched = torch.from_numpy(rows.get("mismatched", np.zeros(1)).astype(np.float64))
        kl = kto_kl(mismatched, torch.zeros_like(mismatched))
        count = float(desirable.sum())
        totals = {"examples": float(len(policy)), "desirable": count, "undesirable": len(policy) - count}
        loss, metrics = unpaired_loss(
            policy, reference, desirable, kl, totals,
            loss_type=loss_type, beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight,
        )  # fmt: skip
        auc = area_under_curve((policy - reference).numpy(), desirable.numpy())
        return {"loss": float(loss), **{name: float(value) for name, value in metrics.items()}, "reward_auc": auc}

    return Metrics(update=None, finalize=finalize, gather=gather)


def _or_nan(total: float) -> float:
    return total or float("nan")


# -- the losses of each answer, `[answers]` --------------------------------------------------------------------------------


def kto_loss(
    policy: torch.Tensor,
    reference: torch.Tensor,
    desirable: torch.Tensor,
    kl: torch.Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """KTO: λ_D (1 - σ(β (h - z))) of desirable answers, λ_U (1 - σ(β (z - h))) of undesirable ones, h = log π - log π_ref.

    KTO, arXiv:2402.01306, equations 7 and 8. z is `kl`, 0-d and without gradient, of `kto_kl`: the loss is exact for the
    examples it was estimated on. With the estimate of a micro-batch another micro-batch size is another loss; with that of
    the global batch it is the mean over the global batch, however that is cut.
    """
    above = torch.where(desirable, policy - reference - kl, kl - policy + reference)
    return _weights(desirable, desirable_weight, undesirable_weight, policy) * torch.sigmoid(-beta * above)


def kto_kl(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """KTO's reference point z, 0-d, no gradient: max(0, mean of log π - log π_ref) over answers that belong to other prompts.

    An estimate of KL(policy || reference) in nats per answer (arXiv:2402.01306). `policy` and `reference` are of
    mismatched answers, `[examples]`; over several micro-batches or ranks collect these first, since the maximum is last.
    """
    return (policy - reference).detach().mean().clamp(min=0)


def apo_zero_unpaired_loss(
    policy: torch.Tensor,
    reference: torch.Tensor,
    desirable: torch.Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """APO-zero of single answers: λ_D (1 - σ(β h)) of desirable ones, λ_U σ(β h) of undesirable ones.

    APO, arXiv:2408.06266, equation 7, term by term: KTO with z = 0, exact however the batch is cut.
    """
    return kto_loss(policy, reference, desirable, policy.new_zeros(()), beta, desirable_weight, undesirable_weight)


def _weights(desirable: torch.Tensor, if_so: float, if_not: float, like: torch.Tensor) -> torch.Tensor:
    return torch.where(desirable, like.new_tensor(if_so), like.new_tensor(if_not))  # of two numbers it would be float32
