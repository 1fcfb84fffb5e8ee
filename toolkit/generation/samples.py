"""Text samples while a model trains: held-out prompts, what the model makes of them, and the answer in the data."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from toolkit.config import DiffusionConfig, SampleConfig
from toolkit.data.loading.columns import check_splits
from toolkit.data.tokenize.columns import alpaca_messages, alpaca_prompt, read_messages, read_options
from toolkit.data.tokenize.masks import read_chat_template
from toolkit.generation.continued_texts import continue_texts
from toolkit.generation.filled_texts import fill_texts

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

Prompt = dict[str, str]  # "prompt" as the model reads it, perhaps "reference": what follows in the data

PROMPT_CHARACTERS = 200  # of a plain text's beginning
SHOWN_CHARACTERS = 600


def sample_prompts(
    splits: Mapping[str, Dataset | IterableDataset], tokenizer: PreTrainedTokenizerBase, config: SampleConfig
) -> list[Prompt]:
    """A few held-out prompts with their references, from the splits as `load_splits` returns them.

    They are spread evenly over the validation split (else test, else train), so they are the same at every evaluation and
    in every run on the same data. A prompt is a row's `prompt`, its messages up to the last assistant turn, or the beginning
    of its text. Rows that hold none of these give none.
    """
    check_splits(splits)
    name = next((name for name in ("validation", "test", "train") if name in splits), None)
    if name is None or config.num_samples == 0:
        return []
    prompts = (prompt_of(row, tokenizer) for row in spread_rows(splits[name], config.num_samples))
    return [_with_short_reference(prompt, tokenizer, config) for prompt in prompts if prompt]


def sample_texts(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt | str],
    config: SampleConfig,
) -> list[dict[str, str]]:
    """Continue each prompt; returns {"prompt", "text", perhaps "reference"} for each, cut for display. A collective.

    A prompt is text as the model reads it, or one of `sample_prompts`.

    The same weights and the same seed give the same texts, whatever was drawn before; the global random state stays as it
    was, and so does the model's mode. What a prompt draws does not depend on its neighbors. Temperature 0 is greedy decoding.
    With settings of DiffusionConfig the texts are those of a masked-diffusion model.
    """
    asked = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
    write: Callable[..., list[str]] = continue_texts
    if isinstance(config, DiffusionConfig):
        write = partial(fill_texts, steps=config.denoising_steps, block_length=config.block_length)
    texts = write(
        accelerator, model, tokenizer, [prompt["prompt"] for prompt in asked], max_new_tokens=config.sample_max_new_tokens,
        temperature=config.sample_temperature, seed=config.seed,
    )  # fmt: skip
    return [
        {**prompt, "prompt": trim_for_display(prompt["prompt"], keep="end"), "text": trim_for_display(text)}
        for prompt, text in zip(asked, texts, strict=True)
    ]


def trim_for_display(text: str, most: int = SHOWN_CHARACTERS, keep: str = "start") -> str:
    """At most `most` characters: the start of a text, or the end (of a prompt, where its question is)."""
    if len(text) <= most:
        return text
    return text[: most - 1] + "…" if keep == "start" else "…" + text[-(most - 1) :]


def spread_rows(split: Dataset | IterableDataset, count: int) -> Iterator[dict[str, Any]]:
    """Rows at the middles of `count` equal parts of a dataset; of a stream, the first ones."""
    if not hasattr(split, "__len__"):
        return itertools.islice(iter(split), count)
    count = min(count, len(split))
    return (split[(2 * part + 1) * len(split) // (2 * count)] for part in range(count))


def prompt_of(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Prompt | None:
    """A row's prompt, and what follows in the data; None where it holds neither prompt, messages nor text."""
    messages = row.get("messages") or row.get("conversations") or []
    if isinstance(row.get("prompt"), list):
        answer = row.get("completion") or row.get("chosen")
        messages = [*row["prompt"], *(answer if isinstance(answer, list) else [])]
    elif isinstance(row.get("chosen"), list):  # chats that begin with their prompt, or answers behind a prompt of text
        begins = row["chosen"] and row["chosen"][0]["role"] != "assistant"
        messages = [*([] if begins else [{"role": "user", "content": row.get("prompt") or ""}]), *row["chosen"]]
    if not messages and {"instruction", "output"} <= set(row) and "text" not in row:
        if not tokenizer.chat_template:
            return {"prompt": alpaca_prompt(row), "reference": row["output"]}
        prompt_part, answer_part = alpaca_messages(row, row.get("origin") or "a prompt")
        messages = prompt_part + answer_part
    if messages:
        if not tokenizer.chat_template:
            return None
        messages = read_messages(messages, "messages", row.get("origin") or "a prompt", needs_assistant=False)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        before = messages[: turns[-1]] if turns else messages
        options = read_options(row, row.get("origin") or "a prompt")
        prompt = read_chat_template(tokenizer).render(before, options, add_generation_prompt=True)
        return {"prompt": prompt} | ({"reference": _words_of(messages[turns[-1]])} if turns else {})
    if isinstance(row.get("prompt"), str):
        answer = row.get("completion") or row.get("chosen")
        return {"prompt": row["prompt"]} | ({"reference": answer} if isinstance(answer, str) else {})
    text = row.get("text")
    if text is None and "input_ids" in row:
        text = tokenizer.decode(row["input_ids"], skip_special_tokens=True)
    return _beginning_of(text) if isinstance(text, str) and text.strip() else None


def _words_of(message: dict[str, Any]) -> str:
    """The content of an assistant's message, and the calls of tools that it makes."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in message.get("tool_calls", ())]
    return "\n".join([*([text] if text else []), *calls])


def _beginning_of(text: str) -> Prompt:
    """The text cut before a line's or a word's end, at half at most: a prompt that ends in a space reads unlike the data."""
    limit = min(PROMPT_CHARACTERS, (len(text) + 1) // 2)
    head = text[:limit]
    cut = max(head.rfind("\n"), head.rfind(" "))
    cut = len(head[:cut].rstrip()) if cut > 0 else 0
    return {"prompt": text[: cut or limit], "reference": text[cut or limit :]}


def _with_short_reference(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, config: SampleConfig) -> Prompt:
    """The reference no longer than a sample may be."""
    if "reference" not in prompt:
        return prompt
    ids = tokenizer(prompt["reference"][: 20 * config.sample_max_new_tokens], add_special_tokens=False)["input_ids"]
    words = str(tokenizer.decode(ids[: config.sample_max_new_tokens]))
    return {**prompt, "reference": trim_for_display(words.rstrip("\N{REPLACEMENT CHARACTER}"))}
