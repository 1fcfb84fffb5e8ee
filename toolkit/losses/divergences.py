"""f-divergences between policy and reference: the score that an answer earns by its log-ratio.

A preference loss regularized with a divergence D_f(policy || reference) takes f'(u) of the ratio u = policy / reference as
an answer's score (f-DPO, arXiv:2309.16240, theorem 1 and table 1). f is free up to a linear term, which shifts all scores
alike; here f'(1) = 0, so that an answer scores 0 where the two models agree.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

Score = Callable[[torch.Tensor], torch.Tensor]

_LARGEST_EXPONENT = 80.0  # exp of it is still a float32, and so is a difference of two


def reverse_kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """log u: that of DPO."""
    return log_ratio


def forward_kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """1 - 1 / u. An answer that became less likely than exp(-80) of what it was keeps that score and has no gradient."""
    return alpha_divergence(log_ratio, 0.0)


def js_divergence(log_ratio: torch.Tensor) -> torch.Tensor:
    """log(2 u / (1 + u)), that of the Jensen-Shannon divergence."""
    return math.log(2) + functional.logsigmoid(log_ratio)


def alpha_divergence(log_ratio: torch.Tensor, coefficient: float = 0.5) -> torch.Tensor:
    """(u^(c - 1) - 1) / (c - 1): from the forward KL, c = 0, to the reverse KL, c = 1.

    c is TRL's `f_alpha_divergence_coef` as TRL computes with it, which is 1 - α of the paper. The exponent is cut off at 80.
    """
    power = coefficient - 1.0
    if power == 0.0:
        return log_ratio
    return torch.expm1((power * log_ratio).clamp(max=_LARGEST_EXPONENT)) / power


def score_of(f_divergence_type: str, f_alpha_divergence_coef: float = 0.5) -> Score:
    """The score of a divergence by its name in the settings."""
    scores: dict[str, Score] = {
        "reverse_kl": reverse_kl,
        "forward_kl": forward_kl,
        "js_divergence": js_divergence,
        "alpha_divergence": partial(alpha_divergence, coefficient=f_alpha_divergence_coef),
    }
    return scores[f_divergence_type]
