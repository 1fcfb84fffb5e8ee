"""The bound of the negative log-likelihood that masked diffusion minimizes, and its value on held-out rows.

Labels, and what each counts, are those of `toolkit/data/loading/noise.py`.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from toolkit.data.loading.batch import MicroBatch, model_inputs
from toolkit.losses.causal_lm import exponential, supervised
from toolkit.losses.chunked import Logits, values_in_chunks
from toolkit.losses.selective_head import at_positions, supervised_sums
from toolkit.losses.token_losses import token_losses
from toolkit.metrics.metric import Metrics, precise_sum, ratio


def diffusion_loss(
    model: nn.Module, micro_batch: MicroBatch, totals: Mapping[str, float]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the bound in nats a token, over all supervised tokens of the global batch.

    For the tokens i that are hidden, l of the L supervised ones of their document (LLaDA, arXiv:2502.09992, equation 6):

        loss = sum over i of -log softmax(logits)[token i] * L / l  /  totals["tokens"]

    `totals["tokens"]` counts the supervised tokens, hidden or not. The head is applied where a token is hidden only, in chunks.

    `micro_batch`: `input_ids` and `labels` `[batch, length]`, each label at the place that predicts it, and `token_weights`
    `[P]`, L / l of each label. With `seen_ahead` below 1 (attention annealing, DiffuLLaMA, arXiv:2410.17891, section 3.3) a
    token sees the tokens before it and that share of those behind it, drawn by the document's entry of `attention_seeds`.

    Returns the loss, 0-d, without further metrics. Without a hidden token it is a zero that still reaches every parameter.
    """
    positions, targets = supervised(micro_batch, aligned=True)
    inputs = _inputs(micro_batch, next(model.parameters()).dtype)
    loss, _ = supervised_sums(model, inputs, positions, targets, weights=micro_batch["token_weights"])
    return loss / max(float(totals["tokens"]), 1.0), {}


def _update(model: nn.Module, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
    positions, targets = supervised(micro_batch, aligned=True)
    counts = micro_batch["token_weights"].double()

    def of_tokens(logits_of: Logits, parameters: Any, rows: torch.Tensor, vocabulary: int) -> torch.Tensor:
        def values(piece: slice, logits: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
            correct = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
            nll = token_losses(logits, targets[piece].to(logits.device), correct=correct)
            return torch.stack([nll, correct.to(nll.dtype)], dim=1)

        return values_in_chunks(values, logits_of, (), rows, vocabulary).flatten()

    found = at_positions(model, _inputs(micro_batch, next(model.parameters()).dtype), positions, of_tokens)
    nll, correct = (found.view(-1, 2).to(counts.device) * counts[:, None]).unbind(1)
    number = _documents_of(positions, micro_batch)
    count = len(micro_batch["cu_seq_lens_q"]) - 1 if "cu_seq_lens_q" in micro_batch else len(micro_batch["input_ids"])
    of_documents, tokens = (each.new_zeros(count).index_add(0, number, each) for each in (nll, counts))
    return {
        "nll": precise_sum(nll), "correct": precise_sum(correct), "tokens": precise_sum(counts),
        "nll_squared": precise_sum(of_documents**2), "nll_by_tokens": precise_sum(of_documents * tokens),
        "tokens_squared": precise_sum(tokens**2), "documents": (tokens > 0).sum(),
    }  # fmt: skip


def _finalize(sums: dict[str, np.ndarray]) -> dict[str, float]:
    loss, documents = ratio(sums["nll"], sums["tokens"]), float(sums["documents"])
    squares = float(sums["nll_squared"] - 2 * loss * sums["nll_by_tokens"] + loss**2 * sums["tokens_squared"])
    spread = math.sqrt(max(squares, 0.0) * documents / (documents - 1)) if documents > 1 else math.nan
    return {
        "loss": loss, "loss_stderr": ratio(np.asarray(spread), sums["tokens"]), "perplexity": exponential(loss),
        "masked_accuracy": ratio(sums["correct"], sums["tokens"]),
    }  # fmt: skip


diffusion_metrics = Metrics(update=_update, finalize=_finalize)
"""Of a split: the bound in nats a token (`loss`), its standard error over documents and what was hidden of them
(`loss_stderr`: that of a ratio of sums, Cochran 1977, equation 6.13), exp(loss), and the share of hidden tokens found."""


def _documents_of(positions: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """The number of the document that each flat position is in."""
    if "cu_seq_lens_q" in micro_batch:
        return torch.bucketize(positions, micro_batch["cu_seq_lens_q"][1:].to(positions.device), right=True)
    return positions // micro_batch["input_ids"].shape[1]


def _inputs(micro_batch: MicroBatch, dtype: torch.dtype) -> dict[str, Any]:
    """What the model's forward gets; while attention is annealed its mask `[rows, 1, length, length]`, instead of bounds."""
    inputs = model_inputs(micro_batch)
    ahead = micro_batch.get("seen_ahead", [])
    if all(share >= 1 for share in ahead):
        return inputs
    rows, length = inputs["input_ids"].shape
    unseen = torch.ones(rows, length, length, dtype=torch.bool)
    unseen.diagonal(dim1=1, dim2=2).fill_(False)  # padding sees itself: a softmax over nothing is no number
    for share, seed, (row, start, end) in zip(ahead, micro_batch["attention_seeds"], _places(micro_batch), strict=True):
        drawn = torch.rand(end - start, end - start, generator=torch.Generator().manual_seed(seed))
        unseen[row, start:end, start:end] = (drawn >= share).triu(1)
    mask = torch.zeros(rows, 1, length, length, dtype=dtype).masked_fill(unseen[:, None], torch.finfo(dtype).min)
    inputs["attention_mask"] = mask.to(inputs["input_ids"].device)
    return {name: value for name, value in inputs.items() if not name.startswith(("cu_seq_lens", "max_length"))}


def _places(micro_batch: MicroBatch) -> list[tuple[int, int, int]]:
    """Row, first token and end of each document."""
    if "cu_seq_lens_q" in micro_batch:
        return [(0, start, end) for start, end in itertools.pairwise(micro_batch["cu_seq_lens_q"].tolist())]
    return [(row, 0, length) for row, length in enumerate(micro_batch["attention_mask"].sum(1).tolist())]
