"""Language modeling and supervised fine-tuning: rows of text, prompts with completions, chats or token ids to documents.

`plan_text` finds the columns to read and what of them is supervised, `TextRows.read` turns a batch of rows into text with its
supervised spans, and those into tokens and labels.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import DataConfig, Refusal
from toolkit.data.tokenize.columns import (
    ALPACA,
    CHATS,
    MASKS,
    Batch,
    Plan,
    alpaca_messages,
    alpaca_prompt,
    check_texts,
    columns_of,
    describe,
    is_wrapped,
    read_messages,
    read_options,
    rows_of,
    with_origin,
    wrong_columns,
)
from toolkit.data.tokenize.documents import IGNORED, Cut, Documents, Encoder, cut_documents, join_documents
from toolkit.data.tokenize.format import Format, Splits
from toolkit.data.tokenize.masks import (
    ChatTemplate,
    ChatText,
    Message,
    check_rendered,
    mask_chat,
    mask_completion,
    read_chat_template,
    supervised_tokens,
    uses_tools,
)
from toolkit.data.tokenize.tool_calls import check_supervised, odd_tool_turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LAYOUTS = {  # in the order in which they are looked for, with the columns each needs
    "tokenized": ("input_ids",),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "alpaca": ("instruction", "output"),
}
_TEXT_LAYOUTS = "text; or prompt and completion; or messages (a chat); or instruction, input and output; or input_ids"
_ALL_SUPERVISED = (
    "every token is supervised, so the mask has no effect. Give the row a prompt; to train on all tokens of "
    "all rows: --no-completion-only-loss (prompt and completion) or --no-assistant-only-loss (chats)"
)


def language_format(task: str) -> Format:
    """How rows are read for language modeling (`task` lm, all tokens supervised) and for supervised fine-tuning (sft)."""
    import pyarrow as pa

    def rows(plan: Plan, encoder: Encoder, config: DataConfig) -> TextRows:
        is_chat = plan.layout in CHATS or (plan.layout == "alpaca" and encoder.tokenizer.chat_template)
        template = read_chat_template(encoder.tokenizer) if is_chat else None
        overlong = None if is_wrapped(config) else config.overlong
        return TextRows(plan.layout, plan.supervise, encoder, template, config.max_length, overlong)

    return Format(
        task, lambda splits, config: (plan_text(splits, config, task), []), rows,
        lambda plan, tokenizer: {"labels": pa.list_(pa.int32())} if plan.is_masked else {}, describe_text,
    )  # fmt: skip


def plan_text(splits: Splits, config: DataConfig, task: str) -> dict[str, Plan]:
    """Plans for language modeling (`task` lm, all tokens supervised) and for supervised fine-tuning (sft).

    The labels of tokenized rows are respected by both.

    Raises:
        Refusal: columns that can't be trained on, or a setting that has no effect on them.
    """
    if task == "lm" and (config.completion_only_loss or config.assistant_only_loss):
        flag = "--completion-only-loss" if config.completion_only_loss else "--assistant-only-loss"
        raise Refusal(f"{flag} has no effect here: language modeling supervises every token. For answers only: recipes/sft.py")
    plans = {}
    for name, split in splits.items():
        present = columns_of(split, name)
        layout = text_layout(present, name)
        several = {"tokenized": ("input_ids", "attention_mask", *MASKS), "alpaca": ALPACA,
                   "prompt_completion": ("prompt", "completion")}  # fmt: skip
        read: tuple[str, ...] = several.get(layout, (layout,))
        if layout in ("messages", "conversations"):
            layout = "chat"
        elif layout == "prompt_completion" and isinstance(next((row["prompt"] for row in split), None), list):
            layout = "prompted_chat"
        read += (*(("tools", "chat_template_kwargs") if layout in CHATS else ()), "origin")
        supervise = "all" if task == "lm" and layout != "tokenized" else supervised_part(layout, present, config)
        plans[name] = Plan(layout, supervise, tuple(column for column in read if column in present))
    return plans


def text_layout(columns: list[str], split: str) -> str:
    """The layout of a dataset for language modeling: one of LAYOUTS.

    Raises:
        Refusal: no layout fits, or two do that differ.
    """
    layout = next((name for name, needed in LAYOUTS.items() if set(needed) <= set(columns)), None)
    if layout is None:
        raise Refusal(wrong_columns(columns, split, _TEXT_LAYOUTS, (("prompt", "completion"), ("messages",), ("text",))))
    if layout in ("messages", "conversations") and set(LAYOUTS["prompt_completion"]) <= set(columns):
        raise Refusal(
            f"The {split} split has {layout} and also prompt and completion: which to train on is not clear. Rename what is "
            f"not meant, such as --rename-columns {layout}=unused"
        )
    return layout


def supervised_part(layout: str, columns: list[str], config: DataConfig) -> str:
    """What fine-tuning supervises; a setting that has no effect is refused."""
    completion, assistant = config.completion_only_loss, config.assistant_only_loss
    if completion and layout not in ("prompt_completion", "prompted_chat", "alpaca"):
        raise Refusal("--completion-only-loss has no effect: the data have no prompt and completion. Remove it.")
    if assistant and layout not in CHATS:
        raise Refusal("--assistant-only-loss has no effect: the data are no chats. Remove it.")
    if layout == "tokenized":
        return "labels" if set(MASKS) & set(columns) else "all"
    if layout in ("prompt_completion", "alpaca"):
        return "all" if completion is False else "completion"
    if layout == "chat":
        return "all" if assistant is False else "assistant"
    if layout == "prompted_chat" and completion is False:
        return "assistant" if assistant else "all"
    return {"text": "all", "prompted_chat": "completion" if assistant is False else "answers"}[layout]


@dataclass(frozen=True)
class TextRows:
    """Reads batches of rows: all that it needs next to them.

    `supervise` is what is supervised: all; completion; assistant (its turns); answers (its turns in the completion);
    labels (what a tokenized row gives).
    """

    layout: str
    supervise: str
    encoder: Encoder
    template: ChatTemplate | None  # for chats
    max_length: int
    overlong: str | None  # None: nothing is cut, packing does that

    def read(self, batch: Batch, origins: list[str]) -> tuple[Documents, Counter[str]]:
        """Whole documents, and counts of what is peculiar about them."""
        if self.layout == "tokenized":
            return self._tokenized(batch, origins), Counter()
        if self.layout == "text":
            check_texts(batch["text"], "text", origins)
            return self._documents([ChatText(text, []) for text in batch["text"]], origins)
        if self.layout == "prompt_completion":
            return self._documents(_prompts_and_completions(batch, origins), origins)
        if self.layout == "alpaca" and self.template is None:
            return self._documents(_alpaca_texts(batch, origins), origins)
        read = {"chat": self._chat, "prompted_chat": self._prompted_chat, "alpaca": self._instruction}[self.layout]
        rows = zip(rows_of(batch), origins, strict=True)
        return self._documents([with_origin(origin, read, row, origin) for row, origin in rows], origins)

    def cut(self, documents: Documents) -> tuple[Documents, Cut]:
        """Bring over-long documents within `max_length`."""
        return (documents, Cut()) if self.overlong is None else cut_documents(documents, self.max_length, self.overlong)

    def _chat(self, row: dict[str, Any], origin: str) -> ChatText:
        column = "messages" if "messages" in row else "conversations"
        messages = read_messages(row[column], column, origin, needs_assistant=self.supervise != "all")
        return self._masked(messages, read_options(row, origin), 0)

    def _prompted_chat(self, row: dict[str, Any], origin: str) -> ChatText:
        prompt = read_messages(row["prompt"], "prompt", origin, needs_assistant=False)
        completion = read_messages(row["completion"], "completion", origin, needs_assistant=self.supervise == "answers")
        first = 0 if self.supervise == "assistant" else len(prompt)
        return self._masked(prompt + completion, read_options(row, origin), first)

    def _instruction(self, row: dict[str, Any], origin: str) -> ChatText:
        prompt, answer = alpaca_messages(row, origin)
        return self._masked(prompt + answer, {}, len(prompt))

    def _masked(self, messages: list[Message], options: dict[str, Any], first: int) -> ChatText:
        """The chat as text with the spans to supervise, from message `first` on."""
        assert self.template is not None
        text = self.template.render(messages, options)
        calls = check_rendered(self.template, messages, options, text)
        odd = tuple(odd_tool_turns(messages, options)) if uses_tools(messages, options) else ()
        if self.supervise == "all":
            return ChatText(text, [], odd=odd)
        mask = mask_completion if self.supervise == "completion" and self.layout != "alpaca" else mask_chat
        chat = mask(self.template, messages, options, first)
        if calls:
            check_supervised(calls, chat.spans, first)
        return replace(chat, odd=odd)

    def _documents(self, texts: list[ChatText], origins: list[str]) -> tuple[Documents, Counter[str]]:
        """Tokenize texts at once and carry their spans over to the tokens."""
        is_masked = self.supervise != "all"
        is_chat = self.template is not None
        ids, spans, remarks = [], [], Counter[str]()
        encodings = self.encoder.encode([text.text for text in texts], is_masked)
        for text, encoding, origin in zip(texts, encodings, origins, strict=True):
            # a chat template writes its own special tokens; only an end it lacks is added
            tokens = encoding.ids if is_chat else self.encoder.add_start(encoding.ids)
            shift = len(tokens) - len(encoding.ids)
            if self.template is None:
                tokens = self.encoder.add_end(tokens)
            elif not self.template.turn_ends and self.encoder.end is not None and tokens[-1:] != [self.encoder.end]:
                tokens = [*tokens, self.encoder.end]
            if is_masked:
                if _is_all_supervised(text):
                    raise Refusal(f"{origin}: {_ALL_SUPERVISED}")
                ranges, is_merged = supervised_tokens(encoding, text.spans, len(text.text))
                ranges = [(first + shift, end + shift) for first, end in ranges]
                if text.spans and not text.text[text.spans[-1][1] :].strip():  # the end that was added closes a supervised span
                    ranges.append((len(encoding.ids) + shift, len(tokens)))
                spans.append(ranges)
                remarks["merged"] += is_merged
                remarks["rewritten"] += text.rewritten
            ids.append(tokens)
            remarks.update(f"{what} at {origin}" for what in text.odd)
        return join_documents(ids, spans if is_masked else None, origins), remarks

    def _tokenized(self, batch: Batch, origins: list[str]) -> Documents:
        ids = tokenized_rows(batch, origins)
        if self.supervise == "all":
            return join_documents(ids, None, origins)
        name = next(name for name in ("labels", "completion_mask", "assistant_masks") if name in batch)
        labels = tokenized_rows({**batch, "input_ids": batch[name]}, origins, name)
        for row, given, origin in zip(ids, labels, origins, strict=True):
            if len(row) != len(given):
                raise Refusal(f"{origin}: {name} has {len(given)} entries for {len(row)} input_ids; it must have one a token.")
        documents, flat = join_documents(ids, None, origins), join_documents(labels, None, origins).values
        if name != "labels":
            flat = np.where(flat == 1, documents.values, IGNORED)
        outside = (flat != IGNORED) & ((flat < 0) | (flat >= self.encoder.vocabulary))
        if outside.any():
            at = int(np.argmax(outside))
            row_number = int(np.searchsorted(documents.bounds, at, side="right")) - 1
            raise Refusal(
                f"{origins[row_number]}: label {flat[at]} is out of range: labels are token ids from 0 to "
                f"{self.encoder.vocabulary - 1}, or {IGNORED} where a token is not supervised."
            )
        return Documents(documents.values, documents.bounds, flat, origins, documents.whole)


def tokenized_rows(batch: Batch, origins: list[str], column: str = "input_ids") -> list[list[int]]:
    """Rows of integers as they are, without the padding that an attention mask marks.

    Raises:
        Refusal: a row that is no list of integers, or a mask that has holes.
    """
    masks = batch.get("attention_mask") or [None] * len(origins)
    rows = []
    for row, mask, origin in zip(batch["input_ids"], masks, origins, strict=True):
        if not isinstance(row, list) or not set(map(type, row)) <= {int}:
            raise Refusal(f"{origin}: {column} is {describe(row)}, and must be a list of integers. Correct or remove the row.")
        if row and (min(row) < -(2**31) or max(row) >= 2**31):
            odd = next(token for token in row if not -(2**31) <= token < 2**31)
            raise Refusal(f"{origin}: {column} holds {odd}, which is no token id of any model. Correct or remove the row.")
        if mask is not None and not isinstance(mask, list):
            raise Refusal(f"{origin}: attention_mask is {describe(mask)}, and must be a list. Correct or remove the row.")
        if mask is not None and 0 in mask:
            if len(mask) != len(row):
                raise Refusal(f"{origin}: attention_mask has {len(mask)} entries for {len(row)} of {column}.")
            first, last = (mask.index(1), len(mask) - mask[::-1].index(1)) if 1 in mask else (0, 0)
            if 0 in mask[first:last]:
                raise Refusal(
                    f"{origin}: attention_mask has zeros between ones. Only padding at the ends can be cut away; tokens that "
                    "should not be seen must not be in the row."
                )
            row = row[first:last]
        rows.append(row)
    return rows


def _is_all_supervised(text: ChatText) -> bool:
    """Whether the spans leave nothing out. Seen from the text: one token may join a short prompt with the answer's start."""
    end = 0
    for first, last in sorted(text.spans):
        if first > end:
            return False
        end = max(end, last)
    return 0 < len(text.text) <= end


