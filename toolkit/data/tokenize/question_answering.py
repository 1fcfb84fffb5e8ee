"""Extractive question answering: questions and contexts to windows of tokens, and where the answer is in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from toolkit.config import DataConfig, QuestionAnsweringConfig, Refusal
from toolkit.data.report import Piece, example_pieces
from toolkit.data.tokenize.classification import PairFrame, pair_frame
from toolkit.data.tokenize.columns import Batch, Plan, as_whole, check_texts, columns_of, describe, wrong_columns
from toolkit.data.tokenize.documents import IGNORED, Cut, Documents, Encoder, cut_documents, join_documents
from toolkit.data.tokenize.format import Format, Splits
from toolkit.system.console import quoted

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("question", "context", "answers")


class Answer(NamedTuple):
    """An answer as the data have it: its words, and the character of the context where they begin."""

    text: str
    start: int


def question_answering_format(config: DataConfig) -> Format:
    """Rows of `question`, `context` and `answers` become windows: the question and a part of its context."""
    if not isinstance(config, QuestionAnsweringConfig):
        raise TypeError("question answering needs the settings of QuestionAnsweringConfig next to those of DataConfig")
    doc_stride = config.doc_stride
    return Format(
        "question_answering", plan_question_answering,
        rows=lambda plan, encoder, config: QuestionRows(
            encoder, pair_frame(encoder.tokenizer), config.max_length, doc_stride, config.overlong
        ),
        columns=_columns,
        describe=lambda plan, tokenizer: "questions whose answers are spans of a context, in windows",
        show=_show_window, settings=(doc_stride,), supervises_tokens=False, ends_texts=False, overlong="split",
    )  # fmt: skip


def plan_question_answering(splits: Splits, config: DataConfig) -> tuple[dict[str, Plan], list[str]]:
    """How each split is read.

    Raises:
        Refusal: other columns, or settings that windows have no use for.
    """
    if config.overlong == "drop" or (config.overlong == "truncate" and "overlong" in (config.given or ())):
        raise Refusal(
            f"--overlong {config.overlong}: would lose answers. A long context is read in overlapping windows: remove it, or "
            "type --overlong refuse."
        )
    for flag, is_set in (("--packing", config.packing), ("--min-length", config.min_length is not None)):
        if is_set:
            raise Refusal(f"{flag}: each question is read in windows of its own, and all of them count. Remove it.")
    plans = {}
    for name, split in splits.items():
        present = columns_of(split, name)
        if not set(COLUMNS) <= set(present):
            needed = "question, context and answers {text, answer_start}"
            raise Refusal(wrong_columns(present, name, needed, (COLUMNS,)))
        plans[name] = Plan("question_answering", "span", (*COLUMNS, *(["origin"] if "origin" in present else [])))
    return plans, []


@dataclass(frozen=True)
class QuestionRows:
    """Reads batches of rows: each becomes a document of the whole context, which `cut` makes windows of."""

    encoder: Encoder
    frame: PairFrame
    max_length: int
    doc_stride: int
    overlong: str

    def read(self, batch: Batch, origins: list[str]) -> tuple[Documents, Counter[str]]:
        """Whole documents with the places of their first answers, and counts of those without an answer, and of cut ones."""
        for column in ("question", "context"):
            check_texts(batch[column], column, origins)
        questions = [encoding.ids for encoding in self.encoder.encode([text.lstrip() for text in batch["question"]])]
        distinct = list(dict.fromkeys(batch["context"]))  # many questions have one context
        encoded = dict(zip(distinct, self.encoder.encode(distinct, positions=True), strict=True))
        ids, remarks = list[list[int]](), Counter[str]()
        columns: dict[str, list[Any]] = {name: [] for name in ("start_positions", "end_positions", *_OF_A_CONTEXT)}
        for question, context, written, origin in zip(questions, batch["context"], batch["answers"], origins, strict=True):
            answers, encoding = read_answers(written, context, origin), encoded[context]
            before = [*self.frame.before, *question, *self.frame.between]
            ids.append([*before, *encoding.ids, *self.frame.after])
            offsets = np.asarray(encoding.offsets, dtype=np.int32).reshape(-1, 2)
            first, last = _tokens_of(answers[0], offsets) if answers else (0, -1)
            windows = self._windows(len(before), len(encoding.ids), origin)
            is_held = any(start <= first <= last < end for start, end in windows)
            remarks["unanswerable" if not answers else "held" if is_held else "cut_answers"] += 1
            row = (len(before) + first, len(before) + last) if is_held else (0, 0)
            for name, value in zip(columns, (*row, len(question), len(before), offsets[:, 0], offsets[:, 1]), strict=True):
                columns[name].append(value)
        return join_documents(ids, None, origins, columns), remarks

    def cut(self, documents: Documents) -> tuple[Documents, Cut]:
        """Windows: contexts that fit are one, long ones several, in their order, each with the same question before it."""
        if self.overlong == "refuse":
            cut_documents(documents, self.max_length, self.overlong)
        has_types = "token_type_ids" in self.encoder.tokenizer.model_input_names
        ids, rows = list[list[int]](), list[int]()
        names = ("start_positions", "end_positions", "window", "context_start", "char_starts", "char_ends")
        columns: dict[str, list[Any]] = {name: [] for name in (*names, *(["token_type_ids"] if has_types else []))}
        for row, whole in enumerate(documents.lists(documents.values)):
            of_row = {name: values[row] for name, values in documents.columns.items()}
            at, first, last = (of_row[name] for name in ("context_start", "start_positions", "end_positions"))
            windows = self._windows(at, len(of_row["char_starts"]), documents.origins[row])
            for number, (start, end) in enumerate(windows):
                ids.append([*whole[:at], *whole[at + start : at + end], *self.frame.after])
                rows.append(row)
                is_held = 0 < at + start <= first <= last < at + end
                places = (first - start, last - start) if is_held else (0, 0)
                chars = [of_row[name][start:end].tolist() for name in ("char_starts", "char_ends")]
                for name, value in zip(names, (*places, number, at, *chars), strict=True):
                    columns[name].append(value)
                if has_types:
                    columns["token_type_ids"].append(self._types(of_row["question_tokens"], end - start))
        windowed = join_documents(ids, None, [documents.origins[row] for row in rows], columns)
        is_over = documents.lengths > self.max_length
        return windowed, Cut(overlong=int(is_over.sum()))

    def _windows(self, before: int, tokens: int, origin: str) -> list[tuple[int, int]]:
        """Where the windows over a context of `tokens` begin and end, with `before` tokens before each."""
        room = self.max_length - before - len(self.frame.after)
        if tokens <= room:
            return [(0, tokens)]
        step = room - self.doc_stride
        if step < 1:
            least = before + len(self.frame.after) + self.doc_stride + 1
            raise Refusal(
                f"{origin}: next to the question, --max-length {self.max_length} leaves {max(room, 0)} tokens for the context, "
                f"and windows share {self.doc_stride} (--doc-stride). Type --max-length {least} or more, or lower --doc-stride."
            )
        last = -(-(tokens - room) // step)
        return [(number * step, min(number * step + room, tokens)) for number in range(last + 1)]

    def _types(self, question: int, context: int) -> list[int]:
        frame = self.frame
        lengths = (len(frame.before), question, len(frame.between), context, len(frame.after))
        return [kind for kind, length in zip(frame.types, lengths, strict=True) for _ in range(length)]


_OF_A_CONTEXT = ("question_tokens", "context_start", "char_starts", "char_ends")


def read_answers(value: object, context: str, origin: str) -> list[Answer]:
    """The answers of a row, which SQuAD's columns hold as one object of lists and its JSON as a list of objects.

    Raises:
        Refusal: something else, or an answer that the context doesn't have where it should.
    """
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        value = {name: [each.get(name) for each in value] for name in ("text", "answer_start")}
    texts, starts = (value.get(name) if isinstance(value, Mapping) else None for name in ("text", "answer_start"))
    if not isinstance(texts, list) or not isinstance(starts, list):
        raise Refusal(
            f"{origin}: answers is {describe(value)}, and must be an object of two lists, text and answer_start; both are "
            "empty where the context has no answer. Correct or remove the row."
        )
    if len(texts) != len(starts):
        raise Refusal(
            f"{origin}: answers has {len(texts)} texts and {len(starts)} places in answer_start. Give each text its place."
        )
    return [_checked(text, start, context, origin) for text, start in zip(texts, starts, strict=True)]


def reference_answers(splits: Splits) -> Sequence[tuple[str, list[str]]]:
    """Context and answers of each row of the validation split, which are read when they are used."""
    return _References(splits["validation"]) if "validation" in splits else []


class _References(Sequence[tuple[str, list[str]]]):
    def __init__(self, split: Any) -> None:
        is_dataset = hasattr(split, "select_columns") and hasattr(split, "__len__")  # a stream and a list are read whole
        self.rows: Dataset | list[Any] = split.select_columns(["context", "answers"]) if is_dataset else list(split)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: Any) -> Any:
        found = self.rows[row]
        return found["context"], [answer.text for answer in read_answers(found["answers"], found["context"], f"row {row}")]

    def __iter__(self) -> Iterator[tuple[str, list[str]]]:
        return (self[row] for row in range(len(self)))


def _checked(text: Any, start: Any, context: str, origin: str) -> Answer:
    if not isinstance(text, str) or not text.strip():
        raise Refusal(
            f"{origin}: an answer is {describe(text)}, and must be words of the context. A question without an answer has "
            "empty lists. Correct or remove the row."
        )
    start = as_whole(start)
    if not isinstance(start, int) or isinstance(start, bool):
        raise Refusal(f"{origin}: answer_start is {describe(start)}, and must be a whole number: the place of a character.")
    if start >= 0 and context.startswith(text, start):
        return Answer(text, start)
    places = _places(text, context)
    found = f"it is at {min(places, key=lambda place: abs(place - start))}" if places else "it is nowhere in the context"
    if not 0 <= start <= len(context) - len(text):
        where = f"is outside the context, which has {len(context):,} characters"
    else:
        where = f"points at {quoted(_short(context[start : start + len(text)]))}"
    raise Refusal(
        f"{origin}: the answer {quoted(_short(text))} is not at its place: answer_start {start} {where}; {found}. Places count "
        "characters from 0. Correct or remove the row."
    )


def _places(text: str, context: str) -> list[int]:
    places, at = list[int](), context.find(text)
    while at >= 0:
        places.append(at)
        at = context.find(text, at + 1)
    return places


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


def _tokens_of(answer: Answer, offsets: np.ndarray) -> tuple[int, int]:
    """The first and the last token that hold a part of the answer; the first is the greater where none does."""
    start = answer.start + len(answer.text) - len(answer.text.lstrip())
    end = answer.start + len(answer.text.rstrip())
    held = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < end))
    return (int(held[0]), int(held[-1])) if len(held) else (0, -1)


def _columns(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> dict[str, pa.DataType]:
    import pyarrow as pa

    number, numbers = pa.int32(), pa.list_(pa.int32())
    names = dict.fromkeys(("start_positions", "end_positions", "window", "context_start"), number)
    lists = {"char_starts": numbers, "char_ends": numbers}
    return names | lists | ({"token_type_ids": numbers} if "token_type_ids" in tokenizer.model_input_names else {})


def _show_window(row: dict[str, Any], plan: Plan, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Piece]]:
    """A window as text, its answer marked."""
    ids, first, last = row["input_ids"], row["start_positions"], row["end_positions"]
    labels = [token if 0 < first <= at <= last else IGNORED for at, token in enumerate(ids)]
    return "" if first else "without an answer", example_pieces(ids, labels, lambda part: str(tokenizer.decode(part)))
