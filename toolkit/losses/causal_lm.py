"""Cross-entropy of the next token at supervised positions, and the metrics of a language model.

The label of a token counts at the position before it: position t predicts token t + 1. The first token of a document is
never a label (the collate functions see to that), so nothing is predicted across documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from toolkit.data.loading.batch import MicroBatch, model_inputs
from toolkit.losses.selective_head import supervised_sums
from toolkit.metrics.metric import Metrics, ratio

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

TokenSums = Callable[[nn.Module, MicroBatch], tuple[torch.Tensor, torch.Tensor, int]]


def causal_lm_loss(
    model: nn.Module,
    micro_batch: MicroBatch,
    totals: Mapping[str, float],
    *,
    label_smoothing_factor: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the mean over all supervised tokens of the global batch, `totals["tokens"]`.

    For logits `x` over `V` tokens and label `y`, with `p = softmax(x)`, `e` the smoothing factor and `Z = sum(exp(x))`:

        loss = (1 - e) * -log p[y]  +  e * mean over V of -log p  +  z_loss * (log Z)^2

    Smoothing is that of transformers' `LabelSmoother`, the last term that of PaLM (arXiv:2204.02311, section 5; there
    1e-4). The head is applied at supervised positions only, in chunks: logits `[batch, length, V]` are never built.
    Logits are raised to float32 (float64 stays) and sums are kept in float64.

    `micro_batch`: `input_ids` and `labels` `[batch, length]`, -100 where unsupervised; everything else goes to the
    model's forward. `supervised_positions` may hold the flat indices `b * length + t` of the positions that predict a
    supervised label: without it they are looked for here, which on a GPU waits for the device.

    Returns the loss, 0-d, and `token_accuracy`, likewise a part of the mean. Without a supervised token the loss is a zero
    that still reaches every parameter.
    """
    loss, correct, _ = token_sums(model, micro_batch, label_smoothing_factor, z_loss)
    tokens = max(float(totals["tokens"]), 1.0)
    return loss / tokens, {"token_accuracy": correct / tokens}


def token_sums(
    model: nn.Module, micro_batch: MicroBatch, label_smoothing_factor: float = 0.0, z_loss: float = 0.0, aligned: bool = False
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Loss and correct predictions, both summed over the supervised tokens, and the number of these."""
    positions, targets = supervised(micro_batch, aligned=aligned)
    loss, correct = supervised_sums(model, model_inputs(micro_batch), positions, targets, label_smoothing_factor, z_loss)
    return loss, correct, len(positions)


def supervised(micro_batch: MicroBatch, *, aligned: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat indices of the positions that predict a supervised label, and these labels, both `[P]`.

    `aligned`: a position predicts the label at its own place, as of masked tokens and of targets, and not the next one.
    """
    labels = micro_batch["labels"]
    labels = (labels if aligned else torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]).reshape(-1)
    positions = micro_batch.get("supervised_positions")
    if positions is None:
        positions = (labels != -100).nonzero()[:, 0]
    return positions, labels[positions]


def exponential(value: float) -> float:
    """exp(value), infinite where a float ends (a loss above 709 nats)."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def token_metrics(sums: TokenSums, perplexity: str = "perplexity", accuracy: str = "token_accuracy") -> Metrics:
    """Means over the supervised tokens of a split, from `sums(model, micro_batch)`: loss, right predictions and tokens."""

    def update(model: nn.Module, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        nll, correct, tokens = sums(model, micro_batch)
        return {"nll": nll, "correct": correct.round().long(), "tokens": torch.tensor(tokens, device=nll.device)}

    def finalize(found: dict[str, np.ndarray]) -> dict[str, float]:
        loss = ratio(found["nll"], found["tokens"])
        return {"loss": loss, perplexity: exponential(loss), accuracy: ratio(found["correct"], found["tokens"])}

    return Metrics(update=update, finalize=finalize)


causal_lm_metrics = token_metrics(token_sums)
"""Means over the supervised tokens of a split: loss in nats, perplexity = exp(loss), token accuracy. No smoothing."""


def causal_lm_metrics_with_bytes(tokenized: Mapping[str, Dataset], tokenizer: PreTrainedTokenizerBase) -> Metrics:
    """The same and bits per byte of the evaluation split, as it is after truncation, splitting and dropping."""
    from toolkit.data.texts import text_size

    return metrics_with_bytes(**text_size(tokenized, tokenizer))


def metrics_with_bytes(num_bytes: int, num_tokens: int, vocab_size: int) -> Metrics:
    """The same of a split of known size: the information of all of it over its bytes, whatever the tokenizer and the rows.

    bits_per_byte = (nats of the predicted tokens / ln 2 + log2(vocab_size) for each other one) / num_bytes. The first token
    of each document, which nothing predicts, costs what it costs to name it.

    Args:
        num_bytes: UTF-8 bytes of the text that the split's tokens mean.
        num_tokens: all tokens of the split.
        vocab_size: of the tokenizer.
    """

    def finalize(sums: dict[str, np.ndarray]) -> dict[str, float]:
        named = (num_tokens - float(sums["tokens"])) * math.log2(vocab_size)
        return {**causal_lm_metrics.finalize(sums), "bits_per_byte": ratio(sums["nll"] / math.log(2) + named, num_bytes)}

    return Metrics(update=causal_lm_metrics.update, finalize=finalize)
