"""Losses of single answers that are marked desirable or undesirable: KTO and its relatives.

`policy` and `reference` are log-probabilities of answers in nats, `[examples]`, sums over tokens; `desirable` is boolean,
`[examples]`. Each function returns the loss of each example, `[examples]`, and couples no two of them by itself.
"""

import torch


def kto_loss(
    policy: torch.Tensor,
    reference: torch.Tensor,
    desirable: torch.Tensor,
    kl: torch.Tensor,
    beta: float,
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
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """APO-zero of single answers: λ_D (1 - σ(β h)) of desirable ones, λ_U σ(β h) of undesirable ones.

    APO, arXiv:2408.06266, equation 7, term by term: KTO with z = 0, exact however the batch is cut.
    """
    return kto_loss(policy, reference, desirable, policy.new_zeros(()), beta, desirable_weight, undesirable_weight)


def _weights(desirable: torch.Tensor, if_so: float, if_not: float, like: torch.Tensor) -> torch.Tensor:
    return torch.where(desirable, like.new_tensor(if_so), like.new_tensor(if_not))  # of two numbers it would be float32
