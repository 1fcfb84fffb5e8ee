"""Losses of preference pairs, each a function of the log-probabilities of both answers: DPO, its relatives, SimPO, CPO, ORPO.

Each returns the loss of each pair, `[pairs]`. In the formulas w is the chosen answer and l the rejected one, h_w = log π(w) -
log π_ref(w) in nats, h_l likewise, |w| an answer's tokens, and m = score(h_w) - score(h_l) the margin. With score(h) = h it is
that of DPO; other scores belong to other divergences between policy and reference (`score_of`).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid, softplus

Score = Callable[[torch.Tensor], torch.Tensor]


class PairLogps(NamedTuple):
    """Log-probability, in nats, of each pair's chosen and rejected answer given their prompt, and how many tokens that is.

    All `[pairs]`: `chosen` and `rejected` are sums over the tokens of an answer, float32 or wider; `chosen_tokens` and
    `rejected_tokens` count these, float.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor


# -- divergences between policy and reference, and the score of an answer under each ----------------------------------------
# A loss regularized with a divergence D_f(policy || reference) takes f'(u) of the ratio u = policy / reference as an answer's
# score (f-DPO, arXiv:2309.16240, theorem 1 and table 1). f is free up to a linear term, which shifts all scores alike; here
# f'(1) = 0, so that an answer scores 0 where the two models agree.

_LARGEST_EXPONENT = 80.0  # exp of it is still a float32, and so is a difference of two


def reverse_kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """log u: that of DPO."""
    return log_ratio


def forward_kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """1 - 1 / u. An answer that became less likely than exp(-80) of what it was keeps that score and has no gradient."""
    return alpha_divergence(log_ratio, 0.0)


def js_divergence(log_ratio: torch.Tensor) -> torch.Tensor:
    """log(2 u / (1 + u)), that of the Jensen-Shannon divergence."""
    return math.log(2) + logsigmoid(log_ratio)


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


# -- with a reference model -----------------------------------------------------------------------------------------------


def sigmoid_loss(
    policy: PairLogps, reference: PairLogps, beta: float = 0.1, label_smoothing: float = 0.0, score: Score = reverse_kl
) -> torch.Tensor:
    """DPO: -(1 - e) log σ(β m) - e log σ(-β m).

    DPO, arXiv:2305.18290, equation 7; with e = `label_smoothing`, the share of labels taken to be flipped, it is conservative
    DPO (https://ericmitchell.ai/cdpo.pdf, equation 3).
    """
    return smoothed_logistic(beta * _margin(policy, reference, score), label_smoothing)


def sigmoid_norm_loss(policy: PairLogps, reference: PairLogps, beta: float = 0.1, score: Score = reverse_kl) -> torch.Tensor:
    """Length-normalized DPO: -log σ(β (score(h_w) / |w| - score(h_l) / |l|)). Tülu 3, arXiv:2411.15124, equation 6."""
    return -logsigmoid(beta * _margin_per_token(policy, reference, score))


def hinge_loss(policy: PairLogps, reference: PairLogps, beta: float = 0.1, score: Score = reverse_kl) -> torch.Tensor:
    """max(0, 1 - β m). SLiC-HF, arXiv:2305.10425, in the form of RSO, arXiv:2309.06657, where 1 / β is the margin."""
    return torch.relu(1 - beta * _margin(policy, reference, score))


def ipo_loss(policy: PairLogps, reference: PairLogps, beta: float = 0.1, score: Score = reverse_kl) -> torch.Tensor:
    """IPO: (score(h_w) / |w| - score(h_l) / |l| - 1 / (2 β))².

    IPO, arXiv:2310.12036, equation 17, whose τ is β; the means over tokens are what its authors ran, by TRL's source.
    """
    return (_margin_per_token(policy, reference, score) - 1 / (2 * beta)).square()


