"""Windows of questions and contexts against transformers' own tokenizing with overflow, rows that are refused, SQuAD's JSON."""

import inspect
import json
import textwrap
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from toolkit.config import DataConfig, QuestionAnsweringConfig, Refusal
from toolkit.data.report import report_lines
from toolkit.data.sources.load import load_splits
from toolkit.data.tokenize.question_answering import reference_answers
from toolkit.data.tokenize.tasks import tokenize_for_question_answering
from toolkit.models.tokenizer import train_tokenizer


@dataclass(frozen=True)
class Config(DataConfig, QuestionAnsweringConfig):
    doc_stride: int = 10
    max_length: int = 40


def rows(count: int = 30) -> list[dict[str, Any]]:
    """Pieces of a module with an answer anywhere in them, cut at words and within; every fifth has none."""
    source, numbers = inspect.getsource(textwrap).replace("The", "Thé"), np.random.default_rng(0)
    made = []
    for i in range(count):
        at, length = int(numbers.integers(0, len(source) - 800)), int(numbers.integers(5, 700))
        context = source[at : at + length] + "x"
        start = int(numbers.integers(0, len(context)))
        answer = context[start : start + int(numbers.integers(1, 30))]
        has_answer = bool(answer.strip()) and i % 5 < 4
        answers = {"text": [answer, "x"], "answer_start": [start, len(context) - 1]} if has_answer else {"text": [], "answer_start": []}
        question = f"  What about {'this ' * (i % 3)}é?"
        made.append({"question": question, "context": context, "answers": answers, "origin": f"made.jsonl:{i + 1}"})
    return made


def wordpiece() -> Any:
    """BERT's kind of tokenizer: lower case, no accents, what it does not know is one token."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    backend.train_from_iterator([inspect.getsource(textwrap)], trainers.WordPieceTrainer(vocab_size=400, special_tokens=special))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


TOKENIZERS = {"byte-level": lambda: train_tokenizer([inspect.getsource(textwrap)], 400, encoder=True), "wordpiece": wordpiece}


def its_windows(tokenizer: Any, row: dict[str, Any], max_length: int, stride: int) -> list[dict[str, Any]]:
    """As transformers' example script for SQuAD makes them."""
    made = tokenizer(
        row["question"].lstrip(), row["context"], truncation="only_second", max_length=max_length, stride=stride,
        return_overflowing_tokens=True, return_offsets_mapping=True, return_token_type_ids=True,
    )  # fmt: skip
    windows = []
    for number, ids in enumerate(made["input_ids"]):
        offsets, kinds = made["offset_mapping"][number], made.sequence_ids(number)
        context = [i for i, kind in enumerate(kinds) if kind == 1]
        first = last = 0
        if row["answers"]["text"]:
            text, start = row["answers"]["text"][0], row["answers"]["answer_start"][0]
            start, end = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
            held = [i for i in context if offsets[i][1] > start and offsets[i][0] < end]
            if held and offsets[context[0]][0] <= start and offsets[context[-1]][1] >= end:
                first, last = held[0], held[-1]
        windows.append({
            "input_ids": ids, "token_type_ids": made["token_type_ids"][number], "start_positions": first, "end_positions": last,
            "window": number, "context_start": context[0], "char_ends": [offsets[i][1] for i in context],
        })  # fmt: skip
    return windows


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(("max_length", "stride"), [(40, 10), (64, 0), (41, 16), (512, 128)])
def test_windows_and_places_are_those_of_transformers(kind: str, max_length: int, stride: int) -> None:
    """Byte-level and WordPiece tokens, contexts of 2 to 300 tokens, answers that begin and end within words, in white space and at
    accents.

    Fails when: windows share one token more, the last one is cut short, or an answer that is cut counts as held.
    """
    tokenizer, config = TOKENIZERS[kind](), Config(max_length=max_length, doc_stride=stride)
    found = tokenize_for_question_answering(DatasetDict(train=Dataset.from_list(rows())), tokenizer, config)
    wanted = [window for row in rows() for window in its_windows(tokenizer, row, max_length, stride)]
    assert len(found["train"]) == len(wanted)
    assert ("token_type_ids" in found["train"].column_names) == ("token_type_ids" in tokenizer.model_input_names)
    for ours, its in zip(found["train"], wanted, strict=True):
        assert {name: ours[name] for name in its if name in ours} == {name: its[name] for name in its if name in ours}
        assert ours["length"] == len(ours["input_ids"]) <= max_length
        assert len(ours["char_starts"]) == len(ours["char_ends"])


