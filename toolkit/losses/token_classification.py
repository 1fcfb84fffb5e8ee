"""Token classification: cross-entropy of the tags of words, at the tokens that have one."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from toolkit.data.loading.batch import MicroBatch
from toolkit.metrics.spans import IGNORED, token_logits

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


def token_classification_loss(
    model: nn.Module, micro_batch: MicroBatch, totals: Mapping[str, float], *, label_smoothing_factor: float = 0.0
) -> Loss:
    """This micro-batch's part of the mean over all supervised tokens of the global batch, `totals["tokens"]`.

    Cross-entropy of logits `[batch, length, classes]` and `labels` `[batch, length]`, -100 where a token has no tag (special
    tokens, padding, and the later sub-words of a word). A label is of the token that it is at. Label smoothing is torch's:
    (1 - e) * -log p[y] + e * mean over classes of -log p.

    Returns the loss, 0-d, and the share of supervised tokens whose tag is right. Without a supervised token the loss is a zero
    that still reaches every parameter.
    """
    logits, labels = token_logits(model, micro_batch), micro_batch["labels"]
    losses = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED, label_smoothing=label_smoothing_factor
    )
    right = (logits.argmax(-1) == labels).sum()
    tokens = max(float(totals["tokens"]), 1.0)
    return losses / tokens, {"accuracy": right / tokens}
