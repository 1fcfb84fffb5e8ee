"""Answers to all held-out prompts, and metrics of them next to the answers of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from toolkit.config import Refusal
from toolkit.generation.continued_texts import continue_texts
from toolkit.generation.samples import Prompt, prompt_of
from toolkit.metrics.text import TextMetric, compare_texts

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase


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

    count = len(range(accelerator.process_index, len(prompts), accelerator.num_processes))
    is_silent = None if accelerator.is_main_process else True
    with tqdm(total=count, desc="Answering", unit=" prompts", disable=is_silent, leave=False) as bar:
        return continue_texts(
            accelerator, model, tokenizer, prompts, max_new_tokens=max_new_tokens, on_text=lambda *_: bar.update()
        )
