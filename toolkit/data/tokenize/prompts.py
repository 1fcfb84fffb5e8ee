"""Prompts to sample completions for: rows with a prompt to its tokens, and to what reward functions get of the row."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from toolkit.config import DataConfig, Refusal
from toolkit.config.tasks import PromptConfig
from toolkit.data.tokenize.columns import (
    Batch,
    Plan,
    check_texts,
    columns_of,
    describe,
    read_messages,
    read_options,
    rows_of,
    with_origin,
    wrong_columns,
)
from toolkit.data.tokenize.documents import Cut, Documents, Encoder, join_documents, leave_out
from toolkit.data.tokenize.format import Format, Splits
from toolkit.data.tokenize.masks import ChatTemplate, read_chat_template

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

    from toolkit.data.tokenize.masks import Message

PROMPT = "prompt"  # the column with a prompt's number, and the key of the prompt as given
PROMPT_COLUMNS = ("prompt", "messages", "conversations", "question", "problem")  # in the order in which they are looked for
_CHATS = ("messages", "conversations")
_NOT_TEXT = ("binary", "Image", "Audio", "Video", "Pdf")  # types of columns that JSON can't hold


def prompt_format(config: DataConfig) -> Format:
    """How rows with a prompt are read, by the settings of PromptConfig."""
    if not isinstance(config, PromptConfig):
        raise TypeError("prompts need the settings of PromptConfig next to those of DataConfig")
    longest, overlong = config.max_prompt_length, config.overlong_prompts

    def rows(plan: Plan, encoder: Encoder, config: DataConfig) -> PromptRows:
        template = read_chat_template(encoder.tokenizer) if uses_template(plan, encoder.tokenizer) else None
        return PromptRows(plan.layout, encoder, template, longest, overlong)

    def columns(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> dict[str, pa.DataType]:
        import pyarrow as pa

        return {"row": pa.string()}

    return Format(
        "prompts", lambda splits, config: (plan_prompts(splits, config), []), rows, columns, _describe,
        settings=(longest, overlong), numbered=PROMPT, supervises_tokens=False, ends_texts=False, overlong=overlong,
        max_length=longest, length_flag="--max-prompt-length",
    )  # fmt: skip


def plan_prompts(splits: Splits, config: DataConfig) -> dict[str, Plan]:
    """Which column of each split holds the prompts; all others are for reward functions.

    Raises:
        Refusal: columns of which none is known to hold prompts, or a setting that prompts can't have.
    """
    if config.packing:
        raise Refusal("--packing: prompts are what completions are sampled for, each by itself. Remove it.")
    return {name: _plan(split, name) for name, split in splits.items()}


def _plan(split: Dataset | IterableDataset, name: str) -> Plan:
    present = columns_of(split, name)
    column = next((column for column in PROMPT_COLUMNS if column in present), None)
    if column is None:
        needed = "prompt (text, or a list of messages), messages, question, or problem"
        raise Refusal(wrong_columns(present, name, needed, (("prompt",), ("messages",))))
    kinds = split.features or {}
    read = tuple(column for column in present if not any(kind in repr(kinds.get(column)) for kind in _NOT_TEXT))
    is_chat = column in _CHATS
    if column == PROMPT:
        is_chat = isinstance(next((row[column] for row in split if row[column] is not None), None), list)
    return Plan("chat_prompt" if is_chat else "text_prompt" if column == PROMPT else column, "prompt", read)


def uses_template(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether prompts are rendered as chats: messages always, questions and problems where there is a chat template."""
    return plan.layout == "chat_prompt" or (plan.layout != "text_prompt" and bool(tokenizer.chat_template))


@dataclass(frozen=True)
class PromptRows:
    """Reads batches of rows: all that it needs next to them. `layout`: chat_prompt, text_prompt, question or problem."""

    layout: str
    encoder: Encoder
    template: ChatTemplate | None  # of prompts that are chats
    longest: int
    overlong: str

    def read(self, batch: Batch, origins: list[str]) -> tuple[Documents, Counter[str]]:
        """Whole prompts. What a document holds next to its tokens: the row as JSON, with the prompt as it was given."""
        texts, prompts, rows = list[str](), list[Any](), rows_of(batch)
        for row, origin in zip(rows, origins, strict=True):
            text, prompt = with_origin(origin, self._chat if self.template else self._text, row, origin)
            texts.append(text)
            prompts.append(prompt)
        encodings = self.encoder.encode(texts)
        # a chat template writes its own special tokens
        ids = [encoding.ids if self.template else self.encoder.add_start(encoding.ids) for encoding in encodings]
        columns = {"row": [
            _as_json({**row, PROMPT: prompt}, origin) for row, prompt, origin in zip(rows, prompts, origins, strict=True)
        ]}  # fmt: skip
        return join_documents(ids, None, origins, columns), Counter()

    def cut(self, documents: Documents) -> tuple[Documents, Cut]:
        """Without the prompts that are longer than `longest`: one that is cut would be another prompt."""
        flag, instead = "--max-prompt-length", "--overlong-prompts drop"
        return leave_out(documents, self.longest, self.overlong, "the prompt", flag=flag, instead=instead)

    def _text(self, row: dict[str, Any], origin: str) -> tuple[str, str]:
        column = PROMPT if self.layout == "text_prompt" else self.layout
        check_texts([row[column]], column, [origin])
        return row[column], row[column]

    def _chat(self, row: dict[str, Any], origin: str) -> tuple[str, list[Message]]:
        """The prompt as text, with what the template writes before an answer, and its messages."""
        assert self.template is not None
        messages = self._messages(row, origin)
        return self.template.render(messages, read_options(row, origin), add_generation_prompt=True), messages

    def _messages(self, row: dict[str, Any], origin: str) -> list[Message]:
        if self.layout != "chat_prompt":
            return [{"role": "user", "content": self._text(row, origin)[0]}]
        column = next(column for column in PROMPT_COLUMNS if column in row)
        messages = read_messages(row[column], column, origin, needs_assistant=False)
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if column in _CHATS and answers:
            messages = messages[: answers[-1]]
        if not messages:
            raise Refusal(f"{origin}: {column} begins with its last answer: there is no prompt. Correct or remove the row.")
        if messages[-1]["role"] == "assistant":
            raise Refusal(
                f"{origin}: {column} ends with a turn of the assistant, which is what will be sampled. Remove that turn."
            )
        for number, message in enumerate(messages, 1):
            if message["role"] == "user":
                check_texts([message["content"]], f"message {number} of {column}", [origin])
        return messages


def _as_json(row: dict[str, Any], origin: str) -> str:
    def as_text(value: Any) -> str:
        if isinstance(value, datetime.date | datetime.time | Decimal):
            return str(value)
        column = next((name for name, held in row.items() if held is value), "a column")
        raise Refusal(
            f"{origin}: {column} is {describe(value)}, and reward functions get text, numbers and lists of these. Remove it."
        )

    return json.dumps(row, ensure_ascii=False, default=as_text)


def _describe(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> str:
    column = next(column for column in PROMPT_COLUMNS if column in plan.columns)
    others = [name for name in plan.columns if name not in (column, "origin")]
    how = "rendered with the chat template" if uses_template(plan, tokenizer) else "plain text"
    return f"prompts from {column}, {how}" + (f"; reward functions also get {', '.join(others)}" if others else "")
