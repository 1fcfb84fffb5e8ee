"""The loss of preference pairs by the names of its parts, one or a weighted sum of several, and its metrics.

The pairs' mean is over `totals["pairs"]`, the pairs of the global batch; the likelihood of chosen answers, a term of
sft, cpo and orpo, is a mean over `totals["chosen_tokens"]`, the tokens of all its chosen answers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from toolkit.config.conditions import COUPLING_PAIRS
from toolkit.data.loading.batch import MicroBatch
from toolkit.losses import pair_losses as losses
from toolkit.losses.pair_losses import PairLogps, means_per_token, score_of, sft_loss
from toolkit.losses.reward import reward_metrics_by_pair
from toolkit.metrics.metric import Metrics, precise_sum, ratio

LogpsOf = Callable[[nn.Module, MicroBatch], tuple[PairLogps, PairLogps | None]]

# Each loss by its name in the settings, and which values it takes next to the log-probabilities.
_WITH_REFERENCE: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    "sigmoid": (losses.sigmoid_loss, ("beta", "label_smoothing", "score")),
    "sigmoid_norm": (losses.sigmoid_norm_loss, ("beta", "score")),
    "hinge": (losses.hinge_loss, ("beta", "score")),
    "ipo": (losses.ipo_loss, ("beta", "score")),
    "robust": (losses.robust_loss, ("beta", "label_smoothing", "score")),
    "exo_pair": (losses.exo_pair_loss, ("beta", "label_smoothing", "score")),
    "discopop": (losses.discopop_loss, ("beta", "tau", "score")),
    "nca_pair": (losses.nca_pair_loss, ("beta",)),
    "bco_pair": (losses.bco_pair_loss, ("beta",)),
    "sppo_hard": (losses.sppo_hard_loss, ("beta",)),
    "apo_zero": (losses.apo_zero_loss, ("beta",)),
    "apo_down": (losses.apo_down_loss, ("beta",)),
    "aot": (losses.aot_loss, ("beta", "label_smoothing")),
    "aot_unpaired": (losses.aot_unpaired_loss, ("beta", "label_smoothing")),
}
_WITHOUT_REFERENCE: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    "simpo": (losses.simpo_loss, ("beta", "gamma", "label_smoothing")),
    "cpo": (losses.cpo_loss, ("beta", "label_smoothing")),
    "orpo": (losses.orpo_loss, ("beta",)),
}


def preference_loss(
    policy: PairLogps,
    reference: PairLogps | None,
    totals: Mapping[str, float],
    *,
    loss_type: Sequence[str] | str = ("sigmoid",),
    loss_weights: Sequence[float] = (),
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    discopop_tau: float = 0.05,
    simpo_gamma: float = 0.5,
    cpo_alpha: float = 1.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the mean loss over the global batch; without further arguments that of DPO.

    The sum of the parts is the same however the global batch is cut, except for aot and aot_unpaired, which compare the pairs
    of a micro-batch with each other.

    Args:
        totals: "pairs" and, where a loss has a likelihood term, "chosen_tokens", of the global batch.
        loss_type, loss_weights: which losses of `toolkit.losses.pair_losses` are added, and the weight of each, 1 by default.
        beta: how strongly the policy is held to the reference.
        label_smoothing: share of pairs whose labels are taken to be flipped.
        f_divergence_type, f_alpha_divergence_coef: divergence between policy and reference, see `score_of`.
        discopop_tau, simpo_gamma: of these two losses alone.
        cpo_alpha: of cpo, the weight of the chosen answers' likelihood.

    Returns the loss, 0-d, and the metrics of `metrics_by_pair`, likewise parts of means over the pairs.
    """
    loss_type = [loss_type] if isinstance(loss_type, str) else loss_type
    each = pair_losses(
        policy, reference, loss_type=loss_type, loss_weights=loss_weights, beta=beta, label_smoothing=label_smoothing,
        f_divergence_type=f_divergence_type, f_alpha_divergence_coef=f_alpha_divergence_coef, discopop_tau=discopop_tau,
        simpo_gamma=simpo_gamma,
    )  # fmt: skip
    loss = each.sum() / totals["pairs"]
    if weight := likelihood_weight(loss_type, loss_weights, cpo_alpha):
        loss = loss + weight * sft_loss(policy).sum() / totals["chosen_tokens"]
    metrics = metrics_by_pair(policy, reference, loss_type, beta)
    return loss, {name: values.sum() / totals["pairs"] for name, values in metrics.items()}


