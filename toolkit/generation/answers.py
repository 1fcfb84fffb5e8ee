"""Answers of a trained model, piece by piece as they are made; prompts as the model was taught to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from toolkit.config import Refusal
from toolkit.data.sources.readers import read_json_line
from toolkit.data.tokenize.documents import build_encoder
from toolkit.generation.continued_texts import stop_ids
from toolkit.generation.filled_texts import fill_text
from toolkit.generation.samples import prompt_of
from toolkit.models.diffusion import diffusion_of
from toolkit.system.console import quoted
from toolkit.system.interruptions import TEMPLATE_SECONDS, time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Message = dict[str, str]
_CUT_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # how a character decodes whose last bytes are yet to come


class Prompt(NamedTuple):
    """A prompt as it was written, and as the model reads it."""

    written: str
    text: str


class Sampling(NamedTuple):
    """How the next token is chosen. None: as the model's generation_config says; temperature 0: greedy decoding."""

    max_new_tokens: int | None = None  # None: 512, or the length that a masked-diffusion model was trained for
    temperature: float | None = None
    top_p: float | None = None
    steps: int | None = None  # of a masked-diffusion model: forward passes; None: one a token
    block_length: int = 32  # likewise: tokens that are finished before the next are begun
    seed: int = 0  # likewise: of what is drawn; other models draw from torch's own generator


def chat_prompt(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """Messages as the model reads them, up to where its answer begins.

    Raises:
        Refusal: the tokenizer has no chat template, or it refuses the messages.
    """
    if not tokenizer.chat_template:
        raise Refusal("The tokenizer has no chat template. Give one (--chat-template FILE), or continue plain text: --raw")
    try:
        with time_limit(TEMPLATE_SECONDS):
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # whatever a template's Jinja can do wrong; the cause stays attached
        raise Refusal(f"The chat template refuses these messages: {error}") from error


def read_prompts(
    lines: Iterable[str], name: str, tokenizer: PreTrainedTokenizerBase, raw: bool, system: str | None = None
) -> list[Prompt]:
    """A prompt for each line that isn't blank: of a .jsonl file what its row asks, else the line itself.

    Raises:
        Refusal: a line that can't be read or holds no prompt, or no line at all.
    """
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and Path(name).suffix in (".jsonl", ".ndjson"):
            row = read_json_line(line, f"{name}:{number}")
            if isinstance(row.get("prompt"), str):
                prompts.append(text_prompt(row["prompt"], tokenizer, raw, system))
                continue
            asked = {key: value for key, value in row.items() if key != "text"} | {"origin": f"{name}:{number}"}
            found = prompt_of(asked, tokenizer)
            if found is None:
                raise Refusal(f"{name}:{number}: no prompt or messages, only {', '.join(row) or 'nothing'}.")
            prompts.append(Prompt(found["prompt"], found["prompt"]))
        elif line.strip():
            prompts.append(text_prompt(line.rstrip("\r\n"), tokenizer, raw, system))
    if not prompts:
        raise Refusal(f"{name}: holds no prompt.")
    return prompts


def text_prompt(text: str, tokenizer: PreTrainedTokenizerBase, raw: bool, system: str | None = None) -> Prompt:
    """A text as a user's turn, where the model has a chat template and `raw` is not asked for; else as it is."""
    if raw or not tokenizer.chat_template:
        return Prompt(text, text)
    messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]
    return Prompt(text, chat_prompt(messages, tokenizer))


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, sampling: Sampling, show: Callable[[str], None]
) -> str:
    """Continue a prompt until the model ends its turn, or write the target of an encoder-decoder for it; `show`
    gets the text piece by piece, and the whole is returned. Of a masked-diffusion model as `fill_text`, in one piece.

    Raises:
        Refusal: the prompt leaves no room within the model's positions.
    """
    from transformers import GenerationConfig

    if not prompt.isascii() and any("\ud800" <= sign <= "\udfff" for sign in prompt):
        raise Refusal(f"The prompt {quoted(prompt[:60])} is not UTF-8: it holds bytes that are no character.")
    diffusion = diffusion_of(model)
    if diffusion is not None:
        whole = fill_text(
            model, tokenizer, prompt, max_new_tokens=sampling.max_new_tokens or diffusion.answer_length, steps=sampling.steps,
            block_length=sampling.block_length, temperature=sampling.temperature or 0.0, seed=sampling.seed,
        )  # fmt: skip
        show(whole)
        return whole
    is_source = model.config.is_encoder_decoder
    if is_source:  # with all that the tokenizer puts around a source
        ids = list(tokenizer(prompt, verbose=False)["input_ids"])
    else:
        encoder = build_encoder(tokenizer)
        (encoding,) = encoder.encode([prompt])
        ids = encoder.add_start(encoding.ids) or [tokenizer.eos_token_id or 0]
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    if len(ids) >= longest + is_source:
        raise Refusal(
            f"The prompt has {len(ids):,} tokens, and the model {longest:,} positions: shorten it, or /reset the chat."
        )
    settings = GenerationConfig.from_dict(model.generation_config.to_dict())
    stops = stop_ids(model, tokenizer)
    settings.update(
        max_new_tokens=min(sampling.max_new_tokens or 512, longest - (1 if is_source else len(ids))), max_length=None,
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
    generate: Any = model.generate  # GenerationMixin's, which the type of a model does not tell
    if is_source and (settings.num_beams or 1) > 1:  # the best text is known at the end: there are no pieces to show
        with torch.inference_mode():
            output = generate(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), generation_config=settings)
        whole = str(tokenizer.decode(output[0], skip_special_tokens=True))
        show(whole)
        return whole
    streamer, text = _streamer(tokenizer, 1 if is_source else len(ids), show)  # of a decoder the token that it begins with
    with torch.inference_mode():
        generate(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), generation_config=settings, streamer=streamer)
    return text()


def _streamer(
    tokenizer: PreTrainedTokenizerBase, prompt_tokens: int, show: Callable[[str], None]
) -> tuple[Any, Callable[[], str]]:
    """What `generate` hands its tokens to, and the text so far. Shown is what no later token changes."""
    ids, shown, seen = list[int](), [0], [0]

    def text() -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    def put(tokens: torch.Tensor) -> None:
        if seen[0] < prompt_tokens:  # the prompt comes first
            seen[0] += tokens.numel()
            return
        ids.extend(tokens.flatten().tolist())
        whole = text()
        if not whole.endswith(_CUT_CHARACTER):
            show(whole[shown[0] :])
            shown[0] = len(whole)

    def end() -> None:
        show(text()[shown[0] :])
        shown[0] = len(text())

    return SimpleNamespace(put=put, end=end), text
