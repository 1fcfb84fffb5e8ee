"""How each split will be read: from which columns, and what of it is supervised."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from toolkit.config import ClassificationConfig, DataConfig, Refusal
from toolkit.data.tokenize.columns import ALPACA, label_column, text_layout
from toolkit.data.tokenize.labels import Classes, check_label_settings, declared_names, find_classes
from toolkit.data.tokenize.masks import read_chat_template

MASKS = ("labels", "completion_mask", "assistant_masks")  # of tokenized rows; the latter two are TRL's
CHATS = ("chat", "prompted_chat")
PLAIN_PROMPTS = ("prompt_completion", "text_pairs", "text_lists", "text_answers")


@dataclass(frozen=True)
class Plan:
    """How one split is read.

    `layout` is text, prompt_completion, chat, prompted_chat (prompt and completion are lists of messages), alpaca or tokenized;
    `supervise` is all, completion, assistant (its turns), answers (its turns in the completion), labels (as the rows say),
    class, or pair (both answers of a preference).
    """

    layout: str
    supervise: str
    columns: tuple[str, ...]  # that are read
    classes: Classes | None = None
    margin: bool = False  # a pair tells by how much its chosen answer is the better one

    @property
    def is_masked(self) -> bool:
        return self.supervise not in ("all", "class")


def plan_text(splits: dict[str, Any], config: DataConfig, task: str) -> dict[str, Plan]:
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
        supervise = "all" if task == "lm" and layout != "tokenized" else _supervise(layout, present, config)
        plans[name] = Plan(layout, supervise, tuple(column for column in read if column in present))
    return plans


def plan_classification(
    splits: dict[str, Any], config: DataConfig, class_names: list[str] | None = None
) -> tuple[dict[str, Plan], list[str]]:
    """Plans for classification and regression; splits whose labels are withheld are left out, as the notes say.

    The classes are those of the data, or `class_names`, where a model has learned them already: then a label that is a number
    and no name is the place of one.
    """
    if not isinstance(config, ClassificationConfig):
        raise TypeError("classification needs the settings of ClassificationConfig beside those of DataConfig")
    if config.overlong == "split":
        raise Refusal("--overlong split: the label of an example can't be split. Choose truncate, drop or refuse.")
    labels = {name: label_column(columns_of(split, name), name) for name, split in splits.items()}
    classes = Classes([]) if config.problem_type == "regression" else find_classes(splits)
    if class_names:
        classes = replace(classes, names=class_names)
    places = class_names if class_names and not any(name.isdecimal() for name in class_names) else None
    check_label_settings(classes, config.problem_type, config.class_weights)
    plans, notes = {}, []
    for name, split in splits.items():
        if name != "train" and _is_withheld(split, labels[name]):
            notes.append(f"{name}: left out, as its labels are withheld")
            continue
        present = columns_of(split, name)
        layout = "tokenized" if "input_ids" in present else "text"
        texts = ("input_ids", "attention_mask") if layout == "tokenized" else ("text", "text_pair")
        columns = tuple(column for column in (*texts, labels[name], "origin") if column in present)
        plans[name] = Plan(layout, "class", columns, replace(classes, numbered=declared_names(split, labels[name]) or places))
    return plans, notes


def columns_of(split: Any, name: str) -> list[str]:
    """Names of the columns; those of the first row where a stream doesn't tell."""
    try:
        return list(split.column_names or next(iter(split)))
    except StopIteration:
        raise Refusal(f"The {name} split has no rows. Look at the source, and at --train-split and --eval-split") from None


def is_wrapped(config: DataConfig) -> bool:
    """Whether packing cuts documents to fill rows, so that none is too long."""
    return config.packing and config.packing_strategy == "wrapped" and config.overlong in ("truncate", "split")


def describe_plan(plan: Plan, tokenizer: Any) -> str:
    """The plan in words."""
    layouts = {"text": "text", "prompt_completion": "prompt and completion", "chat": "chats",
               "prompted_chat": "prompt and completion, as chats", "tokenized": "token ids",
               "alpaca": "instruction, input and output" + (", as chats" if tokenizer.chat_template else "")}  # fmt: skip
    if plan.classes is not None:
        number = len(plan.classes.names)
        return f"{layouts[plan.layout]}, labeled with " + (f"{number} classes" if number else "numbers")
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


def describe_settings(plans: dict[str, Plan], splits: Any, tokenizer: Any, config: DataConfig) -> list[str]:
    """What of the data or settings may surprise."""
    notes = []
    name, plan = next(iter(plans.items()))
    unread = [column for column in columns_of(splits[name], name) if column not in plan.columns]
    if unread:
        notes.append(f"columns not read: {', '.join(unread)}")
    if config.max_length > tokenizer.model_max_length:
        limit = f"the limit of {tokenizer.model_max_length} tokens that the tokenizer tells of its model"
        notes.append(f"--max-length {config.max_length} is above {limit}")
    if plan.layout in PLAIN_PROMPTS and tokenizer.chat_template:
        notes.append(
            "prompts are plain text, trained without the tokenizer's chat template; it is applied to messages ({role, content})"
        )
    if is_wrapped(config):
        notes.append("documents longer than a row go on in the next one (--packing-strategy wrapped)")
    return notes


def _supervise(layout: str, columns: list[str], config: DataConfig) -> str:
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


def _is_withheld(split: Any, label: str) -> bool:
    """Whether all labels are -1 or missing, as in the test splits of benchmarks."""
    from datasets import Dataset

    if not isinstance(split, Dataset) or not hasattr(split.features[label], "dtype"):
        return False
    return set(split.unique(label)) <= {-1, None}
