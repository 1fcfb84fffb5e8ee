"""The loss of extractive question answering: where in a window the answer starts and ends."""

from collections.abc import Mapping

import torch
from torch import nn

from toolkit.data.loading.batch import MicroBatch
from toolkit.metrics.question_answering import span_logits, span_losses


def question_answering_loss(
    model: nn.Module, micro_batch: MicroBatch, totals: Mapping[str, float]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean over the global batch's windows of (cross-entropy of the start + that of the end) / 2.

    Each is over all tokens of the window, the question's too, and none of the padding. `start_positions` and `end_positions`
    `[windows]` are 0, the first token, where a window doesn't hold the whole answer.

    Returns the loss, 0-d, and the share of windows with both places right, both parts of a mean over the global batch.
    """
    start_logits, end_logits = span_logits(model, micro_batch)
    starts, ends = start_logits.argmax(-1), end_logits.argmax(-1)
    right = (starts == micro_batch["start_positions"]) & (ends == micro_batch["end_positions"])
    losses = span_losses(start_logits, end_logits, micro_batch)
    return losses.sum() / totals["examples"], {"accuracy": right.sum() / totals["examples"]}
