"""Which columns of a dataset hold preferences, and the two answers that a row prefers one to the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from toolkit.config import DataConfig, Refusal
from toolkit.data.tokenize.columns import Plan, columns_of, describe, is_finite, is_wrapped, wrong_columns

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

Splits = Mapping[str, "Dataset | IterableDataset"]
PAIR = "pair"  # what a plan supervises: both answers of a pair
ANSWER = "answer"  # or a single one
PARTS = ("prompt_tokens", "chosen_tokens", "rejected_tokens")  # columns of a pair, in the order of its tokens
PARTS_OF_AN_ANSWER = ("prompt_tokens", "completion_tokens")
ANSWER_LISTS = ("responses", "completions", "answers", "generations")
SCORE_LISTS = ("scores", "ratings", "rating", "rewards")  # one number an answer, the highest the best
RANK_LISTS = ("ranks", "ranking", "rank")  # one number an answer, the lowest the best
SCORE_PAIRS = (
    ("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
)  # fmt: skip
_TEXT_KEYS = ("response", "answer", "completion", "text", "content")  # of an answer that is an object
_SCORE_KEYS = ("overall_score", "score", "rating", "reward")
_RANK_KEYS = ("rank",)
_UNPAIRED = "prompt, completion and label (true for a desirable answer); or chosen and rejected, two answers a row"
_LAYOUTS = "chosen and rejected, with or without prompt; or prompt and responses (a list) with scores or ranks"


@dataclass(frozen=True)
class Preference:
    """A prompt (None: what both answers begin with) with the better and the worse answer, texts or lists of messages."""

    prompt: Any
    chosen: Any
    rejected: Any
    margin: float | None  # by how much chosen scores higher


def plan_preference(splits: Splits, config: DataConfig, pairs_per_prompt: str = "best_worst") -> dict[str, Plan]:
    """Plans for preference data. `layout` is text_pairs or chat_pairs, or text_lists or chat_lists (several answers a row).

    Raises:
        Refusal: columns that are no preferences, or a setting that has no effect on them.
    """
    _check_settings(splits, config)
    plans = {name: _plan(split, name) for name, split in splits.items()}
    if pairs_per_prompt != "best_worst" and not any(plan.layout.endswith("lists") for plan in plans.values()):
        raise Refusal(f"--pairs-per-prompt {pairs_per_prompt} has no effect: the rows are pairs, not lists. Remove it.")
    return plans


def plan_unpaired(splits: Splits, config: DataConfig) -> dict[str, Plan]:
    """Plans for single answers that are marked desirable or not. `layout` is text_answers or chat_answers; or that of the
    pairs of which each makes two answers.

    Raises:
        Refusal: as for pairs.
    """
    plans = {}
    for name, split in splits.items():
        present = columns_of(split, name)
        if {"prompt", "completion", "label"} <= set(present):
            first: dict[str, Any] = next(iter(split), {})
            is_chat = _is_chat(first.get("prompt")) or _is_chat(first.get("completion"))
            read = ("prompt", "completion", "label", *(("tools", "chat_template_kwargs") if is_chat else ()), "origin")
            columns = tuple(column for column in read if column in present)
            plans[name] = Plan("chat_answers" if is_chat else "text_answers", ANSWER, columns)
        elif not set(present) & {"chosen", "rejected", *ANSWER_LISTS}:
            raise Refusal(wrong_columns(present, name, _UNPAIRED, (("prompt", "completion", "label"), ("chosen", "rejected"))))
    paired = {name: split for name, split in splits.items() if name not in plans}
    _check_settings(splits, config)
    plans |= {name: replace(_plan(split, name), supervise=ANSWER) for name, split in paired.items()}
    return {name: plans[name] for name in splits}


def describe_preference(plan: Plan, pairs_per_prompt: str = "best_worst") -> str:
    """The plan in words."""
    kind = "text" if plan.layout.startswith("text") else "chats"
    if plan.layout.endswith("answers"):
        return f"single answers, {kind}: prompt, completion and label; the answer supervised"
    split = ", each made into a desirable answer and an undesirable one" if plan.supervise == ANSWER else ""
    supervised = "" if split else "; both answers supervised"
    if plan.layout.endswith("lists"):
        answers, order = _list_columns(plan.columns)
        order = order or f"the {'scores' if plan.margin else 'ranks'} in them"
        by = f"{order} (the {'highest' if plan.margin else 'lowest'} is the best)"
        which = {"best_worst": "the best and the worst", "best_others": "the best with each worse one",
                 "all": "each with each worse one"}[pairs_per_prompt]  # fmt: skip
        return f"pairs of {kind}: of each row's {answers} {which} by {by}{split}{supervised}"
    prompt = "" if "prompt" in plan.columns else ", the prompt being what both begin with"
    return f"pairs of {kind}: chosen and rejected{prompt}{split}{supervised}"


def read_preferences(
    row: dict[str, Any], plan: Plan, origin: str, pairs_per_prompt: str = "best_worst"
) -> tuple[list[Preference], dict[str, int]]:
    """The preferences of a row, none where no answer of a list is better than another; and how many answers are left out.

    Of a list its best answer, chosen, with its worst one (`best_worst`; the first where several are alike), the best with
    each worse one (`best_others`), or each with each worse one (`all`); those first whose answers lie furthest apart. Answers
    without a score (null or NaN) are left out ("unscored"). An answer that is in a list twice counts once, and one that is
    there with different scores not at all, as it is unclear which of them was meant ("contradicted").
    """
    if plan.layout.endswith("lists"):
        return _preferences_of_a_list(row, plan, origin, pairs_per_prompt)
    margin = None
    if plan.margin:
        numbers = [_number(row[column], column, origin) for column in _margin_columns(plan.columns)]
        margin = numbers[0] if len(numbers) == 1 else numbers[0] - numbers[1]
    return [Preference(row.get("prompt"), row["chosen"], row["rejected"], margin)], {}


def _check_settings(splits: Splits, config: DataConfig) -> None:
    from datasets import Dataset

    for flag, value in (("completion", config.completion_only_loss), ("assistant", config.assistant_only_loss)):
        if value is not None:
            raise Refusal(f"--{flag}-only-loss has no effect: answers count whole, and prompts never. Remove it.")
    if is_wrapped(config):
        raise Refusal("--packing-strategy wrapped would cut pairs to fill rows, and a pair can't be cut. Use bfd.")
    if not all(isinstance(split, Dataset) for split in splits.values()):
        raise Refusal("Preference data can't be read as a stream: each pair has its number in the split. Remove --streaming.")


def _plan(split: Dataset | IterableDataset, name: str) -> Plan:
    present = columns_of(split, name)
    first: dict[str, Any] = next(iter(split), {})
    if {"chosen", "rejected"} <= set(present):
        scores, shape = _margin_columns(present), "pairs"
        read: tuple[str, ...] = ("prompt", "chosen", "rejected", *scores)
        is_chat, has_margin = _is_chat(first.get("prompt")) or _is_chat(first["chosen"]), bool(scores)
    elif "prompt" in present and set(ANSWER_LISTS) & set(present):
        answers, order = _list_columns(present)
        entry = next(iter(first.get(answers) or []), None)
        keys = [key for key in (*_SCORE_KEYS, *_RANK_KEYS) if isinstance(entry, dict) and key in entry]
        if order is None and not keys:
            raise Refusal(
                f"The {name} split has several answers a row ({answers}) and nothing that ranks them. Give each a "
                "number in a column scores (the highest is best) or ranks (the lowest is best): --rename-columns old=scores"
            )
        read, shape = ("prompt", answers, *([order] if order else [])), "lists"
        is_chat = _is_chat(first["prompt"]) or isinstance(_content(entry), list)
        has_margin = (order or keys[0]) in (*SCORE_LISTS, *_SCORE_KEYS)
    else:
        lists = [("prompt", column) for column in ANSWER_LISTS if column in present]
        raise Refusal(wrong_columns(present, name, _LAYOUTS, (("chosen", "rejected"), *lists)))
    read += (*(("tools", "chat_template_kwargs") if is_chat else ()), "origin")
    layout = f"{'chat' if is_chat else 'text'}_{shape}"
    return Plan(layout, PAIR, tuple(column for column in read if column in present), margin=has_margin)


def _is_chat(value: Any) -> bool:
    return isinstance(value, (list, dict))


def _list_columns(columns: Collection[str]) -> tuple[str, str | None]:
    """The column of the answers, and that of their scores or else ranks; None where these are in the answers."""
    answers = next(column for column in ANSWER_LISTS if column in columns)
    return answers, next((column for column in (*SCORE_LISTS, *RANK_LISTS) if column in columns), None)


def _margin_columns(columns: Collection[str]) -> tuple[str, ...]:
    """The columns for how much chosen is better: outright, or as the scores of both."""
    pairs = (pair for pair in SCORE_PAIRS if set(pair) <= set(columns))
    return ("margin",) if "margin" in columns else next(pairs, ())


def _preferences_of_a_list(
    row: dict[str, Any], plan: Plan, origin: str, pairs_per_prompt: str
) -> tuple[list[Preference], dict[str, int]]:
    column, order = _list_columns(plan.columns)
    answers = row[column]
    if not isinstance(answers, list):
        raise Refusal(f"{origin}: {column} is {describe(answers)}, and must be a list of answers. Correct or remove the row.")
    if order is None:
        order, given = (
            f"the {'score' if plan.margin else 'rank'} in {column}",
            [_stated(answer, plan.margin, column, origin) for answer in answers],
        )
    else:
        given = row[order]
        if not isinstance(given, list) or len(given) != len(answers):
            raise Refusal(
                f"{origin}: {order} is {describe(given)}, and must be a list with one number for each of the {len(answers)} "
                f"{column}. Correct or remove the row."
            )
    contents = [_content(answer) for answer in answers]
    stated = [(number, place) for place, number in enumerate(given) if number is not None and number == number]  # not NaN
    sign = 1 if plan.margin else -1
    scored, contradicted = _once_each(contents, [(_number(number, order, origin) * sign, place) for number, place in stated])
    # the best first, the worst last; of answers that score alike the first one counts
    best = sorted(scored, key=lambda item: (-item[0], item[1]))
    worst = sorted(scored)
    couples = {
        "best_worst": [(best[0], worst[0])] if scored else [],
        "best_others": [(best[0], other) for other in worst],
        "all": [(better, other) for better in best for other in worst],
    }[pairs_per_prompt]
    found = [
        (better[0] - other[0], contents[better[1]], contents[other[1]]) for better, other in couples if better[0] > other[0]
    ]
    found.sort(key=lambda item: -item[0])  # stable
    preferences = [
        Preference(row["prompt"], chosen, rejected, lead if plan.margin else None) for lead, chosen, rejected in found
    ]
    return preferences, {"contradicted": contradicted, "unscored": len(given) - len(stated)}


def _once_each(contents: list[Any], scored: list[tuple[float, int]]) -> tuple[list[tuple[float, int]], int]:
    """Each distinct answer once, at its first place, without those that have two scores; and how many these are."""
    alike: list[list[tuple[float, int]]] = []  # a search, as lists of messages can't be hashed
    for item in scored:
        group = next((group for group in alike if contents[group[0][1]] == contents[item[1]]), None)
        if group is None:
            alike.append([item])
        else:
            group.append(item)
    agreed = [group[0] for group in alike if len({score for score, _ in group}) == 1]
    return agreed, len(alike) - len(agreed)


def _stated(answer: Any, is_score: bool, column: str, origin: str) -> Any:
    """The score, or else the rank, that an answer of a list has next to its text."""
    keys = [key for key in (_SCORE_KEYS if is_score else _RANK_KEYS) if isinstance(answer, dict) and key in answer]
    if not keys:
        kind = "score" if is_score else "rank"
        raise Refusal(
            f"{origin}: an answer of {column} is {describe(answer)}, and must have a {kind}. Correct or remove the row."
        )
    return answer[keys[0]]


def _content(answer: Any) -> Any:
    """An answer of a list: a text or a list of messages, alone or in an object next to its score."""
    keys = [key for key in _TEXT_KEYS if isinstance(answer, dict) and key in answer]
    return answer[keys[0]] if keys else answer


def _number(value: Any, column: str, origin: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_finite(value):
        raise Refusal(
            f"{origin}: {column} is {describe(value)}, and must be a finite number. Correct or remove the row, or leave the "
            "column out by renaming it, as --rename-columns old=unused"
        )
    return float(value)
