"""Which columns of a split are read, and whether the values in them can be trained on."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.config import DataConfig, Refusal
from toolkit.config.json_and_yaml import parse_json
from toolkit.data.tokenize.tool_calls import read_calls
from toolkit.system.console import quoted

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from toolkit.data.tokenize.labels import Classes

Batch = dict[str, list[Any]]
Read = TypeVar("Read")
MASKS = ("labels", "completion_mask", "assistant_masks")  # of tokenized rows; the latter two are TRL's
CHATS = ("chat", "prompted_chat")
_LARGEST = 3.4028234663852886e38  # in float32
ALPACA = ("instruction", "input", "output", "system")
_OTHER_NAMES = {
    "anchor": ("query", "question", "premise", "title"),
    "sentence1": ("sentence_1", "text1", "sentence_a", "premise"),
    "sentence2": ("sentence_2", "text2", "sentence_b", "hypothesis"),
    "score": ("similarity", "similarity_score", "label"),
    "text": ("content", "sentence", "document", "body", "article", "story", "code", "review", "raw", "texts"),
    "prompt": ("instruction", "question", "query", "input", "inputs", "source", "user", "problem"),
    "completion": ("output", "response", "answer", "target", "outputs", "chosen", "solution", "assistant", "reply"),
    "chosen": ("preferred", "accepted", "chosen_response", "response_chosen", "winner", "better", "good"),
    "rejected": ("dispreferred", "rejected_response", "response_rejected", "loser", "worse", "bad"),
    "messages": ("conversation", "dialog", "dialogue", "chat", "turns", "message"),
    "query": ("question", "anchor", "search", "topic", "q", "sentence1"),
    "document": ("passage", "doc", "text", "answer", "context", "candidate", "sentence2"),
    "documents": ("passages", "docs", "texts", "answers", "candidates"),
    "labels": ("scores", "label", "relevance", "relevances", "grades"),
    "positive": ("positives", "pos", "relevant"),
    "negative": ("negatives", "neg", "irrelevant", "hard_negative"),
    "label": ("relevance", "class", "category", "target", "sentiment", "intent", "y", "labels", "score", "stars", "rating"),
    "question": ("query", "prompt", "q"),
    "context": ("passage", "paragraph", "document", "text", "article"),
    "answers": ("answer", "label", "labels"),
    "choices": ("options", "answers", "candidates", "alternatives"),
}
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "bing": "assistant", "chatgpt": "assistant"}
# Arguments of transformers' apply_chat_template (5.23), which are the toolkit's to give; what else it gets is the template's.
_OF_RENDERING = frozenset({
    "messages", "conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "model", "ipython")


@dataclass(frozen=True)
class Plan:
    """How one split is read.

    `layout` is text, prompt_completion, chat, prompted_chat (prompt and completion are lists of messages), alpaca or tokenized;
    `supervise` is all, completion, assistant (its turns), answers (its turns in the completion), labels (as in the rows),
    class, span (of a context), prompt (nothing: answers are sampled), pair (both answers of a preference), answer (a single
    one), or the scheme of its tags (plain, iob1, iob2, iobes); of these the layout is words, or spans over a text.
    """

    layout: str
    supervise: str
    columns: tuple[str, ...]  # that are read
    classes: Classes | None = None
    margin: bool = False  # a pair has by how much its chosen answer is the better one

    @property
    def is_masked(self) -> bool:
        return self.supervise not in ("all", "class", "span", "prompt")


def columns_of(split: Dataset | IterableDataset, name: str) -> list[str]:
    """Names of the columns; those of the first row where a stream has no names."""
    try:
        return list(split.column_names or next(iter(split)))
    except StopIteration:
        raise Refusal(f"The {name} split has no rows. Look at the source, and at --train-split and --eval-split") from None


def rows_of(batch: Batch) -> list[dict[str, Any]]:
    """The rows of a batch of columns."""
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def is_wrapped(config: DataConfig) -> bool:
    """Whether packing cuts documents to fill rows, so that none is too long."""
    return config.packing and config.packing_strategy == "wrapped" and config.overlong in ("truncate", "split")


def label_column(columns: list[str], split: str) -> str:
    """The column with the labels of a classification dataset."""
    label = next((name for name in ("label", "labels") if name in columns), None)
    if label is None or not {"text", "input_ids"} & set(columns):
        raise Refusal(wrong_columns(columns, split, "text (and text_pair, for two texts) and label", (("text", "label"),)))
    return label


def with_origin(origin: str, read: Callable[..., Read], *arguments: object) -> Read:
    """What `read` returns; its refusals name the row."""
    try:
        return read(*arguments)
    except Refusal as refusal:
        if str(refusal).startswith(origin):
            raise
        raise Refusal(f"{origin}: {refusal}") from refusal


def check_texts(values: list[Any], column: str, origins: list[str]) -> None:
    """Refuse what is not a string with something in it."""
    for value, origin in zip(values, origins, strict=True):
        if not isinstance(value, str):
            raise Refusal(f"{origin}: {column} is {describe(value)}, and must be text. Correct or remove the row.")
        if not value.strip():
            what = "empty" if not value else "nothing but white space"
            raise Refusal(f"{origin}: {column} is {what}. Fill it in or remove the row.")


def read_messages(value: object, column: str, origin: str, needs_assistant: bool = True) -> list[dict[str, Any]]:
    """The messages of a chat as a template reads them: keys that are None are left out, ShareGPT's keys are translated."""
    if not isinstance(value, list) or not value:
        raise Refusal(f"{origin}: {column} is {describe(value)}, and must be a list of messages. Correct or remove the row.")
    messages = [_read_message(message, f"{origin}: message {i + 1} of {column}") for i, message in enumerate(value)]
    if needs_assistant and not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise Refusal(
            f"{origin}: the chat has no assistant turn (its roles: {roles}): there is nothing to learn from it. Remove the "
            "row, or give the role that is meant the name 'assistant'."
        )
    return messages


