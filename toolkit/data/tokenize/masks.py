"""Which tokens of a chat or of a prompt with its completion are supervised.

A mask is found on the text and then carried over to the tokens: a token is supervised when it holds any character of a
supervised span. So the whole is tokenized once, as one text, and a token that merges text across a border of a span
counts as part of the span, as in TRL. The spans of a chat are what the assistant wrote and the end of its turn: from the
template's generation marks where it has them, else from rendering the chat up to there.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from toolkit.config import Refusal
from toolkit.data.tokenize.tool_calls import RESULTS, CallForm, check_tools, find_call_form, lost, with_name, write_calls
from toolkit.system.interruptions import TEMPLATE_SECONDS, time_limit

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Span = tuple[int, int]  # characters, the end not included
MOST_CHARACTERS = 1 << 26  # of one chat as text

_PROBES = ("zqfirstquestionqz", "qxfirstanswerxq", "zqsecondquestionqz", "xqsecondanswerqx")  # words no template holds


@dataclass(frozen=True)
class ChatText:
    """A chat as one text, and the spans of it that are supervised."""

    text: str
    spans: list[Span]
    rewritten: bool = False  # the template writes an earlier assistant turn otherwise than when it was generated
    odd: tuple[str, ...] = ()  # what of its calls of tools belongs to nothing (`tool_calls.odd_tool_turns`)


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template and what masks need of it."""

    tokenizer: PreTrainedTokenizerBase
    marked: bool  # has {% generation %} marks
    closing: str  # what it writes after an assistant turn, whether or not the chat continues
    turn_ends: tuple[str, ...]  # special tokens that end a turn; empty when it has none

    def render(self, messages: list[Message], options: dict[str, Any], add_generation_prompt: bool = False) -> str:
        """The chat as text. `options` are `tools` and the template's own variables."""
        return self._render(self.as_taken(messages), options, add_generation_prompt)

    def as_taken(self, messages: list[Message]) -> list[Message]:
        """The messages with their calls of tools in the form that the template takes."""
        return write_calls(messages, self._call_form) if any(message.get("tool_calls") for message in messages) else messages

    @cached_property
    def _call_form(self) -> CallForm:
        return find_call_form(self._render)

    def _render(self, messages: list[Message], options: dict[str, Any], add_generation_prompt: bool = False) -> str:
        with _rendering():
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
            return _within_limits(str(text))


@contextlib.contextmanager
def _rendering() -> Iterator[None]:
    """A block that renders a chat: whatever a template can raise is refused, and so is one that doesn't end."""
    try:
        with time_limit(TEMPLATE_SECONDS):
            yield
    except Exception as error:  # a template can raise anything; the user needs its message
        raise Refusal(f"the chat template can't render this chat: {type(error).__name__}: {error}") from error


def _within_limits(text: str) -> str:
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it writes {len(text):,} characters, more than {MOST_CHARACTERS:,}")
    return text


def read_chat_template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
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
    lost = [role for role, probe in zip(roles, _PROBES, strict=True) if probe not in text]
    if lost:
        raise Refusal(
            f"The chat template leaves out what the {lost[-1]} says: of a chat of four messages it writes {text[:200]!r}. Mend "
            "it, or give another with --chat-template FILE"
        )
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special] or ["\0"]
    # what follows each message, cut at special tokens, which are at the odd places
    pieces = re.compile("(" + "|".join(sorted(map(re.escape, special), key=len, reverse=True)) + ")")
    after = [pieces.split(text.partition(probe)[2]) for probe in _PROBES]
    closing = after[3][: next((i for i, (a, b) in enumerate(zip(after[1], after[3], strict=False)) if a != b), len(after[3]))]
    turn_ends = after[3][1:2]
    # gpt-oss ends the last turn and the earlier ones with different tokens; the latter ends the user's turns as well
    directly = {parts[1] if len(parts) > 1 and not parts[0].strip() else "" for parts in after[:3]}
    turn_ends += directly if turn_ends and len(directly) == 1 and directly != {""} else []
    return ChatTemplate(tokenizer, marked, "".join(closing), tuple(dict.fromkeys(turn_ends)))


