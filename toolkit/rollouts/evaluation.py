"""Rewards of held-out prompts: one completion of each, the same whatever the batch and the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from toolkit.distributed.engines import engine_of, unwrapped
from toolkit.distributed.ranks import largest
from toolkit.generation.distribution import SamplingSettings
from toolkit.generation.random_numbers import completion_key
from toolkit.generation.sampler import sample_groups
from toolkit.metrics.metric import Metrics
from toolkit.rollouts.rollout import Rollout
from toolkit.rollouts.scoring import score_rollouts

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

    from toolkit.rollouts.rewards import Reward


def sampled_reward_metrics(
    accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase, rewards: Sequence[Reward], settings: SamplingSettings,
    *, seed: int = 0, on_error: str = "stop",
) -> Metrics:  # fmt: skip
    """Exact means over the prompts of a split, of one completion each: `reward`, and `reward_<name>` over those it applies to.

    And `completion_length`, tokens, and `truncated`, the share without an end. Drawn at a temperature, a completion is a
    function of the weights, the prompt's number and the seed. Micro-batches are those of `collate_prompts`.
    """

    def gather(model: nn.Module, micro_batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        prompts, numbers = micro_batch["prompt_ids"], micro_batch["prompt"]
        keys = np.array([[completion_key(seed, -1, number, 0)] for number in numbers], dtype=np.uint64)  # of no epoch
        together = (lambda more: bool(largest(accelerator, int(more)))) if engine_of(accelerator).shards else None
        with accelerator.autocast():
            groups = sample_groups(unwrapped(model), prompts, keys, settings, tokenizer, together)
        completions = [group[0] for group in groups]
        texts = tokenizer.batch_decode([each.tokens for each in completions], skip_special_tokens=True)
        rollouts = [
            Rollout(number, 0, ids, each.tokens, each.logps, each.truncated, row, text)
            for number, ids, each, row, text in zip(numbers, prompts, completions, micro_batch["rows"], texts, strict=True)
        ]
        scored = score_rollouts(rollouts, rewards, on_error=on_error)
        rows = {f"reward_{reward.name}": [each.rewards[reward.name] for each in scored] for reward in rewards}
        values: dict[str, list[Any]] = {
            "reward": [each.reward for each in scored], "completion_length": [len(each.tokens) for each in completions],
            "truncated": [each.truncated for each in completions], **rows,
        }  # fmt: skip
        return {
            name: torch.tensor([float("nan") if value is None else float(value) for value in column], device=accelerator.device)
            for name, column in values.items()
        }

    def finalize(rows: dict[str, np.ndarray]) -> dict[str, float]:
        known = {name: values[~np.isnan(values)] for name, values in rows.items()}
        return {name: float(values.mean()) if len(values) else float("nan") for name, values in known.items()}

    return Metrics(update=None, finalize=finalize, gather=gather)