def alpaca_messages(row: dict[str, Any], origin: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Prompt and answer of a row of Alpaca's columns: the input, where there is one, behind the instruction."""
    for column in ("instruction", "output"):
        check_texts([row[column]], column, [origin])
    asked, system = row["instruction"], row.get("system")
    for column in ("input", "system"):
        if row.get(column) is not None and not isinstance(row[column], str):
            raise Refusal(f"{origin}: {column} is {describe(row[column])}, and must be text. Correct or remove the row.")
    if (row.get("input") or "").strip():
        asked = f"{asked}\n{row['input']}"
    prompt = [{"role": "user", "content": asked}]
    if (system or "").strip():
        prompt.insert(0, {"role": "system", "content": system})
    return prompt, [{"role": "assistant", "content": row["output"]}]


def alpaca_prompt(row: dict[str, Any]) -> str:
    """The prompt as Alpaca's authors wrote it, for a tokenizer without a chat template."""
    parts = {"Instruction": row["instruction"], "Input": row.get("input") or ""}
    headed = "".join(f"### {name}:\n{text}\n\n" for name, text in parts.items() if text.strip())
    with_input = ", paired with an input that provides further context" if parts["Input"].strip() else ""
    system = row.get("system") or (
        f"Below is an instruction that describes a task{with_input}. Write a response that appropriately completes the request."
    )
    return f"{system}\n\n{headed}### Response:\n"


def likely_renames(columns: list[str], layouts: Iterable[tuple[str, ...]]) -> str:
    """The renames that make columns those of one of the layouts, as --rename-columns takes them; empty where none does."""
    present = [name for name in columns if name != "origin"]
    for layout in layouts:
        found = {_likely_column(name, present): name for name in layout}
        if "" not in found and len(found) == len(layout):
            return ",".join(f"{old}={new}" for old, new in found.items() if old != new)
    return ""


def read_options(row: dict[str, Any], origin: str) -> dict[str, Any]:
    """What a row hands to its chat template next to the messages: tools, and the template's own variables."""
    tools, variables = (_from_json(row.get(name), name, origin) for name in ("tools", "chat_template_kwargs"))
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise Refusal(f"{origin}: tools is {describe(tools)}, and must be a list of objects. Correct or remove the row.")
    if variables and not isinstance(variables, dict):
        raise Refusal(f"{origin}: chat_template_kwargs is {describe(variables)}, and must be an object. Correct the row.")
    if taken := _OF_RENDERING.intersection(variables or ()):
        raise Refusal(
            f"{origin}: chat_template_kwargs has {', '.join(sorted(taken))}, which sets how a chat is rendered or cut "
            "and is no variable of a template. Remove it from the row."
        )
    return {**(variables or {}), **({"tools": tools} if tools else {})}


def _from_json(value: Any, column: str, origin: str) -> Any:
    """What a column holds as it is or as JSON text, in which a null is meant."""
    if not isinstance(value, str):
        return _without_none(value)
    return parse_json(value, f"{origin}: {column}", is_strict=True) if value.strip() else None


def as_whole(value: object) -> Any:
    """A float without a fraction as a whole number: where one of a column has a fraction, Arrow makes all of them floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_finite(value: float) -> bool:
    """Whether it is a number in float32, in which losses and metrics are computed."""
    return abs(value) <= _LARGEST


def describe(value: object) -> str:
    """What a value is, in a few words."""
    if value is None:
        return "missing (null)"
    if isinstance(value, (bool, int, float)):
        return f"the {'boolean' if isinstance(value, bool) else 'number'} {value}"
    if isinstance(value, str):
        return f"the text {quoted(value[:40])}{'...' if len(value) > 40 else ''}" if value else "an empty text"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}" if value else "an empty list"
    if not isinstance(value, dict):
        return f"a {type(value).__name__}"
    names = [name if len(name) <= 40 else name[:40] + "..." for name in map(str, value)]
    more = [f"{len(names) - 3:,} more"] if len(names) > 4 else []
    return f"an object with {', '.join([*names[:3], *more] if more else names)}" if names else "an empty object"


def wrong_columns(columns: list[str], split: str, needed: str, layouts: Iterable[tuple[str, ...]]) -> str:
    present = [name for name in columns if name != "origin"]
    what = f"The {split} split has the columns {', '.join(present) or '(none)'}. What can be trained on here: {needed}."
    renames = likely_renames(present, layouts)
    return f"{what} Did you mean: --rename-columns {renames}" if renames else f"{what} Rename with --rename-columns old=new"


def _read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Refusal(f"{where} is {describe(message)}, and must have role and content. Correct or remove the row.")
    message = _without_none(message)
    if "role" not in message and isinstance(message.get("from"), str):  # ShareGPT
        role, content = message.pop("from"), message.pop("value", None)
        message = {"role": _SHAREGPT_ROLES.get(role, role), **({} if content is None else {"content": content}), **message}
    role = message.get("role")
    if not isinstance(role, str):
        raise Refusal(f"{where} has no role, only {', '.join(message) or 'nothing'}. A message is {{role, content}}.")
    if role in _SHAREGPT_ROLES:
        raise Refusal(f"{where} has the role {quoted(role)}, which chat templates call {_SHAREGPT_ROLES[role]!r}. Rename it.")
    if role not in _ROLES:
        close = difflib.get_close_matches(role.lower(), _ROLES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else f" Known roles: {', '.join(_ROLES)}."
        raise Refusal(f"{where} has the role {quoted(role)}, which no chat template supports.{hint}")
    content = message.get("content")
    if content is not None and not isinstance(content, (str, list)):
        raise Refusal(f"{where}: content is {describe(content)}, and must be text. Correct or remove the row.")
    if isinstance(content, list):
        content = message["content"] = _joined_parts(content, where)
    if role == "assistant" and {"tool_calls", "function_call"} & message.keys():
        message = read_calls(message, where)
    said = [content, message.get("tool_calls"), message.get("reasoning_content"), message.get("thinking")]
    if role == "assistant" and not any(part.strip() if isinstance(part, str) else part for part in said):
        raise Refusal(f"{where} is an assistant turn with nothing in it: there is nothing to learn from it. Remove the row.")
    if role != "assistant" and content is None:
        raise Refusal(f"{where} has no content. Correct or remove the row.")
    return message


def _joined_parts(parts: list[Any], where: str) -> str:
    """The text of a content in parts. Most templates of text models would write the list itself, or nothing."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = f"of type {quoted(str(part['type']))}" if isinstance(part, dict) and part.get("type") else describe(part)
            raise Refusal(f"{where}: content has a part {kind}, and only text can be trained on. Remove the part or the row.")
    return "".join(part["text"] for part in parts)


def _without_none(value: Any) -> Any:
    """Without keys that are None: Arrow gives every object of a column the keys of all."""
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value


def _likely_column(name: str, present: list[str]) -> str:
    """The column that is `name`, or probably means it; empty when none does."""
    if name in present:
        return name
    usual = next((other for other in present if other.lower() in (name, *_OTHER_NAMES[name])), None)
    return usual or next(iter(difflib.get_close_matches(name, present, n=1, cutoff=0.7)), "")
