"""Cross-entropy of hidden tokens from both sides, and the metrics of a masked language model.

A label belongs to the token at its own position, unlike in causal language modeling.
"""

from collections.abc import Mapping

import torch
from torch import nn

from toolkit.data.loading.batch import MicroBatch
from toolkit.losses.causal_lm import NOT_FOR_THE_MODEL, token_metrics
from toolkit.losses.selective_head import supervised_sums


def masked_lm_loss(
    model: nn.Module, micro_batch: MicroBatch, totals: Mapping[str, float]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the mean over all masked tokens of the global batch, `totals["tokens"]`.

    The output embedding is applied at masked positions only, in chunks: logits `[batch, length, V]` are never built. Logits are
    raised to float32 (float64 stays) and sums are kept in float64.

    `micro_batch`: `input_ids` with masks and `labels` `[batch, length]`, the hidden tokens, -100 elsewhere; everything else
    goes to the model's forward. `supervised_positions` may hold the flat indices `b * length + t` of the labels, as the collate
    functions find them with `aligned`: without it they are looked for here, which on a GPU waits for the device.

    Returns the loss, 0-d, and `masked_accuracy`, likewise a part of the mean. Without a masked token the loss is a zero that
    still reaches every parameter.
    """
    loss, correct, _ = _sums(model, micro_batch)
    tokens = max(float(totals["tokens"]), 1.0)
    return loss / tokens, {"masked_accuracy": correct / tokens}


def _sums(model: nn.Module, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Loss and correct predictions, both summed over the masked tokens, and the number of these."""
    labels = micro_batch["labels"].reshape(-1)
    positions = micro_batch.get("supervised_positions")
    if positions is None:
        positions = (labels != -100).nonzero()[:, 0]
    inputs = {name: value for name, value in micro_batch.items() if name not in NOT_FOR_THE_MODEL}
    loss, correct = supervised_sums(model, inputs, positions, labels[positions])
    return loss, correct, len(positions)


masked_lm_metrics = token_metrics(_sums, "pseudo_perplexity", "masked_accuracy")
"""Means over the masked tokens of a split: loss in nats, pseudo-perplexity = exp(loss), accuracy of the most probable token."""
