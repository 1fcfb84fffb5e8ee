"""What a language model's own log-probabilities say of marked answers, where no reference model and no loss is at hand.

They are no rewards: the reward of DPO and KTO is the log-probability less that of the reference model, which decides otherwise
where the reference already found one of two answers the likelier.
"""

from typing import Any

import numpy as np
import torch

from toolkit.losses.answer_logps import answer_logps, pair_logps
from toolkit.metrics.classes import area_under_curve
from toolkit.metrics.metric import Metrics, precise_sum, ratio

PAIR_LIKELIHOODS = ("logps_accuracy", "logps_margin", "logps_chosen", "logps_rejected")
ANSWER_LIKELIHOODS = ("logps_auc", "logps_margin", "logps_desirable", "logps_undesirable")


def _update(model: Any, pairs: dict[str, Any]) -> dict[str, torch.Tensor]:
    chosen, rejected = pair_logps(model, pairs)[:2]
    each = {
        "logps_accuracy": (chosen > rejected).to(chosen.dtype), "logps_margin": chosen - rejected,
        "logps_chosen": chosen, "logps_rejected": rejected, "pairs": torch.ones_like(chosen),
    }  # fmt: skip
    return {name: precise_sum(values) for name, values in each.items()}


def _finalize(sums: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: ratio(sums[name], sums["pairs"]) for name in PAIR_LIKELIHOODS}


# Exact means over the pairs of `collate_pairs`; log p is the sum over an answer's tokens given its prompt, in nats.
# `logps_accuracy`: share of pairs with log p(chosen) > log p(rejected), a tie counting as 0; `logps_margin`: their difference.
pair_likelihood_metrics = Metrics(update=_update, finalize=_finalize)


def _gather(model: Any, answers: dict[str, Any]) -> dict[str, torch.Tensor]:
    logps = answer_logps(model, answers)
    return {"logps": logps, "desirable": answers["desirable"].to(logps.dtype)}


def _finalize_rows(rows: dict[str, np.ndarray]) -> dict[str, float]:
    logps, desirable = rows["logps"].astype(np.float64), rows["desirable"] > 0
    means = [float(logps[kind].mean()) if kind.any() else float("nan") for kind in (desirable, ~desirable)]
    figures = (area_under_curve(logps, desirable), means[0] - means[1], *means)
    return dict(zip(ANSWER_LIKELIHOODS, figures, strict=True))


# The same of the single answers of `collate_answers`. `logps_auc`: share of couples of a desirable and an undesirable answer of
# which the desirable one is likelier, ties counting half; not a number where one kind is missing, as its mean is.
answer_likelihood_metrics = Metrics(update=None, finalize=_finalize_rows, gather=_gather)