def turn_end_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a text or an assistant turn: where generation should stop.

    No turn's of a template that can't render a plain chat: whether that matters shows where it renders the data.
    """
    ends = list[str]()
    if tokenizer.chat_template:
        with contextlib.suppress(Refusal):
            ends = list(read_chat_template(tokenizer).turn_ends)
    ids = [tokenizer.convert_tokens_to_ids(end) for end in ends]
    return list(dict.fromkeys([*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]))


def mask_chat(template: ChatTemplate, messages: list[Message], options: dict[str, Any], first: int = 0) -> ChatText:
    """The chat as text with the assistant's turns from message `first` on supervised, each with the end of its turn.

    Raises:
        Refusal: the template refuses the chat, or writes it such that the turns can't be distinguished.
    """
    if template.marked:
        text, spans = _marked_spans(template, messages, options)
        if first:
            start = turn_start(template, messages, options, first, text)
            spans = [span for span in spans if span[1] > start]
        _check_answers(template, messages, options, first, text)
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
    _check_answers(template, messages, options, first, text)
    return ChatText(text, spans, rewritten)


def uses_tools(messages: list[Message], options: dict[str, Any]) -> bool:
    """Whether a chat has tools, calls of them, or results."""
    return bool(options.get("tools")) or any(message["role"] in RESULTS or message.get("tool_calls") for message in messages)


def check_rendered(
    template: ChatTemplate, messages: list[Message], options: dict[str, Any], text: str
) -> list[tuple[int, int]]:
    """Refuse a chat of which the template leaves out the system message, a turn's reasoning, or anything about tools.

    Each is changed, and `text`, the chat as the template renders it, must change with it. Returns for each call of a tool its
    message and where in the text its arguments begin.
    """
    for i, message in enumerate(messages):
        changed = None
        if message["role"] in ("system", "developer") and message.get("content"):
            changed, what = {**message, "content": _PROBES[0]}, f"the {message['role']} message"
        elif message["role"] == "assistant" and not message.get("tool_calls") and not message.get("content"):
            changed, what = {"role": "assistant", "content": ""}, "the reasoning, which is all that a turn has,"
        if changed and _beginning(template, [*messages[:i], changed, *messages[i + 1 :]], options) == text:
            raise Refusal(lost(f"{what} (message {i + 1})", "remove the row"))
    return check_tools(template, messages, options, text) if uses_tools(messages, options) else []


def _check_answers(template: ChatTemplate, messages: list[Message], options: dict[str, Any], first: int, text: str) -> None:
    """Refuse an answer that the template leaves out: only the end of its turn would be trained."""
    for i, message in enumerate(messages[first:], first):
        said = message.get("content")
        if message["role"] != "assistant" or not isinstance(said, str) or not said.strip() or said.strip() in text:
            continue
        without = [*messages[:i], {**message, "content": ""}, *messages[i + 1 :]]
        if _beginning(template, without, options) == text:  # it isn't only written otherwise
            raise Refusal(
                f"the chat template leaves out what assistant message {i + 1} says, so that only the end of its turn would be "
                "trained. Mend the template (--chat-template FILE), or the messages."
            )


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
    prompt = ""
    if i:
        prompt = _beginning(template, messages[:i], options, add_generation_prompt=messages[i]["role"] == "assistant")
        if prompt and text.startswith(prompt):
            return len(prompt)
    # the template writes the chat up to here otherwise when it continues, or the chat begins here: the message begins
    # where the text starts to depend on it
    start = min(common_prefix(text, _with_content(template, messages, options, i, probe)) for probe in _PROBES[:2])
    # or at the white space before that (the blank after Mistral's [/INST]) which the prompt, ending alike, leaves to its author
    before, asked = text[:start].rstrip(), prompt.rstrip()
    if before.split()[-1:] == asked.split()[-1:] != []:
        return min(start, len(before) + len(prompt) - len(asked))
    return start


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
    with _rendering():
        rendered: Any = render_jinja_template(
            [template.as_taken(messages)], tools=tools, chat_template=template.tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True, **variables,
        )  # fmt: skip
        (text,), (marks,) = rendered
        _within_limits(text)
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
    content, probe = messages[i].get("content"), _PROBES[1]
    if messages[i].get("tool_calls") and not content:  # what is between a content and a call is missing without one
        marked = template.render([*messages[:i], with_name(messages[i], probe), *messages[i + 1 :]], options)
    else:
        longer = [*content, {"type": "text", "text": probe}] if isinstance(content, list) else (content or "") + probe
        marked = _with_content(template, messages, options, i, longer)
    _, found, rest = marked.rpartition(probe)
    if found and text.endswith(rest):
        # the end of the content or of a call's name; calls of tools may follow it, then the end of the turn
        written = len(text) - len(rest)
        limit = common_prefix(text, _with_content(template, messages, options, i + 1, _PROBES[0]))  # of the next message
        for closing in filter(None, (template.closing, *template.turn_ends)):
            at = text.find(closing, written, limit)
            if at >= 0 and (messages[i].get("tool_calls") or not text[written:at].strip()):
                end = at + len(closing)
                return end, so_far.startswith(text[:end])
        if not template.closing and not template.turn_ends and not messages[i].get("tool_calls"):
            return written, so_far.startswith(text[:written])
    raise Refusal(
        f"can't find where assistant message {i + 1} ends: the chat template writes it otherwise when more follows. Use a "
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
