"""The loss of a reward model: the chosen answer of a pair must score higher than the rejected one.

The reward of an answer is the one number that a model with a classification head of one label gives for the prompt with that
answer. Decoders read it at the last token, which transformers finds by the pad token: see `toolkit.models.fitted_tokenizer`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import logsigmoid

from toolkit.config import Refusal
from toolkit.data.loading.batch import MicroBatch, model_inputs, precise
from toolkit.metrics.metric import Metrics, precise_sum, ratio


def reward_loss(
    model: nn.Module,
    micro_batch: MicroBatch,
    totals: Mapping[str, float],
    *,
    center_rewards_coefficient: float | None = None,
    margin_coefficient: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the mean of `reward_losses` over `totals["pairs"]`, the pairs of the global batch.

    Args:
        micro_batch: that of `collate_pairs` in its padded layout, with `margin` `[pairs]` where the coefficient is not 0.
        center_rewards_coefficient: weight of the square of a pair's summed rewards.
        margin_coefficient: a chosen reward must lead by this times the pair's margin.

    Returns the loss, 0-d, and the metrics of `reward_metrics_by_pair`, likewise parts of means over the pairs.
    """
    chosen, rejected = pair_rewards(model, micro_batch)
    margin = _margin(micro_batch, margin_coefficient)
    loss = reward_losses(chosen, rejected, margin, center_rewards_coefficient).sum() / totals["pairs"]
    return loss, {name: values.sum() / totals["pairs"] for name, values in reward_metrics_by_pair(chosen, rejected).items()}


def reward_metrics(*, center_rewards_coefficient: float | None = None, margin_coefficient: float = 0.0) -> Metrics:
    """Exact means over the pairs of a split: `loss`, as in training, and the metrics of `reward_metrics_by_pair`."""

    def update(model: nn.Module, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        chosen, rejected = pair_rewards(model, micro_batch)
        margin = _margin(micro_batch, margin_coefficient)
        each = {
            "loss": reward_losses(chosen, rejected, margin, center_rewards_coefficient),
            "pairs": torch.ones_like(chosen),
            **reward_metrics_by_pair(chosen, rejected),
        }
        return {name: precise_sum(values.detach()) for name, values in each.items()}

    def finalize(sums: dict[str, np.ndarray]) -> dict[str, float]:
        return {name: ratio(value, sums["pairs"]) for name, value in sums.items() if name != "pairs"}

    return Metrics(update=update, finalize=finalize)


def pair_rewards(model: nn.Module, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards of the chosen and of the rejected answers, each `[pairs]`, float32 or wider, from one forward pass."""
    chosen, rejected = answer_rewards(model, model_inputs(micro_batch)).chunk(2)
    return chosen, rejected


def answer_rewards(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """The reward of each row, `[rows]`, float32 or wider: a prompt with its answer, of `input_ids` and `attention_mask`."""
    return precise(model(**inputs).logits.squeeze(-1))


def reward_losses(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    margin: torch.Tensor | float = 0.0,
    center_rewards_coefficient: float | None = None,
) -> torch.Tensor:
    """-log σ(r_w - r_l - m) + c (r_w + r_l)², `[pairs]`, of rewards r_w of chosen and r_l of rejected answers.

    The first term is the likelihood of the preference under Bradley and Terry's model; with a margin m by which r_w must lead,
    it is equation 2 of Llama 2, arXiv:2307.09288. The second, c being `center_rewards_coefficient`, draws rewards, which
    the first fixes only up to a constant for each prompt, toward a mean of 0: equation 2 of arXiv:2312.09244.
    """
    losses = -logsigmoid(chosen - rejected - margin)
    if center_rewards_coefficient:
        losses = losses + center_rewards_coefficient * (chosen + rejected).square()
    return losses


def reward_metrics_by_pair(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is logged of each pair, all `[pairs]`, without gradient.

    - `rewards_chosen`, `rewards_rejected`: those of the two answers.
    - `reward_margin`: rewards_chosen - rewards_rejected.
    - `reward_accuracy`: 1 where the chosen answer has the greater reward. A tie counts as 0, as in TRL.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "rewards_chosen": chosen,
        "rewards_rejected": rejected,
        "reward_margin": chosen - rejected,
        "reward_accuracy": (chosen > rejected).to(chosen.dtype),
    }


def _margin(micro_batch: MicroBatch, margin_coefficient: float) -> torch.Tensor | float:
    """What each chosen reward must lead by, `[pairs]`, or 0."""
    if not margin_coefficient:
        return 0.0
    if "margin" not in micro_batch:
        raise Refusal(
            f"--margin-coefficient {margin_coefficient:g}: the pairs don't have by how much an answer is the better one. "
            "Give them a column margin, or scores of both answers, or leave it out."
        )
    return margin_coefficient * micro_batch["margin"]
