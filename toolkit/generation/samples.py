"""Text samples while a model trains: held-out prompts, what the model makes of them, and what the data says."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.config import SampleConfig
from toolkit.data.tokenize.columns import alpaca_messages, alpaca_prompt, read_messages, read_options
from toolkit.data.tokenize.documents import build_encoder
from toolkit.data.tokenize.masks import read_chat_template, turn_end_ids
from toolkit.distributed.engines import engine_of, unwrapped
from toolkit.models.adapter_files import without_adapter
from toolkit.models.layers import uncompiled

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
    name = next((name for name in ("validation", "test", "train") if name in splits), None)
    if name is None or config.num_samples == 0:
        return []
    prompts = (prompt_of(row, tokenizer) for row in spread_rows(splits[name], config.num_samples))
    return [_with_short_reference(prompt, tokenizer, config) for prompt in prompts if prompt]


def sample_texts(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    config: SampleConfig,
) -> list[dict[str, str]]:
    """Continue each prompt; returns {"prompt", "text", perhaps "reference"} for each, cut for display.

    The same weights and the same seed give the same texts, whatever was drawn before; the global random state stays as it
    was, and so does the model's mode. Each prompt draws from a generator of its own, so its draws do not depend on its
    neighbors. Temperature 0 is greedy decoding. Every rank makes the same texts, since each forward of a sharded
    model needs all of them.
    """
    if not prompts:
        return []
    from transformers import GenerationConfig

    inner = unwrapped(model)
    encoder = build_encoder(tokenizer)
    starts = [encoder.add_start(encoding.ids) for encoding in encoder.encode([prompt["prompt"] for prompt in prompts])]
    new_tokens, room = _lengths(inner, config)
    # A prompt without any token (an empty text and no BOS) has nothing to continue: it starts like any text after an end.
    ids = [start[-room:] or [tokenizer.eos_token_id or 0] for start in starts]
    stops = stop_ids(inner, tokenizer)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops or [0])[0]
    settings = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, use_cache=True, eos_token_id=stops or None, pad_token_id=padding
    )
    draw = [_draw_with(config.sample_temperature, config.seed, len(ids))] if config.sample_temperature else []
    input_ids, attention_mask = pad_left(ids, padding, accelerator.device)
    with as_for_inference(inner), accelerator.autocast():
        output = inner.generate(
            input_ids=input_ids, attention_mask=attention_mask, generation_config=settings, logits_processor=draw,
            synced_gpus=engine_of(accelerator).shards,  # a rank that ended earlier would leave the others waiting
        )
    texts = tokenizer.batch_decode(output[:, input_ids.shape[1] :], skip_special_tokens=True)
    return [
        {**prompt, "prompt": trim_for_display(prompt["prompt"], keep="end"), "text": trim_for_display(text)}
        for prompt, text in zip(prompts, texts, strict=True)
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
    """What an assistant's message says, and the calls of tools that it makes."""
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


def _lengths(model: PreTrainedModel, config: SampleConfig) -> tuple[int, int]:
    """Tokens to make, and tokens of a prompt that leave room for them; a long prompt keeps its end."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20
    new_tokens = min(config.sample_max_new_tokens, context - 1)
    return new_tokens, context - new_tokens


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a text: the template's ends of a turn, the tokenizer's end of text, and the model's own."""
    own = model.generation_config.eos_token_id
    own = own if isinstance(own, list) else [own]
    return list(dict.fromkeys([*turn_end_ids(tokenizer), *(token for token in own if token is not None)]))


def _draw_with(temperature: float, seed: int, count: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A logits processor under which the token of the highest logit is a draw from softmax(logits / temperature).

    The Gumbel-max trick: argmax(logits / T − log E), E from the exponential distribution. The noise is made on the CPU,
    one generator for each row, so no state outside is touched and every device draws the same.
    """
    generators = [torch.Generator().manual_seed(seed * 1_000_003 + row) for row in range(count)]

    def add_noise(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.stack([torch.empty(scores.shape[-1]).exponential_(generator=each) for each in generators])
        # a draw of exactly 0 would win whatever its logit
        return scores.float() / temperature - noise.clamp_min(torch.finfo(noise.dtype).tiny).log().to(scores.device)

    return add_noise


def pad_left(ids: list[list[int]], padding: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, ids))
    rows = [[padding] * (longest - len(row)) + row for row in ids]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in ids]
    return torch.tensor(rows, device=device), torch.tensor(mask, device=device)


@contextlib.contextmanager
def as_for_inference(model: Any) -> Iterator[None]:
    """In evaluation mode, uncompiled and without the model's own decoding settings; everything restored afterwards."""
    from transformers import GenerationConfig

    modes = [(module, module.training) for module in model.modules()]
    # An adapter's base has them: peft's generate (0.21.2) puts what its own model has there, and leaves it there.
    owner: Any = without_adapter(model)
    own_settings = owner.generation_config
    owner.generation_config = GenerationConfig()  # what a call leaves open is filled from here: penalties, top-p ...
    model.eval()
    try:
        with uncompiled(model):  # each length of a growing cache would be compiled again
            yield
    finally:
        owner.generation_config = own_settings
        for module, mode in modes:
            module.training = mode
