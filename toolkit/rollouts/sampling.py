"""Rollouts of a batch of prompts: each rank samples those dealt to it, and all ranks hold all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import nn

from toolkit.config import Refusal
from toolkit.data.loading.batch import Batch
from toolkit.data.loading.order import hash_numbers
from toolkit.distributed.engines import engine_of, unwrapped
from toolkit.distributed.ranks import from_all, largest, on_all
from toolkit.generation.continued_texts import sample_on_rank
from toolkit.generation.distribution import SamplingSettings
from toolkit.generation.random_numbers import completion_key
from toolkit.generation.sampler import Completion
from toolkit.rollouts.environments import Environments
from toolkit.rollouts.ledger import Phase, policy_version
from toolkit.rollouts.rollout import ENVIRONMENT, Rollout
from toolkit.rollouts.server import RolloutServer, ask_for_groups, hand_over

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase


def sample_rollouts(
    accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, batch: Batch, settings: SamplingSettings,
    *, num_generations: int, seed: int = 0, phase: Phase | None = None, environment: Environments | None = None,
    server: RolloutServer | None = None,
) -> list[Rollout]:  # fmt: skip
    """`num_generations` completions of each prompt of a batch of `collate_prompts`, the same list on every rank. A collective.

    Each is a function of the weights and of (seed, epoch, prompt, index in the group): of neither the ranks nor the batch.

    Args:
        phase: of `open_phase`. What it has is not sampled again, and what is sampled is appended to it.
        environment: of `load_environment`, which answers the policy's turns.
        server: of `connect_server`, which samples in place of the model, with its weights.

    Raises:
        Refusal: a prompt that leaves no room for a completion, or that the ledger trained from does not have; of a server, what
            it can't do or does wrong.
    """
    ranks, rank, began = accelerator.num_processes, accelerator.process_index, time.monotonic()
    places, given = list[tuple[int, int]](), list[Asked]()
    for number, (micro_batch, is_real) in enumerate(zip(batch.micro_batches, batch.real, strict=True)):
        rows = zip(batch.indices[number], batch.epochs[number], micro_batch["prompt_ids"], micro_batch["rows"], strict=True)
        for place, each in enumerate(rows if is_real else ()):
            places.append((number * ranks + rank, place))  # in the order of the global batch
            given.append(Asked(*each))

    asked = on_all(accelerator, lambda: prompts_of(given, environment))
    known = [_known(phase, each, num_generations) for each in asked]
    missing = [each for each, group in zip(asked, known, strict=True) if group is None]
    if phase is not None and phase.source is not None:
        on_all(accelerator, lambda: _refuse_missing(phase, missing))

    if server is not None and largest(accelerator, len(missing)):
        version = phase.header["policy"] if phase is not None else policy_version(accelerator, model)
        hand_over(accelerator, server, model, tokenizer, version)

    def append(group: list[Rollout]) -> None:
        if phase is not None:
            phase.append(group, rank)

    def sample() -> list[tuple[tuple[int, int], list[Rollout]]]:
        sampled = iter(
            complete(accelerator, model, tokenizer, missing, settings, num_generations, seed, append, environment, server)
        )
        return [(place, group or next(sampled)) for place, group in zip(places, known, strict=True)]

    everyone = [each for of_rank in from_all(accelerator, sample) for each in of_rank]
    rollouts = [rollout for _, group in sorted(everyone, key=lambda each: each[0]) for rollout in group]
    if phase is not None:
        phase.sampling += time.monotonic() - began
        phase.fresh += sum(len(each.completion_ids) for each in rollouts if (each.epoch, each.prompt) not in phase.known)
    return rollouts


def prompts_of(given: Sequence[Asked], environment: Environments | None) -> list[Asked]:
    """The prompts, those that an environment begins with in place of the rows' own."""
    if environment is None:
        return list(given)
    began = [environment.prompt_of(each.row, each.ids) for each in given]
    return [each._replace(row=row, ids=ids) for each, (row, ids) in zip(given, began, strict=True)]


class Asked(NamedTuple):
    """A prompt: its number and epoch, from which its random numbers follow, its tokens, and its columns."""

    prompt: int
    epoch: int
    ids: list[int]
    row: dict[str, Any]


