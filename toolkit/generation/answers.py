"""Answers of a trained model, piece by piece as they are made; prompts as the model was taught to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from toolkit.config import Refusal
from toolkit.data.sources.readers import read_json_line
from toolkit.data.tokenize.documents import build_encoder
from toolkit.data.tokenize.masks import Message, read_chat_template
from toolkit.generation.continued_texts import stop_ids
from toolkit.generation.distribution import SamplingSettings
from toolkit.generation.filled_texts import fill_text
from toolkit.generation.random_numbers import completion_key
from toolkit.generation.sampler import Completion, sample_groups
from toolkit.generation.samples import prompt_of
from toolkit.models.diffusion import diffusion_of
from toolkit.models.shapes import positions_of
from toolkit.system.console import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

USUAL_TOKENS = 512  # of an answer
TOGETHER = 32  # prompts that are decoded together
_CUT_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # how a character decodes whose last bytes are yet to come
# Of a generation_config, with the values at which each has no effect.
_BEYOND_SAMPLER: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "no_repeat_ngram_size": (0,), "bad_words_ids": (), "min_length": (0,), "typical_p": (1.0,), "top_h": (),
    "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "suppress_tokens": (), "begin_suppress_tokens": (), "sequence_bias": (),
    "forced_bos_token_id": (), "forced_eos_token_id": (), "guidance_scale": (1.0,), "exponential_decay_length_penalty": (),
    "penalty_alpha": (0.0,),
}  # fmt: skip


class Prompt(NamedTuple):
    """A prompt as it was written, and as the model reads it."""

    written: str
    text: str


class Sampling(NamedTuple):
    """How the next token is chosen. None: as in the model's generation_config; temperature 0: greedy decoding."""

    max_new_tokens: int | None = None  # None: 512, or the length that a masked-diffusion model was trained for
    temperature: float | None = None
    top_p: float | None = None
    steps: int | None = None  # of a masked-diffusion model: forward passes; None: one a token
    block_length: int = 32  # likewise: tokens that are finished before the next are begun
    seed: int = 0  # of what is drawn


def chat_prompt(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """Messages as the model reads them, up to where its answer begins.

    Raises:
        Refusal: the tokenizer has no chat template, or it refuses the messages.
    """
    if not tokenizer.chat_template:
        raise Refusal("The tokenizer has no chat template. Give one (--chat-template FILE), or continue plain text: --raw")
    return read_chat_template(tokenizer).render(messages, {}, add_generation_prompt=True)


def read_prompts(
    lines: Iterable[str], name: str, tokenizer: PreTrainedTokenizerBase, raw: bool, system: str | None = None,
    gap: str | None = None,
) -> list[Prompt]:  # fmt: skip
    """A prompt for each line that isn't blank: of a .jsonl file the prompt of its row, else the line itself; `text_prompt`.

    Raises:
        Refusal: a line that can't be read or holds no prompt, or no line at all.
    """
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and Path(name).suffix in (".jsonl", ".ndjson"):
            row = read_json_line(line, f"{name}:{number}")
            if isinstance(row.get("prompt"), str):
                prompts.append(text_prompt(row["prompt"], tokenizer, raw, system, gap))
                continue
            asked = {key: value for key, value in row.items() if key != "text"} | {"origin": f"{name}:{number}"}
            found = prompt_of(asked, tokenizer)
            if found is None:
                raise Refusal(f"{name}:{number}: no prompt or messages, only {', '.join(row) or 'nothing'}.")
            if system:
                own = "Put a system message into the row."
                raise Refusal(f"{name}:{number}: is a chat, into which --system is not written. {own}")
            prompts.append(Prompt(found["prompt"], found["prompt"]))
        elif line.strip():
            prompts.append(text_prompt(line.rstrip("\r\n"), tokenizer, raw, system, gap))
    if not prompts:
        raise Refusal(f"{name}: holds no prompt.")
    return prompts


def text_prompt(
    text: str, tokenizer: PreTrainedTokenizerBase, raw: bool, system: str | None = None, gap: str | None = None
) -> Prompt:
    """A text as a user's turn, where the model has a chat template and `raw` is not requested; else unchanged.

    `gap`: what marks a gap that a masked-diffusion model fills in: a text that holds it is no turn.
    """
    has_gap = gap is not None and gap in text
    if has_gap and system:
        raise Refusal(f"{quoted(text[:60])}: holds {gap} and is filled in as it is, without --system. Remove one of them.")
    if raw or has_gap or not tokenizer.chat_template:
        return Prompt(text, text)
    messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]
    return Prompt(text, chat_prompt(messages, tokenizer))


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, sampling: Sampling, show: Callable[[str], None]
) -> str:
    """The answer to one prompt, which `show` gets piece by piece: `answer_prompts`."""
    return answer_prompts(model, tokenizer, [prompt], sampling, lambda _, piece: show(piece))[0]


