"""Log-probabilities of the answers of preference pairs."""

from typing import NamedTuple

import torch


class PairLogps(NamedTuple):
    """Log-probability, in nats, of each pair's chosen and rejected answer given their prompt, and how many tokens that is.

    All `[pairs]`: `chosen` and `rejected` are sums over the tokens of an answer, float32 or wider; `chosen_tokens` and
    `rejected_tokens` count these, float.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
