"""Rollouts of a batch of prompts: each rank samples those dealt to it, and all ranks hold all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    prompts: list[tuple[tuple[int, int], int, int, list[int], dict[str, Any]]] = []
    for number, (micro_batch, is_real) in enumerate(zip(batch.micro_batches, batch.real, strict=True)):
        rows = zip(batch.epochs[number], batch.indices[number], micro_batch["prompt_ids"], micro_batch["rows"], strict=True)
        for place, (epoch, example, ids, row) in enumerate(rows if is_real else ()):
            prompts.append(((number * ranks + rank, place), epoch, example, list(ids), row))
    keys = [[completion_key(seed, each[1], each[2], index) for index in range(num_generations)] for each in prompts]
    shards = engine_of(accelerator).shards

    def sample() -> list[tuple[tuple[int, int], Rollout]]:
        with torch.no_grad(), accelerator.autocast():
            groups = sample_groups(
                unwrapped(model), [each[3] for each in prompts],
                np.array(keys, dtype=np.uint64).reshape(len(prompts), num_generations), settings, tokenizer,
                together=(lambda more: bool(largest(accelerator, int(more)))) if shards else None,
            )  # fmt: skip
        found = []
        for (place, epoch, example, ids, row), group in zip(prompts, groups, strict=True):
            texts = tokenizer.batch_decode([completion.tokens for completion in group], skip_special_tokens=True)
            for index, (completion, text) in enumerate(zip(group, texts, strict=True)):
                kept = None if completion.kept is None else [ids.tolist() for ids in completion.kept]
                rollout = Rollout(
                    example, index, ids, completion.tokens, completion.logps, completion.truncated, row, text, epoch=epoch,
                    kept=kept,
                )  # fmt: skip
                found.append((place, rollout))
        return found

    everyone = [each for of_rank in from_all(accelerator, sample) for each in of_rank]
    return [rollout for _, rollout in sorted(everyone, key=lambda each: (each[0], each[1].index))]
