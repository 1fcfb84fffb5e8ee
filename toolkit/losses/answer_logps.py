"""Log-probabilities of answers, those of preference pairs or single ones, of one forward pass, in whatever layout they have."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from toolkit.data.loading.collate_answers import MISMATCHED, mismatched_of
from toolkit.data.loading.collate_pairs import NOT_FOR_THE_MODEL
from toolkit.losses.chunked_sums import Logits, rows_in_a_chunk
from toolkit.losses.pair_logps import PairLogps
from toolkit.losses.selective_head import at_positions
from toolkit.losses.with_reference import desensitized_weights


def pair_logps(model: Any, micro_batch: dict[str, Any], ld_alpha: float | None = None) -> PairLogps:
    """Sums over the tokens of each answer, in nats, from one forward pass over `collate_pairs`' micro-batch.

    `ld_alpha`: what the tokens beyond the shorter answer's length count (LD-DPO, `desensitized_weights`); None: all alike.
    """
    tokens = answer_token_logps(model, micro_batch)
    if ld_alpha is not None:
        counts = micro_batch["chosen_tokens"], micro_batch["rejected_tokens"]
        tokens = tokens * desensitized_weights(*counts, tokens.shape[1], ld_alpha).repeat(2, 1)
    chosen, rejected = tokens.sum(1).chunk(2)
    return PairLogps(chosen, rejected, micro_batch["chosen_tokens"], micro_batch["rejected_tokens"])


def answer_logps(model: Any, micro_batch: dict[str, Any]) -> torch.Tensor:
    """Sums over the tokens of each single answer `[answers]`, in nats, from one forward pass over `collate_answers`' batch."""
    return answer_token_logps(model, micro_batch).sum(1)


def mismatched_logps(model: Any, micro_batch: dict[str, Any]) -> torch.Tensor:
    """The same of the answers that don't belong to the prompts they stand behind."""
    return answer_logps(model, mismatched_of(micro_batch))


def answer_token_logps(model: Any, micro_batch: dict[str, Any]) -> torch.Tensor:
    """Log-probability of each answer token `[answers, longest_answer]`, 0 after an answer's end; chosen answers of pairs first.

    The head is applied at answer positions only; logits `[batch, length, V]` are never built.
    """
    inputs = {
        name: value
        for name, value in micro_batch.items()
        if name not in NOT_FOR_THE_MODEL and not name.startswith(MISMATCHED)
    }
    targets = micro_batch["answer_tokens"]

    def logps(logits_of: Logits, parameters: Sequence[nn.Parameter], rows: torch.Tensor, vocabulary: int) -> torch.Tensor:
        return logps_in_chunks(logits_of, parameters, rows, targets.to(rows.device), vocabulary)

    found = at_positions(model, inputs, micro_batch["answer_positions"], logps)
    # each slot is written once, so that the sum over a row has one order, on a GPU too
    table = found.new_zeros(micro_batch["answers"] * micro_batch["longest_answer"])
    return table.scatter(0, micro_batch["answer_slots"], found).view(-1, micro_batch["longest_answer"])


def logps_in_chunks(
    logits_of: Logits, parameters: Sequence[nn.Parameter], rows: torch.Tensor, targets: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """Log-probability of the target at each position `[P]`, float32 or wider.

    `rows` `[P, width]`, of which `logits_of` makes logits `[P, vocabulary]`. Where these are more than a chunk, each chunk's
    are made anew in backward: a third more work in the head, and never more than a chunk of them in memory.
    """
    size = rows_in_a_chunk(vocabulary, rows.device)
    pieces = [slice(start, start + size) for start in range(0, max(len(rows), 1), size)]
    if len(pieces) == 1:
        return _logps(logits_of(rows), targets)
    if torch.is_grad_enabled() and (rows.requires_grad or parameters):
        return _LogpsRecomputed.apply(logits_of, pieces, targets, rows, *parameters)
    return torch.cat([_logps(logits_of(rows[piece]), targets[piece]) for piece in pieces])


def _logps(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -nn.functional.cross_entropy(logits, targets, reduction="none")


class _LogpsRecomputed(torch.autograd.Function):
    """Log-probabilities whose logits live for a chunk, in forward and again in backward.

    Unlike a sum of losses, how much each token counts is known only when the answers of a pair have been compared, so the
    gradient can't be taken on the way. The second time the head draws the random numbers of the first: an adapter on it may
    have dropout.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_of: Logits, pieces: list[slice], targets: torch.Tensor, rows: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.logits_of, ctx.pieces, ctx.parameters = logits_of, pieces, parameters
        ctx.save_for_backward(targets, rows)
        kind = rows.device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.autocast = {"device_type": kind, "dtype": dtype, "enabled": enabled}
        ctx.random_states = _random_states(rows.device)
        return torch.cat([_logps(logits_of(rows[piece]), targets[piece]) for piece in pieces])

    @staticmethod
    def backward(ctx: Any, *of_logps: torch.Tensor) -> Any:
        targets, rows = ctx.saved_tensors
        of_rows = torch.empty_like(rows) if rows.requires_grad else None
        of_parameters = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in ctx.parameters]
        with _drawing_again(ctx.random_states, rows.device):
            for piece in ctx.pieces:
                chunk = rows[piece].detach().requires_grad_(rows.requires_grad)
                with torch.enable_grad(), torch.autocast(**ctx.autocast):
                    logps = _logps(ctx.logits_of(chunk), targets[piece])
                wanted = (chunk, *ctx.parameters) if rows.requires_grad else ctx.parameters
                gradients = list(torch.autograd.grad(logps, wanted, of_logps[0][piece], allow_unused=True))
                if of_rows is not None:
                    of_rows[piece] = gradients.pop(0)
                for total, term in zip(of_parameters, gradients, strict=True):
                    if term is not None:
                        total.add_(term)
        given = [total.to(p.dtype) for total, p in zip(of_parameters, ctx.parameters, strict=True)]
        return None, None, None, of_rows, *given


def _random_states(device: torch.device) -> list[torch.Tensor]:
    """States of the generators that a module on `device` may draw from: the CPU's and the device's own."""
    own = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *own]


@contextmanager
def _drawing_again(states: list[torch.Tensor], device: torch.device) -> Iterator[None]:
    """The generators as they were when `states` were taken; afterwards as they are now."""
    own = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(own, device_type=device.type):
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.get_device_module(device).set_rng_state(state, device)
        yield
