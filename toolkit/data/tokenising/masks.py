"""Which tokens of a chat or of a prompt with its completion are supervised.

A mask is found on the text and then carried over to the tokens: a token is supervised when it holds any character of a
supervised span. So the whole is tokenised once, as one text, and a token that merges text across a border of a span
counts as part of the span, as in TRL. The spans of a chat are what the assistant wrote and the end of its turn: from the
template's generation marks where it has them, else from rendering the chat up to there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.config import Refusal

if TYPE_CHECKING:
    from tokenizers import Encoding

Message = dict[str, Any]
Span = tuple[int, int]  # characters, the end not included

_PROBES = ("zqfirstquestionqz", "qxfirstanswerxq", "zqsecondquestionqz", "xqsecondanswerqx")  # words no template holds


@dataclass(frozen=True)
class ChatText:
    """A chat as one text, and the spans of it that are supervised."""

    text: str
    spans: list[Span]
    rewritten: bool = False  # an earlier assistant turn stands there otherwise than when it was generated


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template and what masks need to know of it."""

    tokenizer: Any
    marked: bool  # has {% generation %} marks
    closing: str  # what it writes after an assistant turn, whether or not the chat goes on
    turn_ends: tuple[str, ...]  # special tokens that end a turn; empty when it has none

    def render(self, messages: list[Message], options: dict[str, Any], add_generation_prompt: bool = False) -> str:
        """The chat as text. `options` are `tools` and the template's own variables."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        except Exception as error:  # a template can raise anything; what it says is what the user must know
            raise Refusal(f"the chat template can't render this chat: {type(error).__name__}: {error}") from error


def read_chat_template(tokenizer: Any) -> ChatTemplate:
    """Learn from a chat of four made-up messages how the template closes a turn."""
    if not tokenizer.chat_template:
        raise Refusal(
            "The data are chat messages, and the tokenizer has no chat template. Give one with --chat-template FILE, or take "
            "the tokenizer of the model's instruction-tuned sibling with --tokenizer"
        )
    marked = re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()) is not None
    bare = ChatTemplate(tokenizer, marked, "", ())
    roles = ("user", "assistant", "user", "assistant")
    text = bare.render([{"role": role, "content": probe} for role, probe in zip(roles, _PROBES, strict=True)], {})
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special] or ["\0"]
    # what follows each message, cut at special tokens, which stand at the odd places
    pieces = re.compile("(" + "|".join(sorted(map(re.escape, special), key=len, reverse=True)) + ")")
    after = [pieces.split(text.partition(probe)[2]) for probe in _PROBES]
    closing = after[3][: next((i for i, (a, b) in enumerate(zip(after[1], after[3], strict=False)) if a != b), len(after[3]))]
    turn_ends = after[3][1:2]
    # gpt-oss ends the last turn and the earlier ones with different tokens; the latter ends the user's turns as well
    directly = {parts[1] if len(parts) > 1 and not parts[0].strip() else "" for parts in after[:3]}
    turn_ends += directly if turn_ends and len(directly) == 1 and directly != {""} else []
    return ChatTemplate(tokenizer, marked, "".join(closing), tuple(dict.fromkeys(turn_ends)))


def turn_end_ids(tokenizer: Any) -> list[int]:
    """Ids that end a text or an assistant turn: where generation should stop."""
    ends = list(read_chat_template(tokenizer).turn_ends) if tokenizer.chat_template else []
    ids = [tokenizer.convert_tokens_to_ids(end) for end in ends]
    return list(dict.fromkeys([*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]))


def mask_chat(template: ChatTemplate, messages: list[Message], options: dict[str, Any], first: int = 0) -> ChatText:
    """The chat as text with the assistant's turns from message `first` on supervised, each with the end of its turn.

    Raises:
        Refusal: the template refuses the chat, or writes it such that the turns can't be told apart.
    """
    if template.marked:
        text, spans = _marked_spans(template, messages, options)
        if first:
            start = turn_start(template, messages, options, first, text)
            spans = [span for span in spans if span[1] > start]
        return ChatText(text, spans)
    text = template.render(messages, options)
    spans, rewritten = [], False
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        end, as_generated = _turn_end(template, messages, options, i, text)
        rewritten |= not as_generated
        if i >= first:
            spans.append((turn_start(template, messages, options, i, text), end))
    return ChatText(text, spans, rewritten)


def mask_completion(template: ChatTemplate, messages: list[Message], options: dict[str, Any], first: int) -> ChatText:
    """The chat as text with everything from message `first` on supervised, whoever wrote it."""
    text = template.render(messages, options)
    return ChatText(text, [(turn_start(template, messages, options, first, text), len(text))])


def supervised_tokens(encoding: Encoding, spans: list[Span], length: int) -> tuple[list[Span], bool]:
    """Token ranges that hold any character of `spans`, and whether a first token also holds text from before its span.

    `length` is that of the text in characters.
    """
    ranges, merged = [], False
    for start, end in spans:
        first = _token_from(encoding, start, end)
        if first is None:
            continue
        last = next(token for at in range(end - 1, -1, -1) if (token := encoding.char_to_token(at)) is not None)
        after = _token_from(encoding, end, length)
        # the bytes of one character may be several tokens, of which char_to_token gives the first
        ranges.append((first, max(last + 1, len(encoding) if after is None else after)))
        begins = encoding.token_to_chars(first)
        merged |= begins is not None and begins[0] < start
    return ranges, merged


def turn_start(template: ChatTemplate, messages: list[Message], options: dict[str, Any], i: int, text: str) -> int:
    """Where message `i` begins in `text`: behind what the template would prompt its author with."""
    if i:
        prompt = _beginning(template, messages[:i], options, add_generation_prompt=messages[i]["role"] == "assistant")
        if prompt and text.startswith(prompt):
            return len(prompt)
    # the template writes the chat up to here otherwise when it goes on, or the chat begins here: the message begins
    # where the text starts to depend on it
    return min(common_prefix(text, _with_content(template, messages, options, i, probe)) for probe in _PROBES[:2])


def common_prefix(text: str, other: str) -> int:
    """Length of the longest common beginning, by halving: comparing slices beats a loop over characters."""
    least, most = 0, min(len(text), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if text[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _token_from(encoding: Encoding, start: int, end: int) -> int | None:
    """First token that holds a character from `start` on; some white space is in no token."""
    return next((token for at in range(start, end) if (token := encoding.char_to_token(at)) is not None), None)


def _marked_spans(template: ChatTemplate, messages: list[Message], options: dict[str, Any]) -> tuple[str, list[Span]]:
    """Text and generation marks, each span stretched over the end of its turn where the marks leave it out.

    transformers' own `return_assistant_tokens_mask` looks only at the first and last character of a mark; where that one
    is in no token (trimmed white space), it masks the rest of the chat or nothing of it (5.23, tokenization_utils_base).
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    options = dict(options)
    tools = options.pop("tools", None)
    variables = {**template.tokenizer.special_tokens_map, **options}
    try:
        rendered: Any = render_jinja_template(
            [messages], tools=tools, chat_template=template.tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True, **variables,
        )  # fmt: skip
    except Exception as error:  # as in ChatTemplate.render
        raise Refusal(f"the chat template can't render this chat: {type(error).__name__}: {error}") from error
    (text,), (marks,) = rendered
    spans = []
    turn_end = re.compile(r"\s*(?:" + "|".join(map(re.escape, template.turn_ends)) + ")") if template.turn_ends else None
    for start, end in marks:
        if turn_end and not text[start:end].rstrip().endswith(template.turn_ends):
            closing = turn_end.match(text, end)
            end = closing.end() if closing else end
        spans.append((start, end))
    return text, spans


