"""Multiple choice: a context or a question with its choices and which of them is right, to pairs, one behind the other.

The rows become lists as those of a reranker do: the choices are the documents, of which one has the label 1.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit.config import DataConfig, Refusal
from toolkit.data.report import Piece, part_pieces
from toolkit.data.tokenize.classification import is_withheld, pair_frame
from toolkit.data.tokenize.columns import Plan, as_whole, check_texts, columns_of, describe, wrong_columns
from toolkit.data.tokenize.documents import Encoder, check_room
from toolkit.data.tokenize.format import Format, Splits
from toolkit.data.tokenize.ranking import ListRows, QueryList, list_columns, pieces_of
from toolkit.system.console import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXTS = ("context", "article", "sent1", "ctx", "premise")
_QUESTIONS = ("question", "sent2")
_LISTS = ("choices", "options", "endings")
_NUMBERED = ("ending", "choice", "option")
_ANSWERS = ("label", "answer", "answerKey")
_WITHHELD = (-1, None, "", "-1")  # of SWAG, HellaSwag and CommonsenseQA
_NEEDED = (
    "question or context, choices (a list; also options, endings, ending0, ending1 ...) and label (also answer, "
    "answerKey), the number of the right one from 0, or its letter"
)


class Question(NamedTuple):
    """A question: two texts that are read together for each choice, and which is right."""

    asked: str
    choices: list[str]
    right: int


class _Names(NamedTuple):
    """The columns of a split that are read."""

    texts: tuple[str, ...]  # context and question, or one of them
    choices: tuple[str, ...]
    answer: str


def multiple_choice_format() -> Format:
    """How questions with choices are read."""

    def rows(plan: Plan, encoder: Encoder, config: DataConfig) -> ListRows:
        frame = pair_frame(encoder.tokenizer)
        check_room(config.max_length, frame.size, texts=2)
        return ListRows(encoder, frame, _as_list, "bce", config.max_length, config.overlong, whole_documents=True)

    return Format(
        "multiple_choice", _plan, rows, list_columns, lambda plan, tokenizer: f"questions with choices ({plan.layout})", _show,
        part_names=("question", "right choice", "other choice"), supervises_tokens=False, ends_texts=False,
        unsplit="a question has one answer, and can't be split",
    )  # fmt: skip


def read_questions(split: Iterable[dict[str, Any]], name: str) -> Iterator[Question]:
    """The questions of a split, checked."""
    for number, row in enumerate(split):
        yield read_question(row, row.get("origin") or f"row {number} of the {name} split")


def read_question(row: dict[str, Any], origin: str) -> Question:
    """A row's question: with a context and a question the latter begins each choice, as in transformers' examples for SWAG.

    Raises:
        Refusal: an empty text, fewer than two choices, one that is no text, or an answer that is none of them.
    """
    names = _names(list(row))
    assert names is not None
    texts = names.texts[-1:] if row[names.texts[0]] in (None, "") else names.texts  # a context may be missing, a question not
    for text in texts:
        check_texts([row[text]], text, [origin])
    choices, letters = _choices(row, names, origin)
    right = _right(row[names.answer], names.answer, letters, origin)
    if len(texts) == 2:
        choices = [f"{row[texts[1]]} {choice}" for choice in choices]
    return Question(row[texts[0]], choices, right)


def _as_list(row: dict[str, Any], origin: str) -> QueryList:
    asked, choices, right = read_question(row, origin)
    return QueryList(asked, choices, [float(i == right) for i in range(len(choices))], [origin] * len(choices))


def _plan(splits: Splits, config: DataConfig) -> tuple[dict[str, Plan], list[str]]:
    plans, notes = {}, ["median, 95 % and longest are of the longest choice of a question, with the question"]
    for name, split in splits.items():
        present = columns_of(split, name)
        names = _names(present)
        if names is None:
            raise Refusal(wrong_columns(present, name, _NEEDED, (("question", "choices", "label"),)))
        if name != "train" and is_withheld(split, names.answer, _WITHHELD):
            notes.append(f"{name}: left out, as its answers are withheld")
            continue
        columns = (*names.texts, *names.choices, names.answer, *(["origin"] if "origin" in present else []))
        layout = ", ".join((*names.texts, f"{names.choices[0]} ..." if len(names.choices) > 1 else names.choices[0]))
        plans[name] = Plan(layout, "class", columns)
    if not plans:
        raise Refusal("The answers of all questions are withheld, so there is nothing to compare with: choose another split.")
    return plans, notes


def _names(columns: Sequence[str]) -> _Names | None:
    """None where the columns are not those of questions with choices."""
    found = [next((name for name in names if name in columns), None) for names in (_CONTEXTS, _QUESTIONS, _LISTS, _ANSWERS)]
    context, question, choices, answer = found
    texts = tuple(text for text in (context, question) if text)
    many = (choices,) if choices else _numbered_choices(columns)
    return _Names(texts, many, answer) if texts and many and answer else None


def is_multiple_choice(columns: Sequence[str]) -> bool:
    """Whether rows with these columns are questions with choices."""
    return _names(columns) is not None


def _numbered_choices(columns: Sequence[str]) -> tuple[str, ...]:
    """Columns such as ending0, ending1 ..., in the order of their numbers; none where there are not two of them."""
    for kind in _NUMBERED:
        numbers = sorted(int(name.removeprefix(kind)) for name in columns if name.removeprefix(kind).isdecimal())
        found = tuple(name for name in (f"{kind}{number}" for number in numbers) if name in columns)
        if len(found) > 1:
            return found
    return ()


def _choices(row: dict[str, Any], names: _Names, origin: str) -> tuple[list[str], list[str]]:
    """The choices, and the letters that they are called by."""
    if len(names.choices) > 1:
        values: Any = [row[name] for name in names.choices]
        while values and values[-1] in (None, ""):  # a table has as many columns as its longest row needs
            values.pop()
        given = None
    else:
        values, given = row[names.choices[0]], None
        if isinstance(values, dict):  # ARC: {"text": [...], "label": ["A", "B", ...]}
            values, given = values.get("text"), values.get("label")
    name = names.choices[0]
    if not isinstance(values, list):
        raise Refusal(f"{origin}: {name} is {describe(values)}, and must be a list of texts. Correct or remove the row.")
    if len(values) < 2:
        count = "one choice" if values else "no choice"
        raise Refusal(f"{origin}: {name} has {count}: there is nothing to choose from. Add others, or remove the row.")
    for number, value in enumerate(values):
        which = names.choices[number] if len(names.choices) > 1 else f"choice {number} of {name}, counted from 0,"
        if not isinstance(value, str):
            texts = sum(isinstance(each, str) for each in values)
            others = f" ({texts} of the {len(values)} are text)" if texts else ""
            raise Refusal(f"{origin}: {which} is {describe(value)}, and must be text{others}. Correct or remove the row.")
        if not value.strip():
            raise Refusal(f"{origin}: {which} is empty. Fill it in or remove the row.")
    if given is not None and len(given) != len(values):
        raise Refusal(f"{origin}: {name} has {len(given)} labels for {len(values)} choices. Correct or remove the row.")
    if given is not None:
        return values, [str(each) for each in given]
    letters = string.ascii_uppercase
    return values, [*letters[: len(values)], *(str(number) for number in range(len(letters), len(values)))]


def _right(value: Any, name: str, letters: list[str], origin: str) -> int:
    """The number of the right choice, from 0."""
    last = len(letters) - 1
    if isinstance(value, str) and value.strip() in letters:
        return letters.index(value.strip())
    number = int(value) if isinstance(value, str) and value.strip().lstrip("-").isdecimal() else as_whole(value)
    if isinstance(number, bool) or not isinstance(number, int):
        shown = f"the text {quoted(value[:40])}" if isinstance(value, str) else describe(value)
        raise Refusal(
            f"{origin}: {name} is {shown}, and must be the number of the right choice, 0 to {last}, or its letter, "
            f"{letters[0]} to {letters[-1]}. Correct or remove the row."
        )
    if not 0 <= number <= last:
        withheld = " In test splits of benchmarks -1 means that the answer is withheld." if number == -1 else ""
        counted = " Numbers are counted from 0." if number == len(letters) else ""
        raise Refusal(
            f"{origin}: {name} is {number}, and the choices are 0 to {last}.{counted}{withheld} Correct or remove the row."
        )
    return number


def _show(row: dict[str, Any], plan: Plan, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Piece]]:
    """The question, the right choice and another one."""
    frame, right = pair_frame(tokenizer), row["labels"].index(1.0)
    pairs = [*pieces_of(row["input_ids"], row["document_tokens"])]
    other, start, width = int(right == 0), len(frame.before), len(frame.between)
    shown = list[list[int]]()
    for index in (right, other):
        pair, end = pairs[index], start + row["query_tokens"]
        # a question that was cut ends earlier
        end = next((at for at in range(start, end) if width and pair[at : at + width] == frame.between), end)
        shown += [pair[start:end]] * (not shown)
        shown.append(pair[end + width : len(pair) - len(frame.after)])
    return f"choice {right} of 0 to {len(pairs) - 1} is right", part_pieces(shown, lambda ids: str(tokenizer.decode(ids)))