def test_the_report_counts_questions_without_an_answer_and_answers_that_every_window_cuts() -> None:
    """Of 30 rows 6 or more have no answer; windows of 33 tokens that share none cut others.

    Fails when: an answer that one of several windows holds is counted as cut, or one that none holds is not.
    """
    tokenizer = TOKENIZERS["byte-level"]()
    found = tokenize_for_question_answering(
        DatasetDict(train=Dataset.from_list(rows())), tokenizer, Config(max_length=33, doc_stride=0)
    )
    per_row = [its_windows(tokenizer, row, 33, 0) for row in rows()]
    cut = sum(
        bool(row["answers"]["text"]) and not any(window["start_positions"] for window in windows)
        for row, windows in zip(rows(), per_row, strict=True)
    )
    without = sum(not row["answers"]["text"] for row in rows())
    assert cut > 2
    assert found.report.splits[0].remarks == {"unanswerable": without, "cut_answers": cut}
    text = "\n".join(report_lines(found.report, ("[[", "]]")))
    assert f"{cut} answers are cut" in text
    assert f"{sum(len(windows) > 1 for windows in per_row)} longer than 33 tokens, split" in text


def test_spans_of_characters_are_those_of_the_tokens(own_cache: Any) -> None:
    """The characters from an answer's first token to its last are the answer, at most with the rest of its words.

    Fails when: the characters of a window are those of its place in another window.
    """
    tokenizer = TOKENIZERS["byte-level"]()
    raw = DatasetDict(validation=Dataset.from_list(rows()))
    windows = tokenize_for_question_answering(raw, tokenizer, Config())["validation"]
    row, held = -1, 0
    for window in windows:
        row += window["window"] == 0
        if window["start_positions"]:
            first, last = (window[name] - window["context_start"] for name in ("start_positions", "end_positions"))
            context, answers = reference_answers(raw)[row]
            said = context[window["char_starts"][first] : window["char_ends"][last]]
            assert answers[0].strip() in said
            assert len(said) <= len(answers[0]) + 20
            held += 1
    assert held >= 10


def one(**changed: Any) -> dict[str, Any]:
    row = {"question": "Who?", "context": "Ada and Bob saw Ada.", "answers": {"text": ["Bob"], "answer_start": [8]}, "origin": "qa.jsonl:7"}
    return {**row, **changed}


