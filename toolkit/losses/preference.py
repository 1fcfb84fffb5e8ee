"""The loss of preference pairs that the settings ask for, one or a weighted sum of several, and its figures.

The pairs' mean is over `totals["pairs"]`, the pairs of the global batch; the likelihood of chosen answers, a term of
sft, cpo and orpo, is a mean over `totals["chosen_tokens"]`, the tokens of all its chosen answers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from toolkit.config import PreferenceConfig
from toolkit.config.conditions import COUPLING_PAIRS
from toolkit.losses.divergences import Score, score_of
from toolkit.losses.pair_logps import PairLogps
from toolkit.losses.reference_free import cpo_loss, means_per_token, orpo_loss, sft_loss, simpo_loss
from toolkit.losses.with_reference import (
    aot_loss,
    aot_unpaired_loss,
    apo_down_loss,
    apo_zero_loss,
    bco_pair_loss,
    discopop_loss,
    exo_pair_loss,
    hinge_loss,
    ipo_loss,
    nca_pair_loss,
    robust_loss,
    sigmoid_loss,
    sigmoid_norm_loss,
    sppo_hard_loss,
)
from toolkit.metrics.metric import Metrics, precise_sum, ratio

LogpsOf = Callable[[Any, dict[str, Any]], tuple[PairLogps, PairLogps | None]]


def preference_loss(
    policy: PairLogps, reference: PairLogps | None, totals: dict[str, float], config: PreferenceConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the mean loss over the global batch.

    `totals`: "pairs" and, where a loss has a likelihood term, "chosen_tokens". The sum of the parts is the same however
    the global batch is cut, except for aot and aot_unpaired, which compare the pairs of a micro-batch with each other.

    Returns the loss, 0-d, and the figures of `pair_figures`, likewise parts of means over the pairs.
    """
    loss = pair_losses(policy, reference, config).sum() / totals["pairs"]
    if weight := likelihood_weight(config):
        loss = loss + weight * sft_loss(policy).sum() / totals["chosen_tokens"]
    figures = pair_figures(policy, reference, config)
    return loss, {name: values.sum() / totals["pairs"] for name, values in figures.items()}