def robust_loss(
    policy: PairLogps, reference: PairLogps, beta: float = 0.1, label_smoothing: float = 0.0, score: Score = reverse_kl
) -> torch.Tensor:
    """(-(1 - e) log σ(β m) + e log σ(-β m)) / (1 - 2 e): DPO's loss without bias when a share e < 1/2 of labels is flipped.

    Provably robust DPO, arXiv:2403.00409.
    """
    margin = beta * _margin(policy, reference, score)
    flipped = -label_smoothing * logsigmoid(-margin)
    return (-(1 - label_smoothing) * logsigmoid(margin) - flipped) / (1 - 2 * label_smoothing)


def exo_pair_loss(
    policy: PairLogps, reference: PairLogps, beta: float = 0.1, label_smoothing: float = 1e-3, score: Score = reverse_kl
) -> torch.Tensor:
    """σ(β m) log(σ(β m) / (1 - e)) + σ(-β m) log(σ(-β m) / e): a reverse KL to the labels, e > 0.

    EXO, arXiv:2402.00856, equation 16; the paper takes e = 1e-3.
    """
    margin = beta * _margin(policy, reference, score)
    chosen = torch.sigmoid(margin) * (logsigmoid(margin) - math.log1p(-label_smoothing))
    return chosen + torch.sigmoid(-margin) * (logsigmoid(-margin) - math.log(label_smoothing))


def discopop_loss(
    policy: PairLogps, reference: PairLogps, beta: float = 0.1, tau: float = 0.05, score: Score = reverse_kl
) -> torch.Tensor:
    """(1 - σ(x / τ)) log(1 + exp(-x)) + σ(x / τ) exp(-x) with x = β m. DiscoPOP's LRML, arXiv:2406.08414, equation 5."""
    margin = beta * _margin(policy, reference, score)
    # one exponential of the sum of logarithms: exp(-x) alone is infinite for a margin that σ(x / τ) would take to 0
    exponential = torch.exp(logsigmoid(margin / tau) - margin)
    return torch.sigmoid(-margin / tau) * softplus(-margin) + exponential


def nca_pair_loss(policy: PairLogps, reference: PairLogps, beta: float = 0.1) -> torch.Tensor:
    """-log σ(β h_w) - 1/2 log σ(-β h_w) - 1/2 log σ(-β h_l). NCA for pairs, arXiv:2402.05369."""
    chosen, rejected = _log_ratios(policy, reference)
    return -logsigmoid(beta * chosen) - (logsigmoid(-beta * chosen) + logsigmoid(-beta * rejected)) / 2


def bco_pair_loss(policy: PairLogps, reference: PairLogps, beta: float = 0.1) -> torch.Tensor:
    """-log σ(β h_w) - log σ(-β h_l). BCO, arXiv:2404.04656, without its reward shift (δ = 0), as in TRL."""
    chosen, rejected = _log_ratios(policy, reference)
    return -logsigmoid(beta * chosen) - logsigmoid(-beta * rejected)


def sppo_hard_loss(policy: PairLogps, reference: PairLogps, beta: float = 0.1) -> torch.Tensor:
    """(h_w - 1 / (2 β))² + (h_l + 1 / (2 β))². SPPO, arXiv:2405.00675, equation 4.7 with win rates of 1 and 0, η = 1 / β."""
    chosen, rejected = _log_ratios(policy, reference)
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def apo_zero_loss(policy: PairLogps, reference: PairLogps, beta: float = 0.1) -> torch.Tensor:
    """1 - σ(β h_w) + σ(β h_l): chosen up, rejected down; for answers better than the model's own.

    APO, arXiv:2408.06266, equation 7, and 1 so that it is above 0.
    """
    chosen, rejected = _log_ratios(policy, reference)
    return torch.sigmoid(-beta * chosen) + torch.sigmoid(beta * rejected)


def apo_down_loss(policy: PairLogps, reference: PairLogps, beta: float = 0.1) -> torch.Tensor:
    """σ(β h_w) + 1 - σ(β (h_w - h_l)): both down, rejected more; for answers worse than the model's own.

    APO, arXiv:2408.06266, equation 8, and 1 so that it is above 0.
    """
    chosen, rejected = _log_ratios(policy, reference)
    return torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected))


