"""Texts that an encoder-decoder generates from its sources: batched, by beam search, greedy decoding or sampling.

A text does not depend on its batch but for rounding: each row is searched alone, padding is masked, and what is drawn at
random is drawn for the row by its own tokens and the seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from toolkit.config import GeneratedTextConfig
from toolkit.data.loading.batch import MicroBatch
from toolkit.distributed.engines import engine_of, unwrapped
from toolkit.generation.samples import trim_for_display
from toolkit.metrics.metric import Metrics
from toolkit.metrics.text import TextMetric, choose_text_metrics, generated_text_metrics
from toolkit.models.layers import uncompiled
from toolkit.system.evaluation_mode import evaluation_mode

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from toolkit.data.loading.loaders import EvalLoader

Generate = Callable[[nn.Module, MicroBatch], torch.Tensor]


def target_metrics(
    accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase, tokenized: Mapping[str, Dataset], config: GeneratedTextConfig,
    max_new_tokens: int, metrics: dict[str, TextMetric] | None = None,
) -> Metrics:  # fmt: skip
    """Metrics of the texts generated for an evaluation split, each next to the target of its example as it is in the data.

    Raises:
        Refusal: an unknown metric, or one whose library is not installed.
    """
    references: list[str] = list(tokenized["validation"]["target"]) if "validation" in tokenized else []
    width = config.max_new_tokens or max_new_tokens
    return generated_text_metrics(
        generate_targets(accelerator, tokenizer, config, width), partial(_decode, tokenizer=tokenizer), references,
        choose_text_metrics(config.metrics) if metrics is None else metrics, width=width,
        pad_token_id=int(tokenizer.pad_token_id),
    )  # fmt: skip


def generate_targets(
    accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase, config: GeneratedTextConfig, max_new_tokens: int
) -> Generate:
    """`(model, micro_batch) -> ids` `[examples, at most max_new_tokens]`, without the token that the decoder begins with.

    What the settings leave open is as in the model's own generation_config: its length penalty, its forced tokens.
    """

    def generate(model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        inner = unwrapped(model)
        inputs = {name: micro_batch[name] for name in ("input_ids", "attention_mask")}
        draws = _draws(config, inputs["input_ids"], inputs["attention_mask"]) if config.do_sample else []
        with torch.no_grad(), evaluation_mode(inner), uncompiled(inner), accelerator.autocast():
            output = inner.generate(
                **inputs,
                generation_config=_settings(inner, tokenizer, config, max_new_tokens),
                logits_processor=draws,
                synced_gpus=engine_of(accelerator).shards,  # a rank that ended earlier would leave the others waiting
            )
        return output[:, 1:]

    return generate


def sample_targets(
    accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, loader: EvalLoader | None,
    config: GeneratedTextConfig, max_new_tokens: int,
) -> list[dict[str, str]]:  # fmt: skip
    """A few examples of the evaluation split, evenly spread, as {"prompt": source, "text": generated, "reference": target}.

    Every rank makes the same texts, since each forward pass of a sharded model needs all of them.
    """
    if loader is None or not config.num_samples:
        return []
    count = min(config.num_samples, len(loader.rows))
    examples = [(2 * part + 1) * len(loader.rows) // (2 * count) for part in range(count)]
    micro_batch = loader.collate(loader.rows.documents(examples))
    inputs = {name: micro_batch[name].to(accelerator.device) for name in ("input_ids", "attention_mask")}
    width = config.max_new_tokens or max_new_tokens
    ids = generate_targets(accelerator, tokenizer, config, width)(model, inputs)
    labels = micro_batch["labels"].masked_fill(micro_batch["labels"] == -100, int(tokenizer.pad_token_id))
    texts = zip(*(_decode(each.cpu().numpy(), tokenizer) for each in (inputs["input_ids"], ids, labels)), strict=True)
    return [
        {"prompt": trim_for_display(source), "text": trim_for_display(text), "reference": trim_for_display(target)}
        for source, text, target in texts
    ]


def _decode(ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return list(tokenizer.batch_decode(ids.tolist(), skip_special_tokens=True))


def _settings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: GeneratedTextConfig, max_new_tokens: int
) -> GenerationConfig:
    """The model's own generation_config, with the settings in its place. Draws are made by `_draws`."""
    from transformers import GenerationConfig

    settings = GenerationConfig.from_dict(model.generation_config.to_dict())
    settings.update(
        max_new_tokens=max_new_tokens, max_length=None, do_sample=False, temperature=None, top_p=None, top_k=None,
        pad_token_id=tokenizer.pad_token_id, use_cache=True,
    )  # fmt: skip
    given = {"num_beams": config.num_beams, "length_penalty": config.length_penalty}
    given |= {"no_repeat_ngram_size": config.no_repeat_ngram_size}
    settings.update(**{name: value for name, value in given.items() if value is not None})
    if config.do_sample:
        settings.update(num_beams=1)
    if settings.decoder_start_token_id is None:
        settings.decoder_start_token_id = model.config.decoder_start_token_id
    if settings.eos_token_id is None:
        settings.eos_token_id = tokenizer.eos_token_id
    return settings


def _draws(config: GeneratedTextConfig, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[Any]:
    """Logits processors under which the highest logit is a draw at the temperature, from the most probable tokens.

    The Gumbel-max trick, as for samples of causal models: argmax(logits / T - log E), E from the exponential distribution,
    with a generator for each row that is a function of its tokens and the seed alone.
    """
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

    rows = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids.cpu(), attention_mask.cpu(), strict=True)]
    generators = [torch.Generator().manual_seed(_seed_of(row, config.seed)) for row in rows]

    def add_noise(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.stack([torch.empty(scores.shape[-1]).exponential_(generator=each) for each in generators])
        # a draw of exactly 0 would win whatever its logit
        return scores.float() - noise.clamp_min(torch.finfo(noise.dtype).tiny).log().to(scores.device)

    warpers: list[Any] = [TemperatureLogitsWarper(config.temperature)] if config.temperature != 1 else []
    warpers += [TopPLogitsWarper(config.top_p)] if config.top_p < 1 else []
    return LogitsProcessorList([*warpers, add_noise])


def _seed_of(row: list[int], seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {row}".encode(), digest_size=8).digest(), "big") >> 1
