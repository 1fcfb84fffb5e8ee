"""Rollouts of a batch of prompts: each rank samples those dealt to it, and all ranks hold all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from toolkit.data.loading.batch import Batch
from toolkit.distributed.engines import engine_of, unwrapped
from toolkit.distributed.ranks import from_all, largest
from toolkit.generation.distribution import SamplingSettings
from toolkit.generation.random_numbers import completion_key
from toolkit.generation.sampler import sample_groups
from toolkit.rollouts.rollout import Rollout

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase


def sample_rollouts(
    accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, batch: Batch, settings: SamplingSettings,
    *, num_generations: int, seed: int = 0,
) -> list[Rollout]:  # fmt: skip
    """`num_generations` completions of each prompt of a batch of `collate_prompts`, the same list on every rank. A collective.

    Each is a function of the weights and of (seed, epoch, prompt, index in the group): of neither the ranks nor the batch.

    Raises:
        Refusal: a prompt that leaves no room for a completion.
    """
    ranks, rank = accelerator.num_processes, accelerator.process_index
    places, asked = list[tuple[int, int]](), list[Asked]()
    for number, (micro_batch, is_real) in enumerate(zip(batch.micro_batches, batch.real, strict=True)):
        rows = zip(batch.indices[number], batch.epochs[number], micro_batch["prompt_ids"], micro_batch["rows"], strict=True)
        for place, each in enumerate(rows if is_real else ()):
            places.append((number * ranks + rank, place))  # in the order of the global batch
            asked.append(Asked(*each))

    def sample() -> list[tuple[tuple[int, int], list[Rollout]]]:
        return list(zip(places, complete(accelerator, model, tokenizer, asked, settings, num_generations, seed), strict=True))

    everyone = [each for of_rank in from_all(accelerator, sample) for each in of_rank]
    return [rollout for _, group in sorted(everyone, key=lambda each: each[0]) for rollout in group]


class Asked(NamedTuple):
    """A prompt: its number and epoch, from which its random numbers follow, its tokens, and its columns."""

    prompt: int
    epoch: int
    ids: list[int]
    row: dict[str, Any]


def complete(
    accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Asked],
    settings: SamplingSettings, size: int, seed: int,
) -> list[list[Rollout]]:  # fmt: skip
    """A group of `size` completions for each prompt of this rank. Where parameters are sharded, all ranks must call it."""
    keys = [[completion_key(seed, each.epoch, each.prompt, index) for index in range(size)] for each in asked]
    with torch.no_grad(), accelerator.autocast():
        groups = sample_groups(
            unwrapped(model), [each.ids for each in asked], np.array(keys, dtype=np.uint64).reshape(len(asked), size), settings,
            tokenizer, (lambda more: bool(largest(accelerator, int(more)))) if engine_of(accelerator).shards else None,
        )  # fmt: skip
    return [
        [
            Rollout(
                each.prompt, index, each.ids, completion.tokens, completion.logps, completion.truncated, each.row,
                str(tokenizer.decode(completion.tokens, skip_special_tokens=True)), epoch=each.epoch,
                kept=None if completion.kept is None else [ids.tolist() for ids in completion.kept],
            )
            for index, completion in enumerate(group)
        ]
        for each, group in zip(asked, groups, strict=True)
    ]  # fmt: skip