def answer_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], sampling: Sampling,
    show: Callable[[int, str], None], on_end: Callable[[int, str], None] = lambda *_: None,
) -> list[str]:  # fmt: skip
    """What the model writes behind each prompt up to the end of its turn, of an encoder-decoder the target of each source.

    `show(number, piece)` gets each text piece by piece, as no later token changes it, and `on_end(number, text)` the whole.
    Prompts are decoded `TOGETHER` at a time; a text depends on its prompt, its number and the seed. Encoder-decoders, and
    models whose generation_config has what the sampler has not (`_BEYOND_SAMPLER`), are left to transformers' `generate`, one
    prompt after another; masked-diffusion models to `fill_text`, in one piece.

    Raises:
        Refusal: a prompt leaves no room within the model's positions, or is not UTF-8.
    """
    for prompt in prompts:
        if not prompt.isascii() and any("\ud800" <= sign <= "\udfff" for sign in prompt):
            raise Refusal(f"The prompt {quoted(prompt[:60])} is not UTF-8: it holds bytes that are no character.")
    if diffusion_of(model) is not None:
        return [_filled(model, tokenizer, prompt, sampling, number, show, on_end) for number, prompt in enumerate(prompts)]
    ids = [_ids(model, tokenizer, prompt) for prompt in prompts]
    texts = [StreamedText(tokenizer, partial(show, number)) for number in range(len(prompts))]
    if model.config.is_encoder_decoder or _wants_more(model.generation_config):
        for number, each in enumerate(ids):
            on_end(number, _generated(model, tokenizer, each, sampling, texts[number]))
        return [text.whole() for text in texts]
    room = (positions_of(model.config) or 1 << 30) - np.array([*map(len, ids)])
    limits = np.minimum(sampling.max_new_tokens or USUAL_TOKENS, room)
    settings = sampling_settings(model, tokenizer, sampling, int(limits.max()))
    for start in range(0, len(ids), TOGETHER):
        block = range(start, min(start + TOGETHER, len(ids)))
        keys = np.array([[completion_key(sampling.seed, 0, number, 0)] for number in block], dtype=np.uint64)

        def add(place: int, token: int, start: int = start) -> None:
            texts[start + place].add(token)

        def end(place: int, group: list[Completion], start: int = start) -> None:
            on_end(start + place, texts[start + place].end())

        with torch.inference_mode():
            sample_groups(
                model, [ids[number] for number in block], keys, settings, tokenizer, limits=limits[block].tolist(),
                on_token=add, on_group=end,
            )  # fmt: skip
    return [text.whole() for text in texts]


