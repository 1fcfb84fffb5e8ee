"""From rollouts and their advantages to the batches of the updates of a policy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from toolkit.data.loading.batch import Batch, MicroBatch
from toolkit.data.loading.layouts import lay_out
from toolkit.data.loading.order import hash_numbers
from toolkit.distributed.ranks import from_all
from toolkit.rollouts.rollout import Rollout
from toolkit.system.evaluation_mode import evaluation_mode
from toolkit.training.step import to_device

if TYPE_CHECKING:
    from accelerate import Accelerator

Advantages = Sequence[float] | torch.Tensor
Collate = Callable[[Sequence[Rollout], Advantages], MicroBatch]
# Of (model, micro-batch): a table [completions, longest completion], or several by the names of a rollout's fields.
LogpsOf = Callable[[nn.Module, MicroBatch], torch.Tensor | dict[str, torch.Tensor]]


def policy_batches(
    accelerator: Accelerator, rollouts: Sequence[Rollout], advantages: Advantages, collate: Collate, *, micro_batch_size: int,
    steps_per_generation: int = 1, num_iterations: int = 1, seed: int = 0, position: int = 0,
) -> Iterator[Batch]:  # fmt: skip
    """The batches that a policy is updated on: `steps_per_generation` parts of the rollouts, each `num_iterations` times.

    Args:
        rollouts: those of a step, the same on every rank; the prompt of a group that a border cuts is read on both sides.
        advantages: of each, in the same order, or a table of each token `[completions, longest]`.
        collate: as `collate_rollouts`; it gets some rollouts with their advantages.
        micro_batch_size: completions in a forward pass.
        seed, position: the random numbers of a forward pass follow from them; `position` is that of the step.

    `totals` of a batch: "examples" and "completions", "completion_tokens" that count (`mask`), and "tokens" likewise. A rank
    without work left gets a padding micro-batch, so that all have the same number of forward passes. Fewer rollouts than
    `steps_per_generation`, as an epoch's last batch may have, are an update each.
    """
    bounds = np.linspace(0, len(rollouts), min(steps_per_generation, len(rollouts)) + 1).round().astype(int).tolist()
    parts = [
        _batch(accelerator, rollouts[start:end], advantages[start:end], collate, micro_batch_size)
        for start, end in itertools.pairwise(bounds)
    ]
    for iteration in range(num_iterations):
        for number, part in enumerate(parts):
            places = range(accelerator.process_index, 1 << 40, accelerator.num_processes)  # of micro-batches among all ranks'
            seeds = [
                hash_numbers(seed, "policy", position, iteration, number, place)
                for place, _ in zip(places, part.micro_batches, strict=False)
            ]
            yield replace(part, seeds=seeds, position=position)


def with_logps(
    accelerator: Accelerator, model: nn.Module, rollouts: Sequence[Rollout], collate: Collate, *, micro_batch_size: int,
    **logps_of: LogpsOf,
) -> list[Rollout]:  # fmt: skip
    """The rollouts with log-probabilities of their tokens under these names, `old_logps` or `reference_logps`. A collective.

    `logps_of`: each a table of a micro-batch, or several by names of their own (`old_logps` and `old_values` of one forward
    pass), computed in evaluation mode without a gradient, once for each completion: by the rank that it is dealt to.
    """
    batch = _batch(accelerator, rollouts, [0.0] * len(rollouts), collate, micro_batch_size)
    found: list[tuple[int, dict[str, list[float]]]] = []
    with evaluation_mode(model), accelerator.autocast():
        for micro_batch, indices, is_real in zip(batch.micro_batches, batch.indices, batch.real, strict=True):
            on_device = to_device(micro_batch, accelerator.device)
            made = {name: of(model, on_device) for name, of in logps_of.items()}
            named = (each if isinstance(each, dict) else {name: each} for name, each in made.items())
            tables = {name: table.cpu() for each in named for name, table in each.items()}
            for row, place in enumerate(indices if is_real else ()):
                length = len(rollouts[place].completion_ids)
                found.append((place, {name: table[row, :length].tolist() for name, table in tables.items()}))
    by_place = dict(each for of_rank in from_all(accelerator, lambda: found) for each in of_rank)
    return [replace(rollout, **by_place[place]) for place, rollout in enumerate(rollouts)]  # type: ignore[arg-type]


def _batch(
    accelerator: Accelerator, rollouts: Sequence[Rollout], advantages: Advantages, collate: Collate, micro_batch_size: int
) -> Batch:
    ranks, rank, count = accelerator.num_processes, accelerator.process_index, float(len(rollouts))
    cuts = [slice(start, start + micro_batch_size) for start in range(0, len(rollouts), micro_batch_size)]
    everyone = [collate(rollouts[cut], advantages[cut]) for cut in cuts]  # also those of other ranks, whose tokens count
    counted = float(sum(micro_batch["mask"].sum() for micro_batch in everyone))
    rounds = -(-len(cuts) // ranks)
    mine = [place if place < len(cuts) else None for place in range(rank, rounds * ranks, ranks)]
    return Batch(
        micro_batches=[everyone[place or 0] for place in mine],
        totals={"examples": count, "completions": count, "completion_tokens": counted, "tokens": counted},
        real=[place is not None for place in mine],
        indices=[list(range(len(rollouts)))[cuts[place or 0]] for place in mine],
        size=len(rollouts),
    )


def collate_rollouts(
    rollouts: Sequence[Rollout], advantages: Advantages, *, layout: str, pad_token_id: int = 0,
    mask_truncated_completions: bool = False, mask_unscored_completions: bool = False,
) -> MicroBatch:  # fmt: skip
    """The tensors of a micro-batch of completions, in a layout of `lay_out`: with `shared` a group's prompt is read once.

    Next to the keys of `lay_out`: `advantages` `[completions]` or `[completions, longest completion]`; `mask`, of the latter
    shape: 1 where a token counts, which those of truncated completions don't where `mask_truncated_completions`, nor those
    without any reward where `mask_unscored_completions`; `sampled_logps`, nats, as the sampler found them, and `old_logps`,
    `reference_logps`, `sampler_weights`, `old_values` and `returns` where the rollouts have them; all in torch's default
    dtype. Where some tokens could not be drawn, `kept_rows` and `kept_ids` `[K]`: the number of a token among all of the
    completions, and an id that could be drawn there.
    """
    prompts, prompt_of = list[np.ndarray](), list[int]()
    owner: tuple[int, int] | None = None
    for rollout in rollouts:
        if owner != (rollout.epoch, rollout.prompt):
            owner = (rollout.epoch, rollout.prompt)
            prompts.append(np.asarray(rollout.prompt_ids, dtype=np.int64))
        prompt_of.append(len(prompts) - 1)
    answers = [np.asarray(rollout.completion_ids, dtype=np.int64) for rollout in rollouts]
    batch = lay_out(prompts, answers, np.array(prompt_of), layout, pad_token_id)
    counted = counted_tokens(rollouts, mask_truncated_completions, mask_unscored_completions)
    table = torch.as_tensor(advantages, dtype=torch.get_default_dtype())
    batch["advantages"] = table if table.dim() == 1 else table[:, : batch["longest_answer"]]
    tables: dict[str, list[list[float]] | list[list[float] | None]] = {
        "mask": counted, "sampled_logps": [rollout.logps for rollout in rollouts],
        "old_logps": [rollout.old_logps for rollout in rollouts],
        "reference_logps": [rollout.reference_logps for rollout in rollouts],
        "sampler_weights": [rollout.sampler_weights for rollout in rollouts],
        "old_values": [rollout.old_values for rollout in rollouts],
        "returns": [rollout.returns for rollout in rollouts],
    }  # fmt: skip
    batch |= {name: token_table(rows, batch["longest_answer"]) for name, rows in tables.items() if rows[0] is not None}
    if rollouts[0].kept is not None:
        kept = [ids for rollout in rollouts for ids in rollout.kept or ()]
        batch["kept_rows"] = torch.from_numpy(np.repeat(np.arange(len(kept)), [len(ids) for ids in kept]))
        batch["kept_ids"] = torch.from_numpy(np.concatenate([np.asarray(ids, dtype=np.int64) for ids in kept]))
    return batch


def counted_tokens(
    rollouts: Sequence[Rollout], mask_truncated_completions: bool = False, mask_unscored_completions: bool = False
) -> list[list[float]]:
    """1 for each token of a completion that counts in the loss, 0 for those of one that does not and of its environment."""
    left_out = [
        (mask_truncated_completions and each.truncated) or (mask_unscored_completions and math.isnan(each.reward))
        for each in rollouts
    ]
    return [
        [float(own and not out) for own in each.written or [True] * len(each.completion_ids)]
        for each, out in zip(rollouts, left_out, strict=True)
    ]


def token_table(rows: Sequence[Sequence[float] | None], width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Numbers of tokens as a table `[completions, width]`, 0 behind a completion's end; torch's default dtype without one."""
    table = torch.zeros(len(rows), width, dtype=dtype)
    for row, values in zip(table, rows, strict=True):
        row[: len(values or ())] = torch.tensor(values or (), dtype=table.dtype)
    return table