def complete(
    accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Asked],
    settings: SamplingSettings, size: int, seed: int, on_group: Callable[[list[Rollout]], None] | None = None,
    environment: Environments | None = None, server: RolloutServer | None = None,
) -> list[list[Rollout]]:  # fmt: skip
    """A group of `size` completions for each prompt of this rank, given to `on_group` as soon as it is complete. Where
    parameters are sharded, all ranks must call it. A server has the model's weights already."""
    if environment is not None:
        return _converse(accelerator, model, tokenizer, asked, settings, size, seed, on_group, environment)
    groups: list[list[Rollout]] = [[] for _ in asked]

    def keep(number: int, completions: list[Completion]) -> None:
        groups[number] = [_rollout(asked[number], index, each, tokenizer) for index, each in enumerate(completions)]
        if on_group:
            on_group(groups[number])

    prompts = [each.ids for each in asked]
    if server is not None:
        seeds = [completion_key(seed, each.epoch, each.prompt, 0) >> 33 for each in asked]  # the largest has 31 bits
        names = [str(each.row.get("origin", each.prompt)) for each in asked]
        vocabulary = int(unwrapped(model).config.get_text_config().vocab_size)
        ask_for_groups(server, prompts, seeds, settings, size, vocabulary, names, keep)
        return groups
    keys = [[completion_key(seed, each.epoch, each.prompt, index) for index in range(size)] for each in asked]
    table = np.array(keys, dtype=np.uint64).reshape(len(asked), size)
    sample_on_rank(accelerator, model, prompts, table, settings, tokenizer, keep)
    return groups


def _converse(
    accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Asked],
    settings: SamplingSettings, size: int, seed: int, on_group: Callable[[list[Rollout]], None] | None,
    environment: Environments,
) -> list[list[Rollout]]:  # fmt: skip
    """Each turn of all conversations together. The random numbers of a turn behind the first follow from its number too."""
    sharded = engine_of(accelerator).shards

    def sample(turn: int, numbers: list[int], ids: list[list[int]], most: list[int]) -> list[list[Completion]]:
        seeded = seed if turn == 0 else hash_numbers(seed, "turn", turn)
        keys = [completion_key(seeded, asked[n // size].epoch, asked[n // size].prompt, n % size) for n in numbers]
        table = np.array(keys, dtype=np.uint64).reshape(len(ids), size if turn == 0 else 1)
        return sample_on_rank(accelerator, model, ids, table, settings, tokenizer, limits=most)

    talks = environment.converse(
        [each.row for each in asked], [list(each.ids) for each in asked], size, settings.max_new_tokens, sample,
        lambda more: bool(largest(accelerator, int(more))) if sharded else more,
    )  # fmt: skip
    groups = []
    for each, group in zip(asked, talks, strict=True):
        rollouts = [
            replace(
                _rollout(each, index, one.completion if settings.cuts else replace(one.completion, kept=None), tokenizer),
                written=one.written, messages=one.said, rewards={ENVIRONMENT: None if one.problem else one.reward},
                truncated=one.completion.truncated and not one.problem,
            )
            for index, one in enumerate(group)
        ]  # fmt: skip
        groups.append(rollouts)
        if on_group:
            on_group(rollouts)
    return groups


def _rollout(asked: Asked, index: int, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    return Rollout(
        asked.prompt, index, asked.ids, completion.tokens, completion.logps, completion.truncated, asked.row,
        str(tokenizer.decode(completion.tokens, skip_special_tokens=True)), epoch=asked.epoch,
        kept=None if completion.kept is None else [ids.tolist() for ids in completion.kept],
    )  # fmt: skip


def _known(phase: Phase | None, asked: Asked, size: int) -> list[Rollout] | None:
    """The group that the ledger has of a prompt, with the prompt's columns as they are now."""
    group = phase.known.get((asked.epoch, asked.prompt)) if phase is not None else None
    if group is None or len(group) != size or group[0].prompt_ids != list(asked.ids):
        return None
    return [replace(rollout, row=asked.row) for rollout in group]


def _refuse_missing(phase: Phase, missing: Sequence[Asked]) -> None:
    if missing:
        where = missing[0].row.get("origin", f"number {missing[0].prompt}")
        raise Refusal(
            f"--rollouts-from {phase.source}: its step {phase.step:,} has no group of this size for the prompt {where}. Train "
            "on the data of that run, with its batch size and --num-generations."
        )
