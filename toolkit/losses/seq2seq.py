"""Cross-entropy of the target's tokens in an encoder-decoder, and its metrics.

The decoder reads the target shifted by one (`collate_seq2seq` does that), so the label at a position is what that position
predicts: nothing is shifted here.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from toolkit.data.loading.batch import MicroBatch
from toolkit.losses.causal_lm import token_metrics, token_sums


def seq2seq_loss(
    model: nn.Module, micro_batch: MicroBatch, totals: Mapping[str, float], *, label_smoothing_factor: float = 0.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the mean over all target tokens of the global batch, `totals["tokens"]`.

    For logits `x` over `V` tokens and label `y`, with `p = softmax(x)` and `e` the smoothing factor:

        loss = (1 - e) * -log p[y]  +  e * mean over V of -log p

    which is that of `torch.nn.functional.cross_entropy`. The head is applied at the positions of the target alone, in chunks:
    logits `[batch, length, V]` are never built. Logits are raised to float32 (float64 stays) and sums are kept in float64.

    `micro_batch`: `input_ids`, `attention_mask` `[batch, source]`; `decoder_input_ids` and `labels` `[batch, target]`, -100 on
    padding; `supervised_positions`, the flat indices of the labels that count.

    Returns the loss, 0-d, and `token_accuracy`, likewise a part of the mean.
    """
    loss, correct, _ = token_sums(model, micro_batch, label_smoothing_factor, aligned=True)
    tokens = max(float(totals["tokens"]), 1.0)
    return loss / tokens, {"token_accuracy": correct / tokens}


seq2seq_metrics = token_metrics(partial(token_sums, aligned=True))
"""Means over the target's tokens of a split: loss in nats, perplexity = exp(loss), token accuracy. No smoothing."""
