"""Tokenized splits of each task: what `tokenize_for_*` read, what they return, and the report next to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from toolkit.config import DataConfig, RankedAnswersConfig, Refusal
from toolkit.data.report import DataReport, Piece, example_pieces, part_pieces
from toolkit.data.tokenize.answers import weight_notes
from toolkit.data.tokenize.classification import describe_classification, plan_classification
from toolkit.data.tokenize.columns import Plan, columns_of, is_wrapped
from toolkit.data.tokenize.language import describe_text, plan_text
from toolkit.data.tokenize.preferences import (
    ANSWER,
    PAIR,
    PARTS,
    PARTS_OF_AN_ANSWER,
    describe_preference,
    plan_preference,
    plan_unpaired,
)
from toolkit.data.tokenize.prepare import STREAM_ROWS, tokenize_splits, tokenize_streams

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

PLAIN_PROMPTS = ("prompt_completion", "text_pairs", "text_lists", "text_answers")

Splits = Mapping[str, "Dataset | IterableDataset"]


class Tokenized(dict[str, Any]):
    """Tokenized splits by name (datasets, or streams), and `report`: what was counted, for `print_data_report`."""

    def __init__(self, splits: Splits, report: DataReport) -> None:
        super().__init__(splits)
        self.report = report


def tokenize_for_lm(splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Tokenized:
    """Documents of which every token is supervised, from any layout of columns.

    A document begins with BOS if the tokenizer uses one and ends with the end-of-text token, each once. Columns:
    `input_ids`, `length`, `supervised_tokens` and `origin`.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return prepare("lm", splits, tokenizer, config)


