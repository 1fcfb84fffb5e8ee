"""Answers to all held-out prompts, generated in batches over the ranks, and metrics of them next to the answers of the data.

Which prompts share a batch is fixed: prompts of like length in blocks of 16, whatever the batch size and the number of ranks.
In another batch the rounding of a sum may put another token on top. So the texts, and their metrics, are those of one
process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from toolkit.config import Refusal
from toolkit.data.tokenize.documents import build_encoder
from toolkit.distributed.engines import engine_of, unwrapped
from toolkit.generation.samples import Prompt, as_for_inference, pad_left, prompt_of, stop_ids
from toolkit.metrics.text import TextMetric, compare_texts

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

BLOCK = 16  # prompts that are answered together; a setting would change answers by rounding


def held_out_prompts(rows: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The prompt of each row and its `reference`, the answer of the data.

    Raises:
        Refusal: a row without a prompt that has an answer.
    """
    prompts = []
    for number, row in enumerate(rows):
        asked = prompt_of({key: value for key, value in row.items() if key not in ("text", "input_ids")}, tokenizer)
        if asked is None or "reference" not in asked:
            raise Refusal(
                f"{row.get('origin') or f'row {number}'}: holds no prompt with an answer to compare with, which metrics of "
                "texts need. Take rows of prompt and completion, or messages; or leave these --metrics out."
            )
        prompts.append(asked)
    return prompts


def answer_metrics(
    accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt],
    metrics: Mapping[str, TextMetric], max_new_tokens: int, prefix: str = "eval_",
) -> dict[str, float]:  # fmt: skip
    """Metrics of the answers to `prompts` by greedy decoding, on every rank; nothing without metrics.

    White space around a text counts nowhere.

    Args:
        prompts: of `held_out_prompts`.
        metrics: of `choose_text_metrics`.
        max_new_tokens: the longest answer, in tokens.
    """
    if not metrics or not prompts:
        return {}
    answers = answer_all(accelerator, model, tokenizer, [prompt["prompt"] for prompt in prompts], max_new_tokens)
    found = compare_texts(dict(metrics), answers, [prompt["reference"] for prompt in prompts])
    return {f"{prefix}{name}": value for name, value in found.items()}


def answer_all(
    accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_new_tokens: int
) -> list[str]:
    """The answer to each prompt by greedy decoding, the same list on every rank.

    A prompt that leaves no room for an answer within the model's positions keeps its end. The model comes back in the mode it
    was in.
    """
    from tqdm.auto import tqdm
    from transformers import GenerationConfig

    inner, encoder = unwrapped(model), build_encoder(tokenizer)
    longest = getattr(inner.config.get_text_config(), "max_position_embeddings", None) or 1 << 20
    max_new_tokens = min(max_new_tokens, longest - 1)
    ids = [encoder.add_start(encoding.ids)[-(longest - max_new_tokens) :] for encoding in encoder.encode(list(prompts))]
    ids = [row or [tokenizer.eos_token_id or 0] for row in ids]
    stops = stop_ids(inner, tokenizer)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops or [0])[0]
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, use_cache=True, eos_token_id=stops or None, pad_token_id=padding
    )
    order = np.argsort([-len(row) for row in ids], kind="stable")
    blocks = [order[start : start + BLOCK] for start in range(0, len(order), BLOCK)]
    rank, ranks = accelerator.process_index, accelerator.num_processes
    dealt = [*blocks, *[blocks[0]] * (-len(blocks) % ranks)]  # ranks of one sharded model answer equally often
    mine = dealt[rank::ranks]
    answers = torch.full((len(mine) * BLOCK, max_new_tokens), padding, device=accelerator.device)
    places = torch.full((len(mine) * BLOCK,), -1, device=accelerator.device)
    with as_for_inference(inner), accelerator.autocast():
        is_silent = None if accelerator.is_main_process else True
        shown = tqdm(mine, desc="Answering", unit=" batches", disable=is_silent, leave=False)
        for number, block in enumerate(shown):
            input_ids, attention_mask = pad_left([ids[i] for i in block], padding, accelerator.device)
            output = inner.generate(
                input_ids=input_ids, attention_mask=attention_mask, generation_config=settings,
                synced_gpus=engine_of(accelerator).shards,  # a rank that ended earlier would leave the others waiting
            )[:, input_ids.shape[1] :]
            rows = slice(number * BLOCK, number * BLOCK + len(block))
            answers[rows, : output.shape[1]] = output
            places[rows] = torch.tensor(block, device=accelerator.device)
    everyone, where = accelerator.gather(answers).cpu(), accelerator.gather(places).cpu().tolist()
    found = {place: row for place, row in zip(where, everyone, strict=True) if place >= 0}
    return list(tokenizer.batch_decode([found[i] for i in range(len(ids))], skip_special_tokens=True))
