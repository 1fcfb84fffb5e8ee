"""Calls of tools in chats: read as OpenAI's format has them, handed to a chat template as it takes them, and never lost.

OpenAI's format has the arguments of a call as JSON text, and no content next to a call. Most chat templates take an object,
which they write as JSON themselves (a text they would quote once more), some take the text; some write a call only where the
content is null, others fail without one. Which it is a template shows with a made-up chat.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit.config import Refusal
from toolkit.config.json_and_yaml import parse_json

if TYPE_CHECKING:
    from toolkit.data.tokenize.masks import ChatTemplate

Message = dict[str, Any]
_PROBE = "zqargumentqz"  # a word that no chat holds
UNKNOWN_TOOL, UNKNOWN_CALL = "unknown_tool", "unknown_call"
RESULTS = ("tool", "function", "ipython")


class CallForm(NamedTuple):
    """How a template takes messages that call tools."""

    has_objects: bool = True  # the arguments are objects, not JSON text
    empty_content: str | None = ""  # where the message has none


_FORMS = (CallForm(), CallForm(True, None), CallForm(False), CallForm(False, None))


def read_calls(message: Message, where: str) -> Message:
    """An assistant's message with its calls as objects: the name, and the arguments as an object.

    The older `function_call` becomes a list of one call. An empty list of calls is left out.

    Raises:
        Refusal: a call without a name, or with arguments that are no JSON object.
    """
    message = dict(message)
    single = message.pop("function_call", None)
    calls = message.pop("tool_calls", None) or ([{"type": "function", "function": single}] if single else None)
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise Refusal(f"{where}: tool_calls is a {type(calls).__name__}, and must be a list. Correct or remove the row.")
    return {**message, "tool_calls": [_read_call(call, f"{where}: call {i + 1}") for i, call in enumerate(calls)]}


def find_call_form(render: Callable[[list[Message], dict[str, Any]], str]) -> CallForm:
    """The form in which a template writes a call with its arguments; the usual one where it writes none."""
    schema = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": _PROBE}}}
    chat: list[Message] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": "Seen."},
        {"role": "assistant", "content": "Done."},
    ]
    for form in _FORMS:
        try:
            text = render(write_calls(chat, form), {"tools": [{"type": "function", "function": schema}]})
        except Refusal:
            continue
        before = text.partition(_PROBE)[0]
        if before != text and not before.endswith(('\\"', "'")):  # neither JSON within JSON nor an object as Python shows it
            return form
    return CallForm()


def write_calls(messages: list[Message], form: CallForm) -> list[Message]:
    """The messages as a template of this form takes them."""
    return [_write_message(message, form) if message.get("tool_calls") else message for message in messages]


def check_tools(template: ChatTemplate, messages: list[Message], options: dict[str, Any], text: str) -> list[tuple[int, int]]:
    """Refuse a chat of which the template leaves out tools, their calls or results.

    Each is taken away or changed, and the text must change with it. Returns for each call its message and where in the text
    its arguments begin.

    Args:
        text: the chat as the template renders it.

    Raises:
        Refusal: what is not in `text`.
    """
    if options.get("tools"):
        without = {name: value for name, value in options.items() if name != "tools"}
        if _rendered(template, messages, without) == text:
            raise Refusal(lost("the tools (their schemas)", "leave out their column (--rename-columns tools=unused)"))
    places = []
    for i, message in enumerate(messages):
        changed, named, what = list[Message](), list[Message](), "a call of a tool"
        calls = message.get("tool_calls", [])
        if message["role"] in RESULTS:
            changed, what = [{**message, "content": _PROBE}], "the result of a tool"
        for number, call in enumerate(calls):
            other = _with_function(call, {**_function(call), "arguments": {"look": _PROBE}})
            changed.append({**message, "tool_calls": [*calls[:number], other, *calls[number + 1 :]]})
            other = _with_function(call, {**_function(call), "name": _PROBE})
            named.append({**message, "tool_calls": [*calls[:number], other, *calls[number + 1 :]]})
        for each in changed:
            found = _rendered(template, [*messages[:i], each, *messages[i + 1 :]], options)
            if found == text:
                raise Refusal(lost(f"{what} (message {i + 1})", "remove the row"))
            if calls and found is not None:  # None: the template looks at it, and does not like it changed
                places.append((i, next(at for at, (a, b) in enumerate(zip(text, found + "\0", strict=False)) if a != b)))
        for each in named:
            if _rendered(template, [*messages[:i], each, *messages[i + 1 :]], options) == text:
                raise Refusal(lost(f"the name of a tool that is called (message {i + 1})", "remove the row"))
    return places


def odd_tool_turns(messages: list[Message], options: dict[str, Any]) -> list[str]:
    """What of a chat's calls and results belongs to nothing: of UNKNOWN_TOOL and UNKNOWN_CALL those that are so.

    A call where the chat has no tools at all is none of them: some data describe them in the system's turn.
    """
    tools = {_function(tool).get("name") for tool in options.get("tools") or [] if isinstance(_function(tool), dict)} - {None}
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    ids = {call.get("id") for call in calls}
    answered = {message.get("tool_call_id") for message in messages if message["role"] in RESULTS} - {None}
    unknown = {UNKNOWN_TOOL: tools and any(_function(call)["name"] not in tools for call in calls),
               UNKNOWN_CALL: answered - ids}  # fmt: skip
    return [name for name, found in unknown.items() if found]


def check_supervised(calls: list[tuple[int, int]], spans: list[tuple[int, int]], first: int = 0) -> None:
    """Refuse a chat whose calls, as `check_tools` found them, are in no supervised span from message `first` on.

    Raises:
        Refusal: a call that the model would not learn.
    """
    for i, at in calls:
        if i >= first and not any(start <= at < end for start, end in spans):
            raise Refusal(
                f"the generation marks of the chat template leave out a call of a tool (message {i + 1}): the model would not "
                "learn it. Give a template that marks calls too (--chat-template FILE), or train on every token "
                "(--no-assistant-only-loss)"
            )


def with_name(message: Message, name: str) -> Message:
    """The message with its last call by another name."""
    *calls, last = message["tool_calls"]
    return {**message, "tool_calls": [*calls, _with_function(last, {**_function(last), "name": name})]}


def lost(what: str, otherwise: str) -> str:
    """The message for a part of a chat that its template does not write."""
    return (
        f"the chat template does not write {what}: the model would be trained without. Give a template that does "
        f"(--chat-template FILE), or {otherwise}."
    )


def _rendered(template: ChatTemplate, messages: list[Message], options: dict[str, Any]) -> str | None:
    try:
        return template.render(messages, options)
    except Refusal:
        return None


def _read_call(call: Any, where: str) -> Any:
    function = _function(call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Refusal(
            f"{where} names no function. A call is {{type: function, function: {{name, arguments}}}}. Correct the row."
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        of_call = f"{where}: the arguments of {function['name']}"
        arguments = parse_json(arguments, of_call, is_strict=True) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        raise Refusal(f"{where}: the arguments of {function['name']} are a {kind}, and must be an object. Correct the row.")
    return _with_function(call, {**function, "arguments": arguments})


def _write_message(message: Message, form: CallForm) -> Message:
    if not form.has_objects:
        calls = []
        for call in message["tool_calls"]:
            function = _function(call)
            calls.append(_with_function(call, {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}))
        message = {**message, "tool_calls": calls}
    return message if message.get("content") else {**message, "content": form.empty_content}


def _function(call: dict[str, Any]) -> Any:
    """Name and arguments of a call, which some data have in the call itself."""
    return call.get("function", call)


def _with_function(call: dict[str, Any], function: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": function} if "function" in call else function