class StreamedText:
    """A text whose tokens come one by one; `show` gets what no later token changes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str], None]) -> None:
        self._tokenizer, self._show = tokenizer, show
        self._ids, self._shown = list[int](), 0

    def add(self, *tokens: int) -> None:
        self._ids += tokens
        whole = self.whole()
        if not whole.endswith(_CUT_CHARACTER):
            self._show(whole[self._shown :])
            self._shown = len(whole)

    def end(self) -> str:
        """Show what is left; returns the whole."""
        whole = self.whole()
        self._show(whole[self._shown :])
        self._shown = len(whole)
        return whole

    def whole(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))


def _ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    is_source = model.config.is_encoder_decoder
    if is_source:  # with all that the tokenizer puts around a source
        ids = list(tokenizer(prompt, verbose=False)["input_ids"])
    else:
        encoder = build_encoder(tokenizer)
        (encoding,) = encoder.encode([prompt])
        ids = encoder.add_start(encoding.ids) or [tokenizer.eos_token_id or 0]
    longest = positions_of(model.config) or 1 << 30
    if len(ids) >= longest + is_source:
        raise Refusal(
            f"The prompt has {len(ids):,} tokens, and the model {longest:,} positions: shorten it, or /reset the chat."
        )
    return ids


def sampling_settings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, max_new_tokens: int
) -> SamplingSettings:
    """The flags, and where they are not given the model's generation_config."""
    own: Any = model.generation_config
    given = sampling.temperature is not None or sampling.top_p is not None
    draws = sampling.temperature != 0 if given else bool(own.do_sample)
    temperature = (sampling.temperature if given else own.temperature) or 1.0
    return SamplingSettings(
        max_new_tokens=max_new_tokens, temperature=temperature if draws else 0.0, top_k=own.top_k or 0,
        top_p=sampling.top_p or own.top_p or 1.0, min_p=own.min_p or 0.0, repetition_penalty=own.repetition_penalty or 1.0,
        min_new_tokens=min(own.min_new_tokens or 0, max_new_tokens), eos_token_ids=tuple(stop_ids(model, tokenizer)),
        stop_strings=(own.stop_strings,) if isinstance(own.stop_strings, str) else tuple(own.stop_strings or ()),
    )  # fmt: skip


def _wants_more(own: Any) -> bool:
    return any(getattr(own, name, None) not in (None, *neutral) for name, neutral in _BEYOND_SAMPLER.items())


def _filled(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, sampling: Sampling, number: int,
    show: Callable[[int, str], None], on_end: Callable[[int, str], None],
) -> str:  # fmt: skip
    diffusion = diffusion_of(model)
    assert diffusion is not None
    text = fill_text(
        model, tokenizer, prompt, max_new_tokens=sampling.max_new_tokens or diffusion.answer_length, steps=sampling.steps,
        block_length=sampling.block_length, temperature=sampling.temperature or 0.0, seed=sampling.seed,
    )  # fmt: skip
    show(number, text)
    on_end(number, text)
    return text


def _generated(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int], sampling: Sampling, text: StreamedText
) -> str:
    """The answer by transformers' `generate`."""
    from transformers import GenerationConfig

    is_source = model.config.is_encoder_decoder
    longest = positions_of(model.config) or 1 << 30
    settings = GenerationConfig.from_dict(model.generation_config.to_dict())
    stops = stop_ids(model, tokenizer)
    settings.update(
        max_new_tokens=min(sampling.max_new_tokens or USUAL_TOKENS, longest - (1 if is_source else len(ids))), max_length=None,
        eos_token_id=stops or None,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops or [0])[0],
    )  # fmt: skip
    if sampling.temperature is not None or sampling.top_p is not None:
        settings.update(
            do_sample=sampling.temperature != 0, temperature=sampling.temperature or 1.0, top_p=sampling.top_p or settings.top_p
        )
    if not settings.do_sample:
        settings.update(temperature=None, top_p=None, top_k=None)
    input_ids = torch.tensor([ids], device=model.device)
    generate: Any = model.generate  # GenerationMixin's, which the type of a model lacks
    streamer = None
    if (settings.num_beams or 1) == 1:  # of several beams the best is known at the end: there are no pieces to show
        before = [1 if is_source else len(ids)]  # tokens that come first: a decoder's start, or the prompt

        def put(tokens: torch.Tensor) -> None:
            if before[0] > 0:
                before[0] -= tokens.numel()
            else:
                text.add(*tokens.flatten().tolist())

        streamer = SimpleNamespace(put=put, end=lambda: None)
    own = [] if model.device.type == "cpu" else [model.device]  # generate draws from the process's generators
    with torch.inference_mode(), torch.random.fork_rng(own, device_type=model.device.type):
        torch.manual_seed(sampling.seed)
        output = generate(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), generation_config=settings, streamer=streamer
        )
    if streamer is None:
        text.add(*output[0, 0 if is_source else len(ids) :].tolist())
    return text.end()