def preference_metrics(
    logps_of: LogpsOf,
    *,
    loss_type: Sequence[str] | str = ("sigmoid",),
    loss_weights: Sequence[float] = (),
    beta: float = 0.1,
    cpo_alpha: float = 1.0,
    **others: Any,
) -> Metrics:
    """Exact means over the pairs of a split: `loss`, as `preference_loss` has it, and the metrics of `metrics_by_pair`.

    In the loss of aot and aot_unpaired each pair is alone, which is the loss of sigmoid, so that no metric depends on
    which pairs are evaluated together.

    Args:
        logps_of: the policy's and the reference's log-probabilities for (model, micro-batch); None without a reference.
        loss_type, loss_weights, beta, cpo_alpha, others: the keyword arguments of `preference_loss`.
    """
    loss_type = [loss_type] if isinstance(loss_type, str) else loss_type
    alone = ["sigmoid" if name in COUPLING_PAIRS else name for name in loss_type]

    def update(model: nn.Module, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        policy, reference = logps_of(model, micro_batch)
        each = {
            "pair_loss": pair_losses(policy, reference, loss_type=alone, loss_weights=loss_weights, beta=beta, **others),
            "likelihood_loss": sft_loss(policy),
            "chosen_tokens": policy.chosen_tokens,
            "pairs": torch.ones_like(policy.chosen),
            **metrics_by_pair(policy, reference, loss_type, beta),
        }
        return {name: precise_sum(values.detach()) for name, values in each.items()}

    def finalize(sums: dict[str, np.ndarray]) -> dict[str, float]:
        pairs, loss = sums["pairs"], ratio(sums["pair_loss"], sums["pairs"])
        if weight := likelihood_weight(loss_type, loss_weights, cpo_alpha):
            loss += weight * ratio(sums["likelihood_loss"], sums["chosen_tokens"])
        of_the_loss = ("pair_loss", "likelihood_loss", "chosen_tokens", "pairs")
        return {"loss": loss, **{name: ratio(value, pairs) for name, value in sums.items() if name not in of_the_loss}}

    return Metrics(update=update, finalize=finalize)


def metrics_by_pair(
    policy: PairLogps, reference: PairLogps | None, loss_type: Sequence[str] = ("sigmoid",), beta: float = 0.1
) -> dict[str, torch.Tensor]:
    """What is logged of each pair, all `[pairs]`, without gradient.

    - `rewards_chosen`, `rewards_rejected`: the implicit reward beta * (log π - log π_ref) of an answer. Without a reference
      beta * log π, of the mean token with simpo and orpo, which compare means. In nats; no divergence enters.
    - `reward_margin`: rewards_chosen - rewards_rejected.
    - `reward_accuracy`: 1 where the chosen answer has the greater reward. A tie counts as 0, as in TRL, so a policy that is
      still its own reference has an accuracy of 0, not of a half.
    - `logps_chosen`, `logps_rejected`: log π of an answer, nats.
    - `logps_drop`, only with a reference: log π_ref - log π, the mean of both answers, nats per answer: how much less
      likely training has made them. Below 0 where they have become likelier. It is no KL divergence, though for answers
      that were sampled from the reference it estimates KL(reference || policy).
    """
    chosen, rejected = policy.chosen, policy.rejected
    if reference is not None:
        chosen, rejected = chosen - reference.chosen, rejected - reference.rejected
    elif {"simpo", "orpo"} & set(loss_type):
        chosen, rejected = means_per_token(policy)
    metrics = {
        **reward_metrics_by_pair(beta * chosen.detach(), beta * rejected.detach()),
        "logps_chosen": policy.chosen.detach(),
        "logps_rejected": policy.rejected.detach(),
    }
    if reference is not None:
        metrics["logps_drop"] = (reference.chosen - policy.chosen + reference.rejected - policy.rejected).detach() / 2
    return metrics


def pair_losses(
    policy: PairLogps,
    reference: PairLogps | None,
    *,
    loss_type: Sequence[str] = ("sigmoid",),
    loss_weights: Sequence[float] = (),
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    discopop_tau: float = 0.05,
    simpo_gamma: float = 0.5,
) -> torch.Tensor:
    """The weighted sum of the losses of `loss_type`, `[pairs]`, without their likelihood terms."""
    if reference is None and needs_reference(loss_type):
        raise ValueError(f"loss_type {', '.join(loss_type)} needs the log-probabilities of a reference model.")
    score = score_of(f_divergence_type, f_alpha_divergence_coef)
    values = {"beta": beta, "label_smoothing": label_smoothing, "score": score, "tau": discopop_tau, "gamma": simpo_gamma}
    total = torch.zeros_like(policy.chosen)
    for name, weight in _weighted(loss_type, loss_weights):
        if name in _WITHOUT_REFERENCE:
            loss, takes = _WITHOUT_REFERENCE[name]
            total = total + weight * loss(policy, **{each: values[each] for each in takes})
        elif name != "sft":
            loss, takes = _WITH_REFERENCE[name]
            total = total + weight * loss(policy, reference, **{each: values[each] for each in takes})
    return total


def likelihood_weight(
    loss_type: Sequence[str] = ("sigmoid",), loss_weights: Sequence[float] = (), cpo_alpha: float = 1.0
) -> float:
    """The weight of the chosen answers' mean negative log-likelihood per token: that of sft, and as a part of cpo and orpo."""
    shares = {"sft": 1.0, "cpo": cpo_alpha, "orpo": 1.0}
    return sum(weight * shares.get(name, 0.0) for name, weight in _weighted(loss_type, loss_weights))


def needs_reference(loss_type: Sequence[str] = ("sigmoid",)) -> bool:
    """Whether any of the losses compares the policy with a reference model."""
    return any(name in _WITH_REFERENCE for name in loss_type)


def _weighted(loss_type: Sequence[str], loss_weights: Sequence[float]) -> list[tuple[str, float]]:
    return list(zip(loss_type, loss_weights or [1.0] * len(loss_type), strict=True))