def preference_metrics(logps_of: LogpsOf, config: PreferenceConfig) -> Metrics:
    """Exact means over the pairs of a split: `loss`, as in training, and the figures of `pair_figures`.

    In the loss of aot and aot_unpaired each pair stands alone, which is the loss of sigmoid, so that no figure depends on
    which pairs are evaluated together.

    Args:
        logps_of: the policy's and the reference's log-probabilities for (model, micro-batch); None without a reference.
    """

    def update(model: Any, micro_batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        policy, reference = logps_of(model, micro_batch)
        each = {
            "pair_loss": pair_losses(policy, reference, config, alone=True),
            "likelihood_loss": sft_loss(policy),
            "chosen_tokens": policy.chosen_tokens,
            "pairs": torch.ones_like(policy.chosen),
            **pair_figures(policy, reference, config),
        }
        return {name: precise_sum(values.detach()) for name, values in each.items()}

    def finalize(sums: dict[str, np.ndarray]) -> dict[str, float]:
        means = {name: ratio(value, sums["pairs"]) for name, value in sums.items() if name not in _ONLY_FOR_THE_LOSS}
        loss = ratio(sums["pair_loss"], sums["pairs"])
        if weight := likelihood_weight(config):
            loss += weight * ratio(sums["likelihood_loss"], sums["chosen_tokens"])
        return {"loss": loss, **means}

    return Metrics(update=update, finalize=finalize)


_ONLY_FOR_THE_LOSS = ("pair_loss", "likelihood_loss", "chosen_tokens", "pairs")


def pair_figures(policy: PairLogps, reference: PairLogps | None, config: PreferenceConfig) -> dict[str, torch.Tensor]:
    """What is reported of each pair, all `[pairs]`, without gradient.

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
    elif {"simpo", "orpo"} & set(config.loss_type):
        chosen, rejected = means_per_token(policy)
    chosen, rejected = config.beta * chosen.detach(), config.beta * rejected.detach()
    figures = {
        "rewards_chosen": chosen,
        "rewards_rejected": rejected,
        "reward_margin": chosen - rejected,
        "reward_accuracy": (chosen > rejected).to(chosen.dtype),
        "logps_chosen": policy.chosen.detach(),
        "logps_rejected": policy.rejected.detach(),
    }
    if reference is not None:
        figures["logps_drop"] = (reference.chosen - policy.chosen + reference.rejected - policy.rejected).detach() / 2
    return figures


def pair_losses(
    policy: PairLogps, reference: PairLogps | None, config: PreferenceConfig, alone: bool = False
) -> torch.Tensor:
    """The weighted sum of the losses of `loss_type`, `[pairs]`, without their likelihood terms.

    With `alone`, losses that couple a batch take each pair for a batch of its own.
    """
    if reference is None and needs_reference(config):
        raise ValueError(f"loss_type {', '.join(config.loss_type)} needs the log-probabilities of a reference model.")
    losses = torch.zeros_like(policy.chosen)
    for name, weight in _weighted(config):
        name = "sigmoid" if alone and name in COUPLING_PAIRS else name
        if name in _WITHOUT_REFERENCE:
            losses = losses + weight * _WITHOUT_REFERENCE[name](policy, config)
        elif name != "sft":
            assert reference is not None
            losses = losses + weight * _WITH_REFERENCE[name](policy, reference, config)
    return losses


def likelihood_weight(config: PreferenceConfig) -> float:
    """The weight of the chosen answers' mean negative log-likelihood per token: that of sft, and as a part of cpo and orpo."""
    shares = {"sft": 1.0, "cpo": config.cpo_alpha, "orpo": 1.0}
    return sum(weight * shares.get(name, 0.0) for name, weight in _weighted(config))


def needs_reference(config: PreferenceConfig) -> bool:
    """Whether any of the losses compares the policy with a reference model."""
    return any(name in _WITH_REFERENCE for name in config.loss_type)


def _weighted(config: PreferenceConfig) -> list[tuple[str, float]]:
    return list(zip(config.loss_type, config.loss_weights or [1.0] * len(config.loss_type), strict=True))


def _score(config: PreferenceConfig) -> Score:
    return score_of(config.f_divergence_type, config.f_alpha_divergence_coef)


_WITHOUT_REFERENCE: dict[str, Callable[[PairLogps, PreferenceConfig], torch.Tensor]] = {
    "simpo": lambda policy, c: simpo_loss(policy, c.beta, c.simpo_gamma, c.label_smoothing),
    "cpo": lambda policy, c: cpo_loss(policy, c.beta, c.label_smoothing),
    "orpo": lambda policy, c: orpo_loss(policy, c.beta),
}

_WITH_REFERENCE: dict[str, Callable[[PairLogps, PairLogps, PreferenceConfig], torch.Tensor]] = {
    "sigmoid": lambda policy, reference, c: sigmoid_loss(policy, reference, c.beta, c.label_smoothing, _score(c)),
    "sigmoid_norm": lambda policy, reference, c: sigmoid_norm_loss(policy, reference, c.beta, _score(c)),
    "hinge": lambda policy, reference, c: hinge_loss(policy, reference, c.beta, _score(c)),
    "ipo": lambda policy, reference, c: ipo_loss(policy, reference, c.beta, _score(c)),
    "robust": lambda policy, reference, c: robust_loss(policy, reference, c.beta, c.label_smoothing, _score(c)),
    "exo_pair": lambda policy, reference, c: exo_pair_loss(policy, reference, c.beta, c.label_smoothing, _score(c)),
    "discopop": lambda policy, reference, c: discopop_loss(policy, reference, c.beta, c.discopop_tau, _score(c)),
    "nca_pair": lambda policy, reference, c: nca_pair_loss(policy, reference, c.beta),
    "bco_pair": lambda policy, reference, c: bco_pair_loss(policy, reference, c.beta),
    "sppo_hard": lambda policy, reference, c: sppo_hard_loss(policy, reference, c.beta),
    "apo_zero": lambda policy, reference, c: apo_zero_loss(policy, reference, c.beta),
    "apo_down": lambda policy, reference, c: apo_down_loss(policy, reference, c.beta),
    "aot": lambda policy, reference, c: aot_loss(policy, reference, c.beta, c.label_smoothing),
    "aot_unpaired": lambda policy, reference, c: aot_unpaired_loss(policy, reference, c.beta, c.label_smoothing),
}
