"""Losses of preference pairs that need no reference model: SimPO, CPO, ORPO, and the plain likelihood of chosen answers.

Each returns the loss of each pair, `[pairs]`. In the formulas w is the chosen answer, l the rejected one, |w| its tokens.
"""

import torch
from torch.nn.functional import logsigmoid

from toolkit.losses.pair_logps import PairLogps


def simpo_loss(policy: PairLogps, beta: float, gamma: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """SimPO: -log σ(x) with x = β (log π(w) / |w| - log π(l) / |l|) - γ. arXiv:2405.14734, equation 6.

    With `label_smoothing` e: -(1 - e) log σ(x) - e log σ(-x).
    """
    chosen, rejected = means_per_token(policy)
    return smoothed_logistic(beta * (chosen - rejected) - gamma, label_smoothing)


def cpo_loss(policy: PairLogps, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """CPO's preference term: -log σ(x) with x = β (log π(w) - log π(l)). arXiv:2401.08417, equation 3.

    With `label_smoothing` e: -(1 - e) log σ(x) - e log σ(-x). Its other term is `sft_loss`.
    """
    return smoothed_logistic(beta * (policy.chosen - policy.rejected), label_smoothing)


def orpo_loss(policy: PairLogps, beta: float) -> torch.Tensor:
    """ORPO's odds-ratio term: -β log σ(log odds(w) - log odds(l)), odds = p / (1 - p), p = exp(log π / tokens).

    arXiv:2403.07691, equations 4 and 7; β is its λ. Its other term is `sft_loss`.
    """
    chosen, rejected = means_per_token(policy)
    return -beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def sft_loss(policy: PairLogps) -> torch.Tensor:
    """-log π(w), summed over the answer's tokens. Its unit is the token: the mean is over all chosen tokens.

    The likelihood term of RPO (arXiv:2404.19733, equation 1, where each answer is divided by its own length), CPO and ORPO.
    """
    return -policy.chosen


def means_per_token(policy: PairLogps) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean log-probability of a token, of each chosen and each rejected answer."""
    return policy.chosen / policy.chosen_tokens.clamp(min=1), policy.rejected / policy.rejected_tokens.clamp(min=1)


def smoothed_logistic(margin: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """-(1 - e) log σ(margin) - e log σ(-margin): e = `label_smoothing` is the share of labels taken to be flipped."""
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def _log_odds(log_p: torch.Tensor) -> torch.Tensor:
    # An answer known by heart rounds to log p = 0, whose odds are infinite and whose gradient is not a number.
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    return log_p - torch.log(-torch.expm1(log_p))
