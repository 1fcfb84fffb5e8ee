"""Cross-entropy of hidden tokens from both sides, and the metrics of a masked language model.

A label belongs to the token at its own position, unlike in causal language modeling.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from toolkit.data.loading.batch import MicroBatch
from toolkit.losses.causal_lm import token_metrics, token_sums


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
    loss, correct, _ = token_sums(model, micro_batch, aligned=True)
    tokens = max(float(totals["tokens"]), 1.0)
    return loss / tokens, {"masked_accuracy": correct / tokens}


masked_lm_metrics = token_metrics(partial(token_sums, aligned=True), "pseudo_perplexity", "masked_accuracy")
"""Means over the masked tokens of a split: loss in nats, pseudo-perplexity = exp(loss), accuracy of the most probable token."""
