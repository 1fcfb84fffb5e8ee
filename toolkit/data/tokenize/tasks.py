"""From the columns of a dataset to tokenized documents with their labels, checked and counted before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from toolkit.config import DataConfig, Refusal
from toolkit.data.preflight.preflight import Piece, Preflight, example_pieces, part_pieces, print_preflight
from toolkit.data.tokenize.pair_cuts import PARTS, PARTS_OF_AN_ANSWER
from toolkit.data.tokenize.plans import Plan, describe_plan, describe_settings, plan_classification, plan_text
from toolkit.data.tokenize.preferences import ANSWER, PAIR, describe_preference, plan_preference, plan_unpaired
from toolkit.data.tokenize.prepare import STREAM_ROWS, tokenize, tokenize_stream

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


def tokenize_for_unpaired(splits: Any, tokenizer: Any, config: DataConfig) -> DatasetDict:
    """Single answers to a prompt, each marked desirable or undesirable. Prints the preflight.

    A row is an answer: its `input_ids` are the tokens of the prompt and of the answer, `prompt_tokens` and
    `completion_tokens` of them; the answer ends as those of pairs do. `desirable` is its mark; `answer` numbers the rows of
    all splits; `prompt_key`, a hash of the prompt's tokens, is the same for answers to one prompt; `length`,
    `supervised_tokens` and `origin`.

    Columns that are read: `prompt`, `completion` and `label`, true for a desirable answer, texts or chats; or pairs, in all
    the layouts of `tokenize_for_preference`, each of which makes two rows: the chosen answer, desirable, and the rejected one.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return _shown(prepare("unpaired", splits, tokenizer, config))


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
    """Tokenized splits and what was found on the way."""

    splits: Any
    preflight: Preflight


def prepare(task: str, splits: Any, tokenizer: Any, config: DataConfig, class_names: list[str] | None = None) -> Prepared:
    """Tokenize, check and count all splits for a task (lm, sft, preference, unpaired, classification), without printing.

    `class_names` are the classes in the order of their numbers, of a model that has them already.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    from datasets import Dataset

    given = dict(splits)
    plans, notes = plan_splits(task, given, tokenizer, config, class_names)
    is_stream = not all(isinstance(given[name], Dataset) for name in plans)
    work = tokenize_stream if is_stream else tokenize
    tokenized, figures = work({name: given[name] for name in plans}, plans, tokenizer, config)
    if "train" in plans and plans["train"].supervise == ANSWER:  # weights are of a loss; of rows to evaluate there is none
        notes += weight_notes(figures[0].classes, config)
    notes += [f"{name}: left out, as it has no rows" for name in plans if name not in tokenized]
    first = next(iter(tokenized))
    origin, example = example_of(next(iter(tokenized[first])), plans[first], tokenizer)
    preflight = Preflight(
        describe_rows(plans[first], tokenizer, config), config.max_length, config.overlong, figures, notes, example, origin,
        example_names=names_of_pieces(plans[first]), first_rows=STREAM_ROWS if is_stream else None,
    )  # fmt: skip
    return Prepared(tokenized, preflight)


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
        of_answers = {"preference": plan_preference, "unpaired": plan_unpaired}
        plans = of_answers[task](splits, config) if task in of_answers else plan_text(splits, config, task)
    notes += describe_settings(plans, splits, tokenizer, config)
    if next(iter(plans.values())).supervise == PAIR:
        notes.append("median, 95 % and longest are of a prompt with its longer answer")
    return plans, notes


def weight_notes(counts: dict[str, int], config: Any) -> list[str]:
    """A hint where desirable answers together don't weigh as much as undesirable ones, or up to a third more.

    That is the range of KTO, arXiv:2402.01306, section 4.2: n_D λ_D / (n_U λ_U) between 1 and 4/3.
    """
    desirable, undesirable = counts["desirable"], counts["undesirable"]
    weights = getattr(config, "desirable_weight", 1.0), getattr(config, "undesirable_weight", 1.0)
    share = desirable * weights[0] / (undesirable * weights[1])
    if 1 <= round(share, 2) <= 1.34:
        return []
    flag = "desirable" if share < 1 else "undesirable"
    least = weights[0] / share if share < 1 else weights[1] * share * 3 / 4
    return [
        f"with {desirable:,} desirable and {undesirable:,} undesirable answers the desirable ones weigh {share:.3g} times as "
        f"much; KTO's authors advise 1 to 1.33: --{flag}-weight {least:.3g} to {least * 4 / 3:.3g}"
    ]


def describe_rows(plan: Plan, tokenizer: Any, config: Any) -> str:
    """The plan in words."""
    if plan.supervise in (PAIR, ANSWER):
        return describe_preference(plan, getattr(config, "pairs_per_prompt", "best_worst"))
    return describe_plan(plan, tokenizer)


def names_of_pieces(plan: Plan) -> tuple[str, ...]:
    """Of the pieces of an example, where each is shown by itself."""
    return {PAIR: ("prompt", "chosen", "rejected"), ANSWER: ("prompt", "completion")}.get(plan.supervise, ())


def _shown(prepared: Prepared) -> Any:
    print_preflight(prepared.preflight)
    return prepared.splits


def example_of(row: dict[str, Any], plan: Plan, tokenizer: Any) -> tuple[str, list[Piece]]:
    """Where a row comes from, and its text in pieces."""
    origin = row.get("origin") or "row 0"
    if plan.supervise in (PAIR, ANSWER):
        parts = PARTS if plan.supervise == PAIR else PARTS_OF_AN_ANSWER
        bounds = list(accumulate((row[name] for name in parts), initial=0))
        if plan.supervise == ANSWER:
            origin = f"{origin}, {'desirable' if row['desirable'] else 'undesirable'}"
        return origin, part_pieces([row["input_ids"][start:end] for start, end in pairwise(bounds)], tokenizer.decode)
    labels = row["labels"] if plan.is_masked else None
    if plan.classes is not None:
        names, label = plan.classes.names, row["labels"]
        if isinstance(label, list):
            shown = [name for name, is_one in zip(names, label, strict=True) if is_one]
        else:
            shown = [names[label]] if names else [f"{label:g}"]
        origin = f"{origin}, labeled {', '.join(shown) or 'with no class'}"
    return origin, example_pieces(row["input_ids"], labels, tokenizer.decode)
