"""Rollouts of a plan: nothing is sampled or scored, and each completion is as long as it may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from toolkit.data.loading.batch import Batch
from toolkit.diagnostics.ledger import FAKE, Ledger
from toolkit.diagnostics.replacements import Replacements
from toolkit.distributed.engines import unwrapped
from toolkit.generation.distribution import SamplingSettings, draw
from toolkit.generation.sampler import cache_bytes_of_group
from toolkit.rollouts import ledger as kept_rollouts
from toolkit.rollouts.reward_model import RewardModel
from toolkit.rollouts.rollout import Rollout

SAMPLING = "sampling"  # the part that the keys and values of a group take, and the logits of its next tokens


@dataclass
class PlannedRollouts:
    """What samples, scores and writes rollouts, replaced; the updates are the recipe's own.

    Of the sampler the least is planned, one group at a time: of what memory is free it takes half for more of them.
    """

    ledger: Ledger
    micro_batch_size: int  # completions
    steps_per_generation: int
    updating: Callable[[Batch, int, int], None]  # a batch, completions in its micro-batches, completions in a whole update

    def replace(self, replacements: Replacements) -> None:
        replacements.public("connect_server", lambda *_, **__: None)
        replacements.public("sample_rollouts", self._sampled)
        replacements.public("score_rollouts", _scored)
        replacements.public("save_rollouts", lambda *_, **__: None)
        replacements.public("with_logps", _with_any_logps)
        replacements.public("policy_batches", self._first_update)
        replacements.attribute(kept_rollouts, "policy_version", lambda *_: "planned")
        replacements.attribute(RewardModel, "__init__", self._reward_model)

    def _sampled(
        self, original: Any, accelerator: Any, model: torch.nn.Module, tokenizer: Any, batch: Batch, settings: SamplingSettings,
        *, num_generations: int, **named: Any,
    ) -> list[Rollout]:  # fmt: skip
        """Groups of the longest prompts that there are, again and again."""
        longest = batch.micro_batches[0]
        prompts, rows = longest["prompt_ids"], longest["rows"]
        self._sample_a_group(unwrapped(model), max(map(len, prompts)), num_generations, settings)
        most = settings.max_new_tokens
        tokens, logps = [0] * most, [0.0] * most
        kept = [list(range(max(1, settings.top_k)))] * most if settings.cuts else None
        return [
            Rollout(
                prompt=number, index=index, prompt_ids=prompts[number % len(prompts)], completion_ids=tokens, logps=logps,
                truncated=False, row=rows[number % len(rows)], completion="", kept=kept,
            )
            for number in range(batch.size) for index in range(num_generations)
        ]  # fmt: skip

    def _sample_a_group(self, model: Any, prompt: int, size: int, settings: SamplingSettings) -> None:
        """Let the ledger see what one group of completions needs at its last token."""
        vocabulary = model.config.get_text_config().vocab_size
        settings = replace(settings, top_p=1.0)  # which on a CPU is computed by numpy, in no more memory
        with self.ledger.during(SAMPLING), torch.no_grad(), FAKE:
            kept = torch.empty(cache_bytes_of_group(model, prompt, size, settings.max_new_tokens), dtype=torch.uint8)
            logits = torch.empty(size, vocabulary)
            for tensor in (kept, logits):
                self.ledger.see(tensor, SAMPLING)
            draw(logits, np.zeros(size, dtype=np.uint64), 0, settings)

    def _first_update(
        self, original: Any, accelerator: Any, rollouts: Sequence[Rollout], advantages: Any, collate: Any, **named: Any
    ) -> Iterator[Batch]:
        """Two micro-batches on each rank, or what an update has where that is fewer."""
        update = len(rollouts) // self.steps_per_generation
        few = min(2 * self.micro_batch_size * accelerator.num_processes, update)
        once = {**named, "steps_per_generation": 1, "num_iterations": 1}
        batch = next(original(accelerator, rollouts[:few], advantages[:few], collate, **once))
        self.updating(batch, self.micro_batch_size, update)
        yield batch

    def _reward_model(self, original: Any, reward_model: Any, *values: Any) -> None:
        original(reward_model, *values)
        for tensor in (*reward_model.model.parameters(), *reward_model.model.buffers()):
            self.ledger.see(tensor, "reward model")


def _scored(
    original: Any, rollouts: Sequence[Rollout], rewards: Sequence[Any], *values: object, **named: object
) -> list[Rollout]:
    """Every second one is right: groups without spread would be left out."""
    return [
        replace(each, reward=float(each.index % 2), rewards={reward.name: float(each.index % 2) for reward in rewards})
        for each in rollouts
    ]


def _with_any_logps(
    original: Any, accelerator: Any, model: Any, rollouts: Sequence[Rollout], *values: object, **named: object
) -> list[Rollout]:
    """What is asked of one completion is known of all: these forward passes keep no graph, so that no peak is in them."""
    first = original(accelerator, model, rollouts[:1], *values, **named)[0]
    asked = [name for name, value in vars(first).items() if value is not None and getattr(rollouts[0], name) is None]
    known: list[dict[str, Any]] = [{name: [0.0] * len(each.completion_ids) for name in asked} for each in rollouts]
    return [replace(each, **of_each) for each, of_each in zip(rollouts, known, strict=True)]
