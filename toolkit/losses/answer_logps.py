"""Log-probabilities of answers, those of preference pairs or single ones, of one forward pass, in whatever layout they have.

And metrics of marked answers by themselves, where no reference model and no loss is at hand. That is no reward: the
reward of DPO and KTO is the log-probability less that of the reference model, which decides otherwise where the reference
already found one of two answers the likelier.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from toolkit.data.loading.batch import MicroBatch, model_inputs
from toolkit.data.loading.collate_pairs import mismatched_of
from toolkit.losses.chunked import Logits, logps_in_chunks
from toolkit.losses.pair_losses import PairLogps, desensitized_weights
from toolkit.losses.selective_head import at_positions
from toolkit.metrics.classes import area_under_curve
from toolkit.metrics.metric import Metrics, precise_sum, ratio


def pair_logps(model: nn.Module, micro_batch: MicroBatch, ld_alpha: float | None = None) -> PairLogps:
    """Sums over the tokens of each answer, in nats, from one forward pass over `collate_pairs`' micro-batch.

    `ld_alpha`: what the tokens beyond the shorter answer's length count (LD-DPO, `desensitized_weights`); None: all alike.
    """
    tokens = answer_token_logps(model, micro_batch)
    if ld_alpha is not None:
        counts = micro_batch["chosen_tokens"], micro_batch["rejected_tokens"]
        tokens = tokens * desensitized_weights(*counts, tokens.shape[1], ld_alpha).repeat(2, 1)
    chosen, rejected = tokens.sum(1).chunk(2)
    return PairLogps(chosen, rejected, micro_batch["chosen_tokens"], micro_batch["rejected_tokens"])


def answer_logps(model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
    """Sums over the tokens of each single answer `[answers]`, in nats, from one forward pass over `collate_answers`' batch."""
    return answer_token_logps(model, micro_batch).sum(1)


def mismatched_logps(model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
    """The same of the answers that belong to other prompts."""
    return answer_logps(model, mismatched_of(micro_batch))


def answer_token_logps(model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
    """Log-probability of each answer token `[answers, longest_answer]`, 0 after an answer's end; chosen answers of pairs first.

    The head is applied at answer positions only; logits `[batch, length, V]` are never built.
    """
    targets = micro_batch["answer_tokens"]

    def logps(logits_of: Logits, parameters: Sequence[nn.Parameter], rows: torch.Tensor, vocabulary: int) -> torch.Tensor:
        return logps_in_chunks(logits_of, parameters, rows, targets.to(rows.device), vocabulary)

    found = at_positions(model, model_inputs(micro_batch), micro_batch["answer_positions"], logps)
    # each slot is written once, so that the sum over a row has one order, on a GPU too
    table = found.new_zeros(micro_batch["answers"] * micro_batch["longest_answer"])
    return table.scatter(0, micro_batch["answer_slots"], found).view(-1, micro_batch["longest_answer"])


# -- metrics of the likelihood alone ---------------------------------------------------------------------------------------

PAIR_LIKELIHOODS = ("logps_accuracy", "logps_margin", "logps_chosen", "logps_rejected")
ANSWER_LIKELIHOODS = ("logps_auc", "logps_margin", "logps_desirable", "logps_undesirable")


def _update(model: nn.Module, pairs: MicroBatch) -> dict[str, torch.Tensor]:
    chosen, rejected = pair_logps(model, pairs)[:2]
    each = {
        "logps_accuracy": (chosen > rejected).to(chosen.dtype), "logps_margin": chosen - rejected,
        "logps_chosen": chosen, "logps_rejected": rejected, "pairs": torch.ones_like(chosen),
    }  # fmt: skip
    return {name: precise_sum(values) for name, values in each.items()}


def _finalize(sums: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: ratio(sums[name], sums["pairs"]) for name in PAIR_LIKELIHOODS}


# Exact means over the pairs of `collate_pairs`; log p is the sum over an answer's tokens given its prompt, in nats.
# `logps_accuracy`: share of pairs with log p(chosen) > log p(rejected), a tie counting as 0; `logps_margin`: their difference.
pair_likelihood_metrics = Metrics(update=_update, finalize=_finalize)


def _gather(model: nn.Module, answers: MicroBatch) -> dict[str, torch.Tensor]:
    logps = answer_logps(model, answers)
    return {"logps": logps, "desirable": answers["desirable"].to(logps.dtype)}


def _finalize_rows(rows: dict[str, np.ndarray]) -> dict[str, float]:
    logps, desirable = rows["logps"].astype(np.float64), rows["desirable"] > 0
    means = [float(logps[kind].mean()) if kind.any() else float("nan") for kind in (desirable, ~desirable)]
    metrics = (area_under_curve(logps, desirable), means[0] - means[1], *means)
    return dict(zip(ANSWER_LIKELIHOODS, metrics, strict=True))


# The same of the single answers of `collate_answers`. `logps_auc`: share of couples of a desirable and an undesirable answer of
# which the desirable one is likelier, ties counting half; not a number where one kind is missing, as its mean is.
answer_likelihood_metrics = Metrics(update=None, finalize=_finalize_rows, gather=_gather)