def _turn_end(template: ChatTemplate, messages: list[Message], options: dict[str, Any], i: int, text: str) -> tuple[int, bool]:
    """Where the turn of message `i` ends in `text`, and whether the text up to there is as it was when it was generated."""
    if i == len(messages) - 1:
        return len(text), True
    so_far = _beginning(template, messages[: i + 1], options)
    if so_far and text.startswith(so_far):
        return len(so_far), True
    content = messages[i].get("content")
    probe = _PROBES[1]
    marked = [*content, {"type": "text", "text": probe}] if isinstance(content, list) else (content or "") + probe
    _, found, rest = _with_content(template, messages, options, i, marked).rpartition(probe)
    if found and text.endswith(rest):
        written = len(text) - len(rest)  # the end of the content; calls of tools may follow it, then the end of the turn
        limit = common_prefix(text, _with_content(template, messages, options, i + 1, _PROBES[0]))  # of the next message
        for closing in filter(None, (template.closing, *template.turn_ends)):
            at = text.find(closing, written, limit)
            if at >= 0 and (messages[i].get("tool_calls") or not text[written:at].strip()):
                end = at + len(closing)
                return end, so_far.startswith(text[:end])
        if not template.closing and not template.turn_ends and not messages[i].get("tool_calls"):
            return written, so_far.startswith(text[:written])
    raise Refusal(
        f"can't tell where assistant message {i + 1} ends: the chat template writes it otherwise once the chat goes on. Use a "
        "template with {% generation %} marks (--chat-template FILE), or train on every token (--no-assistant-only-loss)"
    )


def _beginning(template: ChatTemplate, messages: list[Message], options: dict[str, Any], **how: bool) -> str:
    """The beginning of a chat as text; empty where the template takes whole chats only."""
    try:
        return template.render(messages, options, **how)
    except Refusal:
        return ""


def _with_content(template: ChatTemplate, messages: list[Message], options: dict[str, Any], i: int, content: Any) -> str:
    return template.render([*messages[:i], {**messages[i], "content": content}, *messages[i + 1 :]], options)