WRONG = {
    "an answer one character off": (one(answers={"text": ["Ada"], "answer_start": [15]}), ("'Ada'", "answer_start 15", "it is at 16")),
    "an answer in other words": (one(answers={"text": ["Eve"], "answer_start": [8]}), ("'Eve'", "points at 'Bob'", "nowhere")),
    "an answer outside": (one(answers={"text": ["Bob"], "answer_start": [80]}), ("outside", "20 characters", "it is at 8")),
    "a place below 0": (one(answers={"text": ["."], "answer_start": [-1]}), ("outside", "it is at 19")),
    "an empty answer": (one(answers={"text": [""], "answer_start": [0]}), ("an empty text", "empty lists")),
    "a text without its place": (one(answers={"text": ["Ada", "Bob"], "answer_start": [0]}), ("2 texts and 1 places",)),
    "a place that is no number": (one(answers={"text": ["Bob"], "answer_start": ["8"]}), ("answer_start is the text '8'",)),
    "answers that are text": (one(answers="Bob"), ("answers is the text 'Bob'", "two lists")),
    "no answers": (one(answers=None), ("answers is missing (null)",)),
    "an empty question": (one(question=" "), ("question is nothing but white space",)),
    "an empty context": (one(context="", answers={"text": [], "answer_start": []}), ("context is empty",)),
    "a question that leaves no room": (one(question="Who? " * 40), ("--max-length 40 leaves 0 tokens", "--doc-stride")),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_row_that_must_be_a_mistake_is_refused_by_its_place(case: str) -> None:
    """Fails when: answers are taken from where the offset points without a look at them."""
    row, said = WRONG[case]
    with pytest.raises(Refusal) as refusal:
        tokenize_for_question_answering(DatasetDict(train=Dataset.from_list([row])), TOKENIZERS["byte-level"](), Config())
    assert str(refusal.value).startswith("qa.jsonl:7: ")
    for words in said:
        assert words in str(refusal.value)


SETTINGS = {
    "drop": (replace(Config(), overlong="drop"), "--overlong drop"),
    "truncate": (replace(Config(), overlong="truncate", given=("overlong",)), "--overlong truncate"),
    "packing": (replace(Config(), packing=True), "--packing"),
    "min_length": (replace(Config(), min_length=3), "--min-length"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_lose_answers_or_have_no_meaning_are_refused(case: str) -> None:
    """Fails when: --overlong drop leaves questions out of an evaluation."""
    config, said = SETTINGS[case]
    with pytest.raises(Refusal, match=said):
        tokenize_for_question_answering(DatasetDict(train=Dataset.from_list([one()])), TOKENIZERS["byte-level"](), config)


def test_long_rows_are_refused_where_that_is_asked_for() -> None:
    """Fails when: --overlong refuse makes windows."""
    raw = DatasetDict(train=Dataset.from_list([one(context="Ada and Bob. " * 30, answers={"text": [], "answer_start": []})]))
    with pytest.raises(Refusal, match=r"qa\.jsonl:7: .*--max-length 40"):
        tokenize_for_question_answering(raw, TOKENIZERS["byte-level"](), replace(Config(), overlong="refuse"))


SQUAD = {"version": "v2.0", "data": [
    {"title": "Ada", "paragraphs": [
        {"context": "Ada wrote notes.", "qas": [
            {"id": "1", "question": "Who wrote?", "answers": [{"text": "Ada", "answer_start": 0}], "is_impossible": False},
            {"id": "2", "question": "Who read?", "answers": [], "is_impossible": True, "plausible_answers": []},
        ]},
        {"context": "Bob read.", "qas": [{"id": "3", "question": "Who read?", "answers": [{"text": "Bob", "answer_start": 0}] * 2}]},
    ]},
]}  # fmt: skip


@pytest.mark.parametrize("indent", [None, 1])
def test_the_json_of_squad_is_read_as_rows(tmp_path: Any, indent: int | None) -> None:
    """On one line, as it is published, and on many. Fails when: a file of one line is read as JSON lines."""
    (tmp_path / "dev.json").write_text(json.dumps(SQUAD, indent=indent))
    found = load_splits(DataConfig(dataset=str(tmp_path / "dev.json"), eval_fraction=0.0))["train"]
    assert [row["id"] for row in found] == ["1", "2", "3"]
    assert [row["context"] for row in found] == ["Ada wrote notes."] * 2 + ["Bob read."]
    assert found[1]["answers"] == {"text": [], "answer_start": []}
    assert found[2]["answers"] == {"text": ["Bob", "Bob"], "answer_start": [0, 0]}
    assert found[2]["origin"].endswith("dev.json:3")


def test_a_part_of_squads_json_that_is_missing_is_named(tmp_path: Any) -> None:
    """Fails when: a KeyError ends the run."""
    broken = {"data": [{"title": "Ada", "paragraphs": [{"context": "Ada."}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(broken))
    with pytest.raises(Refusal, match=r"dev\.json: object 1 .*paragraphs .*qas"):
        load_splits(DataConfig(dataset=str(tmp_path / "dev.json"), eval_fraction=0.0))


def test_a_list_of_objects_is_read_as_an_object_of_lists() -> None:
    """Fails when: JSON lines with SQuAD's own list of answers are refused."""
    rows_of = [one(answers=[{"text": "Bob", "answer_start": 8}]), one(answers=[])]
    assert [answers for _, answers in reference_answers({"validation": rows_of})] == [["Bob"], []]