def _alpaca_texts(batch: Batch, origins: list[str]) -> list[ChatText]:
    texts = []
    for row, origin in zip(rows_of(batch), origins, strict=True):
        alpaca_messages(row, origin)  # what it refuses
        prompt, answer = alpaca_prompt(row), row["output"]
        texts.append(ChatText(prompt + answer, [(len(prompt), len(prompt) + len(answer))]))
    return texts


def _prompts_and_completions(batch: Batch, origins: list[str]) -> list[ChatText]:
    """Prompt and completion as one text, the completion supervised."""
    for column in ("prompt", "completion"):
        check_texts(batch[column], column, origins)
    pairs = zip(batch["prompt"], batch["completion"], strict=True)
    return [ChatText(prompt + completion, [(len(prompt), len(prompt) + len(completion))]) for prompt, completion in pairs]


def describe_text(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> str:
    """The plan in words."""
    layouts = {"text": "text", "prompt_completion": "prompt and completion", "chat": "chats",
               "prompted_chat": "prompt and completion, as chats", "tokenized": "token ids",
               "alpaca": "instruction, input and output" + (", as chats" if tokenizer.chat_template else "")}  # fmt: skip
    supervised = {"all": "every token supervised", "completion": "the completion supervised",
                  "assistant": "the assistant's turns supervised", "labels": "supervised as labeled",
                  "answers": "the assistant's turns in the completion supervised"}  # fmt: skip
    if plan.layout == "alpaca" and plan.is_masked:
        return f"{layouts['alpaca']}; the output supervised"
    source = ""
    if plan.supervise in ("assistant", "answers"):
        marked = read_chat_template(tokenizer).marked
        source = ", found by " + ("the chat template's generation marks" if marked else "rendering each chat up to its turns")
    return f"{layouts[plan.layout]}, {supervised[plan.supervise]}{source}"