def tokenize_for_sft(splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Tokenized:
    """Documents of which the answers are supervised: completions, or the assistant's turns.

    Columns: as for `tokenize_for_lm`, and `labels`, aligned with `input_ids`, -100 where a token is not supervised. There
    are no labels where all tokens are.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return prepare("sft", splits, tokenizer, config)


def tokenize_for_preference(
    splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig, *, pairs_per_prompt: str = "best_worst",
    max_pairs_per_prompt: int = 10,
) -> Tokenized:  # fmt: skip
    """Pairs of a better and a worse answer to a prompt.

    A row is a pair: its `input_ids` are the tokens of the prompt, of the chosen and of the rejected answer, one behind the
    other, `prompt_tokens`, `chosen_tokens` and `rejected_tokens` of them. `length` is their sum, `supervised_tokens` that of
    the answers: each counts whole, with the end-of-text or end-of-turn token that it ends with. `pair` numbers the rows of
    all splits; `margin` is by how much the chosen answer scores higher, where the data have scores; and `origin`.

    Columns that are read: `chosen` and `rejected`, texts or chats, with `prompt` or both beginning with it; or `prompt` and
    several answers (`responses`, `completions`, `answers`, `generations`) with `scores` or `ranks`, next to or in them. Chats
    may have `tools` and `chat_template_kwargs`.

    Args:
        pairs_per_prompt: which pairs a list of answers makes: best_worst, best_others or all.
        max_pairs_per_prompt: most pairs of one list.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    ranked = RankedAnswersConfig(pairs_per_prompt=pairs_per_prompt, max_pairs_per_prompt=max_pairs_per_prompt)
    return prepare("preference", splits, tokenizer, config, ranked=ranked)


def tokenize_for_unpaired(
    splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig, *, desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tokenized:  # fmt: skip
    """Single answers to a prompt, each marked desirable or undesirable.

    A row is an answer: its `input_ids` are the tokens of the prompt and of the answer, `prompt_tokens` and
    `completion_tokens` of them; the answer ends as those of pairs do. `desirable` is its mark; `answer` numbers the rows of
    all splits; `prompt_key`, a hash of the prompt's tokens, is the same for answers to one prompt; `length`,
    `supervised_tokens` and `origin`.

    Columns that are read: `prompt`, `completion` and `label`, true for a desirable answer, texts or chats; or pairs, in all
    the layouts of `tokenize_for_preference`, each of which makes two rows: the chosen answer, desirable, and the rejected one.

    Args:
        desirable_weight, undesirable_weight: those of the loss; the report notes where they leave one kind without weight.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    tokenized = prepare("unpaired", splits, tokenizer, config)
    report, first = tokenized.report, tokenized.report.splits[0]
    notes = weight_notes(first.classes, desirable_weight, undesirable_weight) if first.name == "train" else []
    return Tokenized(tokenized, replace(report, notes=[*report.notes, *notes]))


def tokenize_for_classification(splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Tokenized:
    """Texts, or pairs of them (`text_pair`), with a label as the model takes it.

    Columns: `input_ids`, `length`, `labels` (int; list of float, one a class; or float), with `class_weights` also
    `weight`, for pairs `token_type_ids` where the tokenizer has them, and `origin`. `config` holds the settings of
    ClassificationConfig too.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return prepare("classification", splits, tokenizer, config)


def prepare(
    task: str, splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig, *,
    class_names: list[str] | None = None, ranked: RankedAnswersConfig | None = None,
) -> Tokenized:  # fmt: skip
    """Tokenize, check and count all splits for a task (lm, sft, preference, unpaired, classification).

    `class_names` are the classes in the order of their numbers, of a model that has them already.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    from datasets import Dataset

    plans, notes = plan_splits(task, splits, tokenizer, config, class_names, ranked)
    is_stream = not all(isinstance(splits[name], Dataset) for name in plans)
    work = tokenize_streams if is_stream else tokenize_splits
    tokenized, counts = work({name: splits[name] for name in plans}, plans, tokenizer, config, ranked)
    notes += [f"{name}: left out, as it has no rows" for name in plans if name not in tokenized]
    first = next(iter(tokenized))
    origin, example = example_of(next(iter(tokenized[first])), plans[first], tokenizer)
    return Tokenized(tokenized, DataReport(
        describe_plan(plans[first], tokenizer, ranked), config.max_length, config.overlong, counts, notes, example, origin,
        example_names=part_names(plans[first]), first_rows=STREAM_ROWS if is_stream else None,
    ))  # fmt: skip


def plan_splits(
    task: str, splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig,
    class_names: list[str] | None = None, ranked: RankedAnswersConfig | None = None,
) -> tuple[dict[str, Plan], list[str]]:  # fmt: skip
    """How each split is read for a task, and what of the data or settings may surprise.

    Raises:
        Refusal: columns or settings that can't be trained with, or a tokenizer without an end-of-text token.
    """
    notes = list[str]()
    if task == "classification":
        plans, notes = plan_classification(splits, config, class_names)
        if not plans:
            raise Refusal("The labels are withheld: each is -1 or missing. Take another split.")
    elif tokenizer.eos_token_id is None:
        raise Refusal("The tokenizer has no end-of-text token: no text would end. Set eos_token in tokenizer_config.json")
    elif task == "preference":
        plans = plan_preference(splits, config, ranked.pairs_per_prompt if ranked else "best_worst")
    else:
        plans = plan_unpaired(splits, config) if task == "unpaired" else plan_text(splits, config, task)
    name, plan = next(iter(plans.items()))
    unread = [column for column in columns_of(splits[name], name) if column not in plan.columns]
    if unread:
        notes.append(f"columns not read: {', '.join(unread)}")
    if config.max_length > tokenizer.model_max_length:
        limit = f"the limit of {tokenizer.model_max_length} tokens that the tokenizer has for its model"
        notes.append(f"--max-length {config.max_length} is above {limit}")
    if plan.layout in PLAIN_PROMPTS and tokenizer.chat_template:
        notes.append(
            "prompts are plain text, trained without the tokenizer's chat template; it is applied to messages ({role, content})"
        )
    if is_wrapped(config):
        notes.append("documents longer than a row continue in the next one (--packing-strategy wrapped)")
    if plan.supervise == PAIR:
        notes.append("median, 95 % and longest are of a prompt with its longer answer")
    return plans, notes


def describe_plan(plan: Plan, tokenizer: PreTrainedTokenizerBase, ranked: RankedAnswersConfig | None) -> str:
    """The plan in words."""
    if plan.supervise in (PAIR, ANSWER):
        return describe_preference(plan, ranked.pairs_per_prompt if ranked else "best_worst")
    return describe_classification(plan) if plan.classes is not None else describe_text(plan, tokenizer)


def part_names(plan: Plan) -> tuple[str, ...]:
    """Names of the parts of an example, where each is shown by itself."""
    return {PAIR: ("prompt", "chosen", "rejected"), ANSWER: ("prompt", "completion")}.get(plan.supervise, ())


def example_of(row: dict[str, Any], plan: Plan, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Piece]]:
    """Where a tokenized row comes from, and its text in pieces."""
    origin = row.get("origin") or "row 0"

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    if plan.supervise in (PAIR, ANSWER):
        parts = PARTS if plan.supervise == PAIR else PARTS_OF_AN_ANSWER
        bounds = list(accumulate((row[name] for name in parts), initial=0))
        if plan.supervise == ANSWER:
            origin = f"{origin}, {'desirable' if row['desirable'] else 'undesirable'}"
        return origin, part_pieces([row["input_ids"][start:end] for start, end in pairwise(bounds)], decode)
    labels = row["labels"] if plan.is_masked else None
    if plan.classes is not None:
        names, label = plan.classes.names, row["labels"]
        if isinstance(label, list):
            shown = [name for name, is_one in zip(names, label, strict=True) if is_one]
        else:
            shown = [names[label]] if names else [f"{label:g}"]
        origin = f"{origin}, labeled {', '.join(shown) or 'with no class'}"
    return origin, example_pieces(row["input_ids"], labels, decode)
