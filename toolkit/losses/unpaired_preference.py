"""The loss of single answers that the settings ask for, its reference point, and its figures.

The mean is over `totals["examples"]`, the answers of the global batch. KTO couples them: its reference point z is the mean
over mismatched answers of the *global batch*, known before the loss of any of its micro-batches
(`toolkit.preference.kl_estimate`). With z given the loss is a sum over answers, so a step is exact for the global batch,
however that is cut.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from toolkit.config import UnpairedConfig
from toolkit.losses.unpaired import apo_zero_unpaired_loss, kto_kl, kto_loss
from toolkit.metrics.classes import area_under_curve
from toolkit.metrics.metric import Metrics

LogpsOf = Callable[[Any, dict[str, Any]], tuple[torch.Tensor, torch.Tensor]]  # of the policy and of the reference, `[answers]`


def unpaired_loss(
    policy: torch.Tensor, reference: torch.Tensor, desirable: torch.Tensor, kl: torch.Tensor | float, totals: dict[str, float],
    config: UnpairedConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """This micro-batch's part of the mean of `answer_losses` over the answers of the global batch.

    `policy` and `reference`: log-probabilities of the answers, `[answers]`; `desirable` `[answers]`, bool; `kl`: z of the
    step, 0 for apo_zero_unpaired. `totals`: "examples", "desirable" and "undesirable" ones of the global batch.

    Returns the loss, 0-d, and figures, likewise parts of means:

    - `rewards_desirable`, `rewards_undesirable`: the mean implicit reward beta * (log π - log π_ref) of answers of that kind,
      nats. Not a number in a step that has none of it; such steps enter no mean of a log event.
    - `reward_margin`: rewards_desirable - rewards_undesirable.
    - `reward_accuracy`: share of answers on their side of the loss's reference point: desirable ones whose reward is above
      beta * z, undesirable ones whose is below. A tie counts as 0, so a policy that is still its own reference has 0.
    - `logps_desirable`, `logps_undesirable`: the mean log π of an answer, nats.
    - `kl`, of kto: z, an estimate of KL(policy || reference) in nats per answer that is never below 0.
    """
    kl = torch.as_tensor(kl, dtype=policy.dtype, device=policy.device)
    loss = answer_losses(policy, reference, desirable, kl, config).sum() / totals["examples"]
    rewards, logps = config.beta * (policy - reference).detach(), policy.detach()
    kinds = (("desirable", desirable), ("undesirable", ~desirable))
    figures = {f"rewards_{kind}": (rewards * of_it).sum() / _or_nan(totals[kind]) for kind, of_it in kinds}
    figures["reward_margin"] = figures["rewards_desirable"] - figures["rewards_undesirable"]
    is_right = torch.where(desirable, rewards > config.beta * kl, rewards < config.beta * kl)
    figures["reward_accuracy"] = is_right.sum() / totals["examples"]
    figures |= {f"logps_{kind}": (logps * of_it).sum() / _or_nan(totals[kind]) for kind, of_it in kinds}
    if config.loss_type == "kto":
        figures["kl"] = kl * len(policy) / totals["examples"]
    return loss, figures


def answer_losses(
    policy: torch.Tensor, reference: torch.Tensor, desirable: torch.Tensor, kl: torch.Tensor, config: UnpairedConfig
) -> torch.Tensor:
    """The loss of `loss_type` of each answer, `[answers]`."""
    weights = config.desirable_weight, config.undesirable_weight
    if config.loss_type == "kto":
        return kto_loss(policy, reference, desirable, kl, config.beta, *weights)
    return apo_zero_unpaired_loss(policy, reference, desirable, config.beta, *weights)


def unpaired_metrics(logps_of: LogpsOf, logps_of_mismatched: LogpsOf, config: UnpairedConfig) -> Metrics:
    """Exact figures over the answers of a split: `loss` and those of `unpaired_loss`, with z the mean over the whole split.

    And `reward_auc`: the share of all couples of a desirable and an undesirable answer in which the desirable one has the
    greater reward, ties counting half. No reference point enters it: 0.5 says that rewards tell nothing.

    Args:
        logps_of, logps_of_mismatched: log-probabilities of the policy and of the reference for (model, micro-batch), of the
            answers and of the mismatched ones.
    """

    def gather(model: Any, micro_batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        policy, reference = logps_of(model, micro_batch)
        rows = {"policy": policy, "reference": reference, "desirable": micro_batch["desirable"].to(policy.dtype)}
        if config.loss_type == "kto":
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
        loss, figures = unpaired_loss(policy, reference, desirable, kl, totals, config)
        auc = area_under_curve((policy - reference).numpy(), desirable.numpy())
        return {"loss": float(loss), **{name: float(value) for name, value in figures.items()}, "reward_auc": auc}

    return Metrics(update=None, finalize=finalize, gather=gather)


def _or_nan(total: float) -> float:
    return total or float("nan")