def aot_loss(policy: PairLogps, reference: PairLogps, beta: float = 0.1, label_smoothing: float = 0.0) -> torch.Tensor:
    """AOT for pairs: DPO's loss of sorted margins, β (sorted(log π(w) - log π(l)) - sorted(log π_ref(w) - log π_ref(l))).

    AOT, arXiv:2406.05882. It compares the pairs it is given with each other: exact for the micro-batch, so another
    micro-batch size is another loss. The losses are in the order of the margins, not of the pairs.
    """
    ours, theirs = policy.chosen - policy.rejected, reference.chosen - reference.rejected
    return smoothed_logistic(beta * (ours.sort().values - theirs.sort().values), label_smoothing)


def aot_unpaired_loss(policy: PairLogps, reference: PairLogps, beta: float = 0.1, label_smoothing: float = 0.0) -> torch.Tensor:
    """AOT for answers that need not be pairs: DPO's loss of β (sorted(h_w) - sorted(h_l)).

    AOT, arXiv:2406.05882. It compares the pairs with each other, as `aot_loss` does.
    """
    chosen, rejected = _log_ratios(policy, reference)
    return smoothed_logistic(beta * (chosen.sort().values - rejected.sort().values), label_smoothing)


def desensitized_weights(
    chosen_tokens: torch.Tensor, rejected_tokens: torch.Tensor, length: int, ld_alpha: float
) -> torch.Tensor:
    """Weight of the k-th token of a pair's answers, `[pairs, length]`, the same for both: LD-DPO's.

    1 up to the length of the shorter answer, `ld_alpha` after it. The sums `PairLogps.chosen` and `.rejected` are then of
    weighted log-probabilities, those of the policy and those of the reference alike; the counts of tokens stay whole.
    LD-DPO, arXiv:2409.06411: p(shared tokens) p(the rest)^α. 1 is DPO, 0 leaves what is longer out.
    """
    shared = torch.minimum(chosen_tokens, rejected_tokens)
    is_shared = torch.arange(length, device=shared.device) < shared[:, None]
    return torch.where(is_shared, 1.0, ld_alpha)


# -- without a reference model --------------------------------------------------------------------------------------------


def simpo_loss(policy: PairLogps, beta: float = 0.1, gamma: float = 0.5, label_smoothing: float = 0.0) -> torch.Tensor:
    """SimPO: -log σ(x) with x = β (log π(w) / |w| - log π(l) / |l|) - γ. arXiv:2405.14734, equation 6.

    With `label_smoothing` e: -(1 - e) log σ(x) - e log σ(-x).
    """
    chosen, rejected = means_per_token(policy)
    return smoothed_logistic(beta * (chosen - rejected) - gamma, label_smoothing)


def cpo_loss(policy: PairLogps, beta: float = 0.1, label_smoothing: float = 0.0) -> torch.Tensor:
    """CPO's preference term: -log σ(x) with x = β (log π(w) - log π(l)). arXiv:2401.08417, equation 3.

    With `label_smoothing` e: -(1 - e) log σ(x) - e log σ(-x). Its other term is `sft_loss`.
    """
    return smoothed_logistic(beta * (policy.chosen - policy.rejected), label_smoothing)


def orpo_loss(policy: PairLogps, beta: float = 0.1) -> torch.Tensor:
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


def _log_ratios(policy: PairLogps, reference: PairLogps) -> tuple[torch.Tensor, torch.Tensor]:
    return policy.chosen - reference.chosen, policy.rejected - reference.rejected


def _margin(policy: PairLogps, reference: PairLogps, score: Score) -> torch.Tensor:
    chosen, rejected = _log_ratios(policy, reference)
    return score(chosen) - score(rejected)


def _margin_per_token(policy: PairLogps, reference: PairLogps, score: Score) -> torch.Tensor:
    chosen, rejected = _log_ratios(policy, reference)
    return score(chosen) / policy.chosen_tokens.clamp(min=1) - score(rejected) / policy.rejected_tokens.clamp(min=1)
