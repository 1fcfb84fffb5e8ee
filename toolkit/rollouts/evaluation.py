"""Rewards of held-out prompts: one completion of each, the same whatever the batch and the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from toolkit.data.loading.batch import MicroBatch
from toolkit.data.loading.order import hash_numbers
from toolkit.distributed.ranks import on_all
from toolkit.generation.distribution import SamplingSettings
from toolkit.metrics.metric import Metrics
from toolkit.rollouts.rollout import ENVIRONMENT, Rollout
from toolkit.rollouts.sampling import Asked, complete, prompts_of
from toolkit.rollouts.scoring import score_rollouts

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

    from toolkit.rollouts.environments import Environments
    from toolkit.rollouts.rewards import Reward


def sampled_reward_metrics(
    accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase, rewards: Sequence[Reward], settings: SamplingSettings,
    *, seed: int = 0, on_error: str = "stop", output: str = "show", environment: Environments | None = None,
) -> Metrics:  # fmt: skip
    """Exact means over the prompts of a split, of one completion each: `reward`, and `reward_<name>` over those it applies to.

    And `completion_length`, tokens, and `truncated`, the share without an end. Drawn at a temperature, a completion is a
    function of the weights, the prompt's number and the seed. Micro-batches are those of `collate_prompts`; `on_error` and
    `output` are those of `score_rollouts`.
    """

    def gather(model: nn.Module, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        prompts = micro_batch["prompt_ids"]
        numbers = micro_batch.get("prompt") or [hash_numbers(ids) for ids in prompts]  # rows of a stream have no number
        rows = zip(numbers, prompts, micro_batch["rows"], strict=True)
        given = [Asked(number, -1, ids, row) for number, ids, row in rows]  # of no epoch
        asked = on_all(accelerator, lambda: prompts_of(given, environment))
        completed = complete(accelerator, model, tokenizer, asked, settings, 1, seed, environment=environment)

        def score() -> list[Rollout]:
            return score_rollouts([group[0] for group in completed], rewards, on_error=on_error, output=output)

        scored = on_all(accelerator, score)
        names = [*([ENVIRONMENT] if environment else []), *(reward.name for reward in rewards)]
        named = {f"reward_{name}": [each.rewards[name] for each in scored] for name in names}
        values: dict[str, list[Any]] = {
            "reward": [each.reward for each in scored], "completion_length": [len(each.completion_ids) for each in scored],
            "truncated": [each.truncated for each in scored], **named,
        }  # fmt: skip
        return {
            name: torch.tensor([float("nan") if value is None else float(value) for value in column], device=accelerator.device)
            for name, column in values.items()
        }

    def finalize(rows: dict[str, np.ndarray]) -> dict[str, float]:
        known = {name: values[~np.isnan(values)] for name, values in rows.items()}
        return {name: float(values.mean()) if len(values) else float("nan") for name, values in known.items()}

    return Metrics(update=None, finalize=finalize, gather=gather)
