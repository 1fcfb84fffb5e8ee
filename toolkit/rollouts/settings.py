"""From the settings of a recipe to those of its loader and of its sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.config import DataConfig, Refusal
from toolkit.config.rollouts import RolloutConfig
from toolkit.data.loading.columns import column
from toolkit.generation.continued_texts import stop_ids
from toolkit.generation.distribution import SamplingSettings
from toolkit.models.shapes import positions_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Config = TypeVar("Config", bound=DataConfig)


def in_prompts(config: Config, num_generations: int, accelerator: Accelerator | None = None) -> Config:
    """The same settings with batch sizes counted in prompts, as a loader of prompts takes them, in place of completions.

    Raises:
        Refusal: the completions of a step are not a whole number of groups, or fewer than its updates.
    """
    ranks = accelerator.num_processes if accelerator else 1
    micro = config.per_device_train_batch_size
    completions = config.global_batch_size or micro * config.gradient_accumulation_steps * ranks
    if completions % num_generations:
        raise Refusal(
            f"--num-generations {num_generations}: a step of {completions:,} completions (--per-device-train-batch-size x "
            "--gradient-accumulation-steps x processes, or --global-batch-size) is not a whole number of groups. Give "
            f"--global-batch-size {-(-completions // num_generations) * num_generations}."
        )
    if isinstance(config, RolloutConfig) and config.steps_per_generation > completions:
        raise Refusal(
            f"--steps-per-generation {config.steps_per_generation}: a step has {completions:,} completions, too few for as "
            f"many updates. Give at most {completions}."
        )
    return replace(
        config, per_device_train_batch_size=max(1, micro // num_generations), gradient_accumulation_steps=1,
        global_batch_size=completions // num_generations,
    )  # fmt: skip


def sampling_settings(
    config: RolloutConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
    splits: Mapping[str, Any] | None = None, *, evaluates: bool = False,
) -> SamplingSettings:  # fmt: skip
    """How completions are drawn; in an evaluation at `eval_temperature` and from all tokens.

    Args:
        splits: of `tokenize_for_prompts`, whose longest prompt must leave room for the longest completion.

    Raises:
        Refusal: it does not: the run would end where it meets that prompt. Lengths of a stream are not known.
    """
    if splits is not None:
        _check_room(config.max_completion_length, positions_of(model.config), splits)
    settings = SamplingSettings(
        max_new_tokens=config.max_completion_length, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p,
        min_p=config.min_p, eos_token_ids=tuple(stop_ids(model, tokenizer)), stop_strings=tuple(config.stop_strings),
    )  # fmt: skip
    if evaluates:
        return replace(settings, temperature=config.eval_temperature, top_k=0, top_p=1.0, min_p=0.0)
    return settings


def _check_room(most: int, positions: int | None, splits: Mapping[str, Any]) -> None:
    lengths = [int(column(split, "length").max()) for split in splits.values() if hasattr(split, "__len__") and len(split)]
    longest = max(lengths, default=0)
    if positions is None or longest + most <= positions:
        return
    shorter = {"--max-completion-length": positions - longest, "--max-prompt-length": positions - most}
    advice = " or ".join(f"{flag} {length}" for flag, length in shorter.items() if length > 0)
    raise Refusal(
        f"--max-completion-length {most}: the longest prompt has {longest:,} tokens and the model {positions:,} positions. "
        f"Take {advice or 'both shorter'}."
    )
