"""From the columns of a dataset to tokenised documents with their labels, checked and counted before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from toolkit.config import DataConfig, Refusal
from toolkit.data.tokenising.pair_cuts import PARTS
from toolkit.data.tokenising.plans import Plan, describe_plan, describe_settings, plan_classification, plan_text
from toolkit.data.tokenising.preferences import PAIR, describe_preference, plan_preference
from toolkit.data.tokenising.preflight import Piece, Preflight, example_pieces, part_pieces, print_preflight
from toolkit.data.tokenising.prepare import STREAM_ROWS, tokenise, tokenise_stream

if TYPE_CHECKING:
    from datasets import DatasetDict


def tokenize_for_lm(splits: Any, tokenizer: Any, config: DataConfig) -> DatasetDict:
    """Documents of which every token is supervised, from any layout of columns. Prints the preflight.

    A document begins with BOS if the tokenizer uses one and ends with the end-of-text token, each once. Columns:
    `input_ids`, `length`, `supervised_tokens` and `origin`.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return _shown(prepare("lm", splits, tokenizer, config))


def tokenize_for_sft(splits: Any, tokenizer: Any, config: DataConfig) -> DatasetDict:
    """Documents of which the answers are supervised: completions, or the assistant's turns. Prints the preflight.

    Columns: as for `tokenize_for_lm`, and `labels`, aligned with `input_ids`, -100 where a token is not supervised. There
    are no labels where all tokens are.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return _shown(prepare("sft", splits, tokenizer, config))


def tokenize_for_preference(splits: Any, tokenizer: Any, config: DataConfig) -> DatasetDict:
    """Pairs of a better and a worse answer to a prompt. Prints the preflight.

    A row is a pair: its `input_ids` are the tokens of the prompt, of the chosen and of the rejected answer, one behind the
    other, `prompt_tokens`, `chosen_tokens` and `rejected_tokens` of them. `length` is their sum, `supervised_tokens` that of
    the answers: each counts whole, with the end-of-text or end-of-turn token that it ends with. `pair` numbers the rows of
    all splits; `margin` says by how much the chosen answer scores higher, where the data have scores; and `origin`.

    Columns that are read: `chosen` and `rejected`, texts or chats, with `prompt` or both beginning with it; or `prompt` and
    several answers (`responses`, `completions`, `answers`, `generations`) with `scores` or `ranks`, beside or in them, of
    which the best and the worst become a pair. Chats may have `tools` and `chat_template_kwargs`.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return _shown(prepare("preference", splits, tokenizer, config))


def tokenize_for_classification(splits: Any, tokenizer: Any, config: DataConfig) -> DatasetDict:
    """Texts, or pairs of them (`text_pair`), with a label as the model takes it. Prints the preflight.

    Columns: `input_ids`, `length`, `labels` (int; list of float, one a class; or float), with `class_weights` also
    `weight`, for pairs `token_type_ids` where the tokenizer has them, and `origin`. `config` holds the settings of
    ClassificationConfig too.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return _shown(prepare("classification", splits, tokenizer, config))


@dataclass(frozen=True)
class Prepared:
    """Tokenised splits and what was found on the way."""

    splits: Any
    preflight: Preflight


def prepare(
    task: str, splits: Any, tokenizer: Any, config: DataConfig, class_names: list[str] | None = None
) -> Prepared:
    """Tokenise, check and count all splits for a task (lm, sft, preference, classification), without printing.

    `class_names` are the classes in the order of their numbers, of a model that has them already.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    from datasets import Dataset

    given = dict(splits)
    plans, notes = plan_splits(task, given, tokenizer, config, class_names)
    is_stream = not all(isinstance(given[name], Dataset) for name in plans)
    work = tokenise_stream if is_stream else tokenise
    tokenised, figures = work({name: given[name] for name in plans}, plans, tokenizer, config)
    notes += [f"{name}: left out, as it has no rows" for name in plans if name not in tokenised]
    first = next(iter(tokenised))
    origin, example = example_of(next(iter(tokenised[first])), plans[first], tokenizer)
    preflight = Preflight(
        describe_rows(plans[first], tokenizer), config.max_length, config.overlong, figures, notes, example, origin,
        example_names=names_of_pieces(plans[first]), first_rows=STREAM_ROWS if is_stream else None,
    )  # fmt: skip
    return Prepared(tokenised, preflight)


def plan_splits(
    task: str, splits: dict[str, Any], tokenizer: Any, config: DataConfig, class_names: list[str] | None = None
) -> tuple[dict[str, Plan], list[str]]:
    """How each split is read for a task, and what of the data or settings may surprise.

    Raises:
        Refusal: columns or settings that can't be trained with, or a tokenizer without an end-of-text token.
    """
    notes = list[str]()
    if task == "classification":
        plans, notes = plan_classification(splits, config, class_names)
        if not plans:
            raise Refusal("The labels are withheld: each is -1 or missing. Take another split.")
    else:
        if tokenizer.eos_token_id is None:
            raise Refusal("The tokenizer has no end-of-text token: no text would end. Set eos_token in tokenizer_config.json")
        plans = plan_preference(splits, config) if task == "preference" else plan_text(splits, config, task)
    notes += describe_settings(plans, splits, tokenizer, config)
    if next(iter(plans.values())).supervise == PAIR:
        notes.append("median, 95 % and longest are of a prompt with its longer answer")
    return plans, notes


def describe_rows(plan: Plan, tokenizer: Any) -> str:
    """The plan in words."""
    return describe_preference(plan) if plan.supervise == PAIR else describe_plan(plan, tokenizer)


def names_of_pieces(plan: Plan) -> tuple[str, ...]:
    """Of the pieces of an example, where each is shown by itself."""
    return ("prompt", "chosen", "rejected") if plan.supervise == PAIR else ()


def _shown(prepared: Prepared) -> Any:
    print_preflight(prepared.preflight)
    return prepared.splits


def example_of(row: dict[str, Any], plan: Plan, tokenizer: Any) -> tuple[str, list[Piece]]:
    """Where a row comes from, and its text in pieces."""
    origin = row.get("origin") or "row 0"
    if plan.supervise == PAIR:
        bounds = list(accumulate((row[name] for name in PARTS), initial=0))
        return origin, part_pieces([row["input_ids"][start:end] for start, end in pairwise(bounds)], tokenizer.decode)
    labels = row["labels"] if plan.is_masked else None
    if plan.classes is not None:
        names, label = plan.classes.names, row["labels"]
        if isinstance(label, list):
            shown = [name for name, is_one in zip(names, label, strict=True) if is_one]
        else:
            shown = [names[label]] if names else [f"{label:g}"]
        origin = f"{origin}, labelled {', '.join(shown) or 'with no class'}"
    return origin, example_pieces(row["input_ids"], labels, tokenizer.decode)
