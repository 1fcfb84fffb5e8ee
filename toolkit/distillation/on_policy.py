"""On-policy distillation: the student writes a share of the answers itself, and learns what its teacher predicts there.

Generalized knowledge distillation, arXiv:2306.13649, algorithm 1, with the share counted in documents, not in steps. What the
student writes follows from its weights and from (seed, epoch, example): a resumed run writes the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from torch import nn

from toolkit.config import Refusal
from toolkit.data.loading.batch import Batch
from toolkit.data.loading.collate import IGNORED
from toolkit.data.loading.loaders import StreamLoader, TrainLoader
from toolkit.data.loading.order import generator_of, hash_numbers
from toolkit.data.loading.packing import count_supervised
from toolkit.distributed.engines import unwrapped
from toolkit.distributed.ranks import from_all, on_all
from toolkit.generation.continued_texts import sample_on_rank, stop_ids
from toolkit.generation.distribution import SamplingSettings
from toolkit.generation.random_numbers import completion_key

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase


class OnPolicySettings(Protocol):
    """What is read of a recipe's settings."""

    @property
    def on_policy_share(self) -> float: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def seed(self) -> int: ...


def check_prompts(train: TrainLoader | StreamLoader) -> None:
    """Refuse rows that are texts before a run begins, by the first of them."""
    if isinstance(train, TrainLoader) and len(train.rows):
        _check_prompts(train.rows.documents([0]))


class _Drawn(NamedTuple):
    """A document whose answer is going to be written: its place in the batch, its prompt, and the key of its random numbers."""

    micro_batch: int
    place: int
    prompt: list[int]
    key: int


def with_own_answers(
    accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, train: TrainLoader | StreamLoader,
    batch: Batch, config: OnPolicySettings,
) -> Batch:  # fmt: skip
    """The batch with `config.on_policy_share` of its answers written by the model as it is now. A collective.

    In each document that is drawn, the last supervised part is replaced by a completion of all before it: drawn at temperature
    1, of at most `config.max_new_tokens` tokens, and fewer where the document would be longer than `config.max_length`. It
    alone is supervised then. Documents without a prompt stay as they are. `totals["tokens"]` counts what is supervised now.

    Args:
        train: the loader that the batch is from.

    Raises:
        Refusal: rows that are texts, without prompts, or a stream, which doesn't keep its rows.
    """
    if not config.on_policy_share:
        return batch
    if not isinstance(train, TrainLoader):
        raise Refusal("--on-policy-share: reads the rows of a step again, which a stream has not kept. Remove --streaming.")
    documents = on_all(accelerator, lambda: [_documents(train, batch, number) for number in range(len(batch.micro_batches))])
    drawn = [each for number in np.flatnonzero(batch.real).tolist() for each in _drawn(documents[number], number, config)]
    settings = SamplingSettings(
        max_new_tokens=config.max_new_tokens, eos_token_ids=tuple(stop_ids(unwrapped(model), tokenizer))
    )
    keys = np.array([[each.key] for each in drawn], dtype=np.uint64).reshape(len(drawn), 1)
    prompts = [each.prompt for each in drawn]
    limits = [min(config.max_new_tokens, config.max_length - len(prompt)) for prompt in prompts]
    groups = sample_on_rank(accelerator, model, prompts, keys, settings, tokenizer, limits=limits)
    for each, (completion,) in zip(drawn, groups, strict=True):
        documents[each.micro_batch][each.place][1].update(_written(each.prompt, completion.tokens))
    rows = [[document for _, document in of_one] for of_one in documents]
    micro_batches = list(batch.micro_batches)
    for number in {each.micro_batch for each in drawn}:
        micro_batches[number] = train.collate(rows[number])
    here = sum(count_supervised(document) for of_one, real in zip(rows, batch.real, strict=True) if real for document in of_one)
    tokens = sum(from_all(accelerator, lambda: here))
    return replace(batch, micro_batches=micro_batches, totals={**batch.totals, "tokens": float(tokens)})


def _documents(train: TrainLoader, batch: Batch, number: int) -> list[tuple[tuple[int, int, int], dict[str, Any]]]:
    """The documents of a micro-batch, each with (epoch, example, place in the example)."""
    found = []
    for epoch, example in zip(batch.epochs[number], batch.indices[number], strict=True):
        found += [((epoch, example, place), document) for place, document in enumerate(train.rows.documents([example]))]
    _check_prompts([document for _, document in found])
    return found


def _check_prompts(documents: list[dict[str, Any]]) -> None:
    if any("labels" not in document for document in documents):
        raise Refusal(
            "--on-policy-share: the rows are texts, without prompts to answer. Take data with prompts "
            "(messages, or prompt and completion), and leave --no-completion-only-loss out."
        )


def _drawn(
    documents: list[tuple[tuple[int, int, int], dict[str, Any]]], number: int, config: OnPolicySettings
) -> list[_Drawn]:
    found = []
    for place, ((epoch, example, part), document) in enumerate(documents):
        prompt = _prompt_of(document)
        numbers = generator_of(config.seed, "own answer", epoch, example, part)
        if prompt and len(prompt) < config.max_length and numbers.random() < config.on_policy_share:
            key = completion_key(hash_numbers(config.seed, "own answer", part), epoch, example, 0)
            found.append(_Drawn(number, place, prompt, key))
    return found


def _prompt_of(document: dict[str, Any]) -> list[int]:
    """All tokens before the last supervised part; none where the document begins with that."""
    counts = np.asarray(document["labels"]) != IGNORED
    begins = np.flatnonzero(counts[1:] & ~counts[:-1])
    return np.asarray(document["input_ids"])[: begins[-1] + 1].tolist() if len(begins) else []


def _written(prompt: list[int], completion: list[int]) -> dict[str, Any]:
    tokens = np.array([*prompt, *completion], dtype=np.int64)
    labels = tokens.copy()
    labels[: len(prompt)] = IGNORED
    return {"input_ids": tokens, "labels": labels, "supervised_tokens": len(completion)}
