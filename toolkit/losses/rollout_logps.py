"""Log-probabilities, entropies and values of the tokens of completions, of the distribution that they were sampled from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from toolkit.data.loading.batch import MicroBatch, model_inputs
from toolkit.distributed.engines import unwrapped
from toolkit.losses.chunked import Logits, values_in_chunks
from toolkit.losses.selective_head import OfHidden, at_positions
from toolkit.losses.token_entropies import LogpsAndEntropies, logps_and_entropies
from toolkit.models.added_heads import value_head_of, values_at


def rollout_logps(
    model: nn.Module, micro_batch: MicroBatch, temperature: float = 1.0, with_entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token of the completions its log-probability and the entropy of its distribution, nats.

    Both `[completions, longest completion]`, 0 behind a completion's end, of one forward pass over a micro-batch of
    `collate_rollouts`. The distribution is the one that was sampled: at the temperature (0, greedy decoding, counts as 1),
    among the tokens that could be drawn (`kept_ids`), which are stored with the completions: computed again from these logits
    rounding would now and then leave out the very token that was drawn. The entropy has a gradient only where requested.
    """
    logps, entropies = _tables(model, micro_batch, temperature, with_entropy_gradient)
    return logps, entropies


def logps_and_values(
    model: nn.Module, micro_batch: MicroBatch, temperature: float = 1.0, with_entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rollout_logps`, and of each token the value of the state before it, in the same forward pass.

    The value is what the head of `add_value_head` makes of the hidden state that the token is predicted from.
    """
    logps, entropies, values = _tables(
        model, micro_batch, temperature, with_entropy_gradient, partial(values_at, value_head_of(unwrapped(model)))
    )
    return logps, entropies, values


def _tables(
    model: nn.Module, micro_batch: MicroBatch, temperature: float, with_entropy_gradient: bool,
    of_hidden: OfHidden | None = None,
) -> Iterable[torch.Tensor]:  # fmt: skip
    inputs = model_inputs(micro_batch)
    targets, kept_rows = micro_batch["answer_tokens"], micro_batch.get("kept_rows")

    temperature = temperature or 1.0

    def values_of(piece: slice, logits: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        if kept_rows is not None:
            there = (kept_rows >= piece.start) & (kept_rows < piece.start + len(logits))
            kept = torch.zeros_like(logits, dtype=torch.bool)
            kept[kept_rows[there] - piece.start, micro_batch["kept_ids"][there]] = True
            logits = logits.masked_fill(~kept, -torch.inf)
            gradient = None if gradient is None else logits.detach()
        of_piece = targets[piece].to(logits.device)
        if gradient is None:
            return logps_and_entropies(logits, of_piece, temperature)
        return LogpsAndEntropies.apply(logits, of_piece, temperature, with_entropy_gradient, gradient)

    def values(logits_of: Logits, parameters: Sequence[nn.Parameter], rows: torch.Tensor, vocabulary: int) -> torch.Tensor:
        return values_in_chunks(values_of, logits_of, parameters, rows, vocabulary).flatten()

    positions = micro_batch["answer_positions"]
    found = at_positions(model, inputs, positions, values, of_hidden)
    columns = [*found[: 2 * len(positions)].view(-1, 2).T, *found[2 * len(positions) :].view(-1, len(positions))]
    tables = found.new_zeros(len(columns), micro_batch["answers"] * micro_batch["longest_answer"])
    slots = micro_batch["answer_slots"].expand(len(columns), -1)
    return tables.scatter(1, slots, torch.stack(columns)).view(len(columns), -1, micro_batch["longest_answer"])
