"""From rollouts and their advantages to the batches of the updates of a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from toolkit.data.loading.batch import Batch
from toolkit.data.loading.layouts import lay_out
from toolkit.data.loading.order import hash_numbers
from toolkit.metrics.evaluation_mode import evaluation_mode
from toolkit.rollouts.rollout import Rollout
from toolkit.training.step import to_device

if TYPE_CHECKING:
    from accelerate import Accelerator

Advantages = Sequence[float] | torch.Tensor
Collate = Callable[[Sequence[Rollout], Advantages], dict[str, Any]]
LogpsOf = Callable[[nn.Module, dict[str, Any]], torch.Tensor]  # of (model, micro-batch): [completions, longest completion]


def policy_batches(
    accelerator: Accelerator, model: nn.Module, rollouts: Sequence[Rollout], advantages: Advantages, collate: Collate,
    *, micro_batch_size: int, steps_per_generation: int = 1, num_iterations: int = 1, seed: int = 0, position: int = 0,
    before: Mapping[str, LogpsOf] | None = None,
) -> Iterator[Batch]:  # fmt: skip
    """The batches that a policy is updated on: `steps_per_generation` parts of the rollouts, each `num_iterations` times.

    Args:
        rollouts: those of a step, the same on every rank; groups that are cut by a border are read in two batches.
        advantages: of each, in the same order.
        collate: as `collate_rollouts`; it gets some rollouts with their advantages.
        micro_batch_size: completions in a forward pass.
        seed, position: the random numbers of a forward pass follow from them; `position` is that of the step.
        before: tables of log-probabilities that every micro-batch gets under these names, computed in evaluation mode before
            the first update, as those of a reference, or of the policy that sampled.

    `totals` of a batch: "examples" and "completions", "completion_tokens" that count (`mask`), and "tokens" likewise. A rank
    without work left gets a padding micro-batch, so that all have the same number of forward passes.
    """
    sizes = [len(part) for part in np.array_split(np.arange(len(rollouts)), steps_per_generation)]
    ends = np.cumsum(sizes)
    parts = []
    for end, size in zip(ends.tolist(), sizes, strict=True):
        part = _part(accelerator, rollouts[end - size : end], advantages[end - size : end], collate, micro_batch_size)
        parts.append(replace(part, position=position, examples=list(range(end - size, end))))
    if before:
        with evaluation_mode(model), accelerator.autocast():
            for part in parts:
                for micro_batch in part.micro_batches:
                    on_device = to_device(micro_batch, accelerator.device)
                    micro_batch |= {name: logps_of(model, on_device) for name, logps_of in before.items()}
    for iteration in range(num_iterations):
        for number, part in enumerate(parts):
            seeds = [
                hash_numbers(seed, "policy", position, iteration, number, place, accelerator.process_index)
                for place in range(len(part.micro_batches))
            ]
            yield replace(part, seeds=seeds)


def _part(
    accelerator: Accelerator, rollouts: Sequence[Rollout], advantages: Advantages, collate: Collate, micro_batch_size: int
) -> Batch:
    ranks, rank, count = accelerator.num_processes, accelerator.process_index, float(len(rollouts))
    cuts = [slice(start, start + micro_batch_size) for start in range(0, len(rollouts), micro_batch_size)]
    counted = sum(float(collate([rollout], [0.0])["mask"].sum()) for rollout in rollouts)
    rounds = -(-len(cuts) // ranks)
    mine = [cuts[place] if place < len(cuts) else None for place in range(rank, rounds * ranks, ranks)]
    return Batch(
        micro_batches=[collate(rollouts[cut or cuts[0]], advantages[cut or cuts[0]]) for cut in mine],
        totals={"examples": count, "completions": count, "completion_tokens": counted, "tokens": counted},
        real=[cut is not None for cut in mine],
        size=len(rollouts),
    )


def collate_rollouts(
    rollouts: Sequence[Rollout], advantages: Advantages, *, layout: str = "shared", pad_token_id: int = 0,
    mask_truncated_completions: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The tensors of a micro-batch of completions, in a layout of `lay_out`: with `shared` a group's prompt is read once.

    Next to what `lay_out` says: `advantages` `[completions]`, float32; `mask` `[completions, longest completion]`, float32: 1
    where a token counts, which those of truncated completions don't where `mask_truncated_completions`; `sampled_logps`, of the
    same shape, nats, as the sampler found them. Where some tokens could not be drawn, `kept_rows` and `kept_ids` `[K]`: the
    number of a token among all of the completions, and an id that could be drawn there.
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
    mask, sampled = (np.zeros((len(rollouts), batch["longest_answer"]), dtype=np.float32) for _ in range(2))
    for row, rollout in enumerate(rollouts):
        mask[row, : len(rollout.completion_ids)] = not (mask_truncated_completions and rollout.truncated)
        sampled[row, : len(rollout.logps)] = rollout.logps
    batch |= {
        "advantages": torch.as_tensor(advantages, dtype=torch.float32), "mask": torch.from_numpy(mask),
        "sampled_logps": torch.from_numpy(sampled),
    }  # fmt: skip
    if rollouts[0].kept is not None:
        kept = [ids for rollout in rollouts for ids in rollout.kept or ()]
        batch["kept_rows"] = torch.from_numpy(np.repeat(np.arange(len(kept)), [len(ids) for ids in kept]))
        batch["kept_ids"] = torch.from_numpy(np.concatenate([np.asarray(ids, dtype=np.int64) for ids in kept]))
    return batch
