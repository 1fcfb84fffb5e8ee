"""Questions with choices: read from the layouts of benchmarks, framed and cut as the tokenizer does, counted, refused by row."""

import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

import toolkit as tk
from toolkit.config import Refusal
from toolkit.data.inspection import guess_task, inspect_splits
from toolkit.data.sources.held_out import batch_keys
from toolkit.data.tokenize.multiple_choice import read_questions
from toolkit.data.tokenize.tasks import prepare

WORDS = inspect.getsource(textwrap).split()


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig):
    dataset: str = "made here"
    eval_fraction: float = 0.0


@pytest.fixture(scope="module")
def published(tmp_path_factory: Any) -> dict[str, Any]:
    """The columns and types that benchmarks have on the Hub, in Parquet: for each a question, whose right choice is "right"."""
    from datasets import ClassLabel, Features, Sequence, Value

    words, folder = Value("string"), tmp_path_factory.mktemp("published")
    four, swag = ["no", "never", "right", "none"], ("video-id", "fold-ind", "startphrase", "sent1", "sent2", "gold-source")
    made: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "SWAG": (
            {**dict.fromkeys(swag, words), **{f"ending{i}": words for i in range(4)}, "label": ClassLabel(names=list("0123"))},
            {**dict.fromkeys(swag, "A drum"), **{f"ending{i}": each for i, each in enumerate(four)}, "label": 2},
        ),
        "HellaSwag": (
            {"ind": Value("int32"), **dict.fromkeys(("activity_label", "ctx_a", "ctx_b", "ctx"), words), "endings": Sequence(words),
             **dict.fromkeys(("source_id", "split", "split_type", "label"), words)},
            {"ind": 4, **dict.fromkeys(("activity_label", "ctx_a", "ctx_b", "ctx"), "A man"), "endings": four,
             **dict.fromkeys(("source_id", "split", "split_type"), "train"), "label": "2"},
        ),
        "RACE": (
            {**dict.fromkeys(("example_id", "article", "answer", "question"), words), "options": Sequence(words)},
            {"example_id": "high1.txt", "article": "Last week.", "answer": "C", "question": "It is _ .", "options": four},
        ),
        "MMLU": (
            {"question": words, "subject": words, "choices": Sequence(words), "answer": ClassLabel(names=list("ABCD"))},
            {"question": "Which?", "subject": "law", "choices": four, "answer": 2},
        ),
        "COPA": (
            {**dict.fromkeys(("premise", "choice1", "choice2", "question"), words), "idx": Value("int32"),
             "label": ClassLabel(names=["choice1", "choice2"])},
            {"premise": "A shadow.", "choice1": "no", "choice2": "right", "question": "cause", "idx": 0, "label": 1},
        ),
        "ARC": (
            {"id": words, "question": words, "choices": Sequence({"text": words, "label": words}), "answerKey": words},
            {"id": "M1", "question": "Which?", "choices": {"text": four, "label": list("1234")}, "answerKey": "3"},
        ),
    }  # fmt: skip
    for name, (features, row) in made.items():
        (folder / name).mkdir()
        Dataset.from_list([row, row], features=Features(features)).to_parquet(folder / name / "train-00000-of-00001.parquet")
    return {name: folder / name for name in made}


@pytest.mark.parametrize("name", ["SWAG", "HellaSwag", "RACE", "MMLU", "COPA", "ARC"])
def test_columns_as_published_are_read_as_they_are(published: dict[str, Any], name: str) -> None:
    """With the ids, classes and splits that the data sets have next to what is read. Fails when: "ctx" is no context."""
    splits = tk.load_splits(Config(dataset=str(published[name])))
    assert guess_task(splits["train"].column_names) == "multiple_choice"
    for question in read_questions(splits["train"], "train"):
        assert question.choices[question.right].endswith("right")


def text(start: int, words: int) -> str:
    return " ".join(WORDS[start : start + words])


def splits_of(rows: list[dict[str, Any]]) -> dict[str, Dataset]:
    return {"train": Dataset.from_list([{**row, "origin": f"asked.jsonl:{i + 1}"} for i, row in enumerate(rows)])}


CONTEXT, QUESTION, CHOICES = text(0, 30), text(40, 5), [text(50, 3), text(60, 9), text(70, 1)]
LAYOUTS = {
    "generic": {"context": CONTEXT, "question": QUESTION, "choices": CHOICES, "label": 2},
    "RACE": {"article": CONTEXT, "question": QUESTION, "options": CHOICES, "answer": "C"},
    "ARC": {"premise": CONTEXT, "question": QUESTION, "choices": {"text": CHOICES, "label": ["1", "2", "3"]}, "answerKey": "3"},
    "SWAG": {"sent1": CONTEXT, "sent2": QUESTION, "ending0": CHOICES[0], "ending1": CHOICES[1], "ending2": CHOICES[2], "label": 2},
    "numbered from 1": {"context": CONTEXT, "question": QUESTION, **{f"choice{i + 1}": CHOICES[i] for i in range(3)}, "label": "2"},
}


@pytest.mark.parametrize("longest", [72, 512])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_framed_and_truncated_as_the_tokenizer_does_it(encoder: Any, layout: str, longest: int) -> None:
    """Context first, question and choice second, as in transformers' example for SWAG; of what is too long the context is cut.

    Fails when: the two texts are the other way round, or the choice is cut before the context.
    """
    assert guess_task(list(LAYOUTS[layout])) == "multiple_choice"
    row = tk.tokenize_for_multiple_choice(splits_of([LAYOUTS[layout]]), encoder, Config(max_length=longest))["train"][0]
    pairs = [encoder(CONTEXT, f"{QUESTION} {choice}", truncation="only_first", max_length=longest) for choice in CHOICES]
    assert row["input_ids"] == [token for pair in pairs for token in pair["input_ids"]]
    assert row["token_type_ids"] == [kind for pair in pairs for kind in pair["token_type_ids"]]
    assert row["document_tokens"] == [len(pair["input_ids"]) for pair in pairs]
    assert max(row["document_tokens"]) <= longest
    assert row["labels"] == [0, 0, 1]


def test_a_question_alone_is_the_first_text(encoder: Any) -> None:
    """And rows may have different numbers of choices, or no context where others have one.

    Fails when: the question is read after a context of "None".
    """
    rows = [{"question": QUESTION, "choices": CHOICES[:2], "answer": 1}, {"question": QUESTION, "choices": CHOICES, "answer": 0}]
    mixed = [{**rows[0], "context": CONTEXT}, *rows]  # the others' is null
    check_questions_alone(rows, tk.tokenize_for_multiple_choice(splits_of(rows), encoder, Config())["train"], encoder)
    check_questions_alone(rows, tk.tokenize_for_multiple_choice(splits_of(mixed), encoder, Config())["train"].select([1, 2]), encoder)


def check_questions_alone(rows: list[dict[str, Any]], found: Dataset, encoder: Any) -> None:
    for given, row in zip(rows, found, strict=True):
        assert row["input_ids"] == [token for choice in given["choices"] for token in encoder(QUESTION, choice)["input_ids"]]
        assert np.argmax(row["labels"]) == given["answer"]
        assert row["documents"] == len(given["choices"])


def test_what_is_odd_about_choices_is_counted(encoder: Any) -> None:
    """Fails when: the right choice is compared with itself, or a question that was cut counts as a choice that was."""
    rows = [
        {"question": QUESTION, "choices": ["same", "other", "same"], "label": 0},
        {"question": QUESTION, "choices": ["same", "other", "same"], "label": 1},
        {"question": QUESTION, "choices": ["short", text(100, 60)], "label": 0},
        {"question": text(0, 60), "choices": ["short", "other"], "label": 0},
    ]
    report = tk.tokenize_for_multiple_choice(splits_of(rows), encoder, Config(max_length=40)).report.splits[0]
    assert report.remarks == {"duplicates": 1, "right_twice": 1, "cut_choices": 1}
    assert (report.examples, report.overlong) == (4, 2)


@pytest.mark.parametrize(("right", "withheld"), [(1, -1), ("B", ""), ("1", "-1")])
def test_a_test_split_without_answers_is_left_out(encoder: Any, right: Any, withheld: Any) -> None:
    """As those of SWAG, CommonsenseQA and HellaSwag. Fails when: `is_withheld` is not asked."""
    row = {"question": "Which?", "choices": ["a", "b"]}
    splits = {"train": Dataset.from_list([{**row, "label": right}]), "test": Dataset.from_list([{**row, "label": withheld}] * 2)}
    found = tk.tokenize_for_multiple_choice(splits, encoder, Config())
    assert list(found) == ["train"]
    assert any(note.startswith("test: left out") for note in found.report.notes)


GOOD = {"question": "Which?", "choices": ["a", "b", "c"], "label": 1}
def test_columns_that_are_no_questions_are_refused_by_their_names(encoder: Any) -> None:
    """Fails when: "choices" is not in `_OTHER_NAMES`, which was a KeyError."""
    rows = {"train": Dataset.from_list([{"question": "a?", "options_of_it": ["b", "c"], "target": 0}])}
    with pytest.raises(Refusal, match="options_of_it"):
        tk.tokenize_for_multiple_choice(rows, encoder, Config())


def test_a_split_without_any_answer_cannot_be_evaluated(encoder: Any) -> None:
    """Fails when: plans may be empty, which was a StopIteration."""
    rows = Dataset.from_list([{"question": "a?", "choices": ["b", "c"], "label": -1}])
    with pytest.raises(Refusal, match="withheld"):
        prepare("multiple_choice", {"evaluation": rows}, encoder, Config())


BAD = {
    "out of range": ({"label": 3}, ["label is 3", "0 to 2", "counted from 0"]),
    "withheld": ({"label": -1}, ["label is -1", "withheld"]),
    "one choice": ({"choices": ["a"], "label": 0}, ["one choice"]),
    "no choice": ({"choices": [], "label": 0}, ["no choice"]),
    "empty choice": ({"choices": ["a", " ", "c"]}, ["choice 1 of choices", "empty"]),
    "missing choice": ({"choices": ["a", None, "c"]}, ["choice 1 of choices", "2 of the 3 are text"]),
    "no answer": ({"label": None}, ["label is", "0 to 2", "A to C"]),
    "empty question": ({"question": ""}, ["question is empty"]),
}


@pytest.mark.parametrize("case", BAD)
def test_rows_that_cannot_be_answered_are_refused_with_file_and_row(encoder: Any, case: str) -> None:
    """Fails when: the row's origin is not given to `read_question`, or a check is left out."""
    change, words = BAD[case]
    with pytest.raises(Refusal) as refusal:
        tk.tokenize_for_multiple_choice(splits_of([GOOD, {**GOOD, **change}]), encoder, Config())
    for word in ("asked.jsonl:2: ", *words):
        assert word in str(refusal.value)


def test_a_table_has_as_many_columns_as_its_longest_row_needs(encoder: Any) -> None:
    """So a row may leave the last ones empty, but none between. Fails when: only null is taken for empty."""
    row = {"question": "Which?", "choice1": "a", "choice2": "b", "answer": "B"}
    rows = [{**row, "choice3": "c"}, {**row, "choice3": ""}, {**row, "choice3": None}]
    found = tk.tokenize_for_multiple_choice(splits_of(rows), encoder, Config())["train"]
    assert found["documents"][:] == [3, 2, 2]
    with pytest.raises(Refusal, match=r"asked\.jsonl:1: choice1 is empty"):
        tk.tokenize_for_multiple_choice(splits_of([{**row, "choice1": ""}]), encoder, Config())


@pytest.mark.parametrize(("answer", "word"), [("D", "the text 'D'"), ("Yes", "the text 'Yes'"), ("3", "answer is 3"), (1.5, "1.5")])
def test_an_answer_that_is_no_choice_is_refused_whatever_its_type(encoder: Any, answer: Any, word: str) -> None:
    """Fails when: letters are looked up in the whole alphabet."""
    rows = [{"question": "Which?", "choices": ["a", "b", "c"], "answer": answer}]
    with pytest.raises(Refusal, match=r"asked\.jsonl:1: ") as refusal:
        tk.tokenize_for_multiple_choice(splits_of(rows), encoder, Config())
    assert word in str(refusal.value)


def test_a_question_may_have_more_choices_than_there_are_letters() -> None:
    """Fails when: choices are counted by their letters."""
    from toolkit.data.tokenize.multiple_choice import read_question

    many = [f"choice {number}" for number in range(30)]
    assert [read_question({**GOOD, "choices": many, "label": label}, "asked.jsonl:1").right for label in (28, "28", "B")] == [28, 28, 1]


def test_choices_of_several_types_in_an_object_are_refused(encoder: Any) -> None:
    """Numbers among texts, as a reader of JSON lines may give them. Fails when: numbers are turned into texts."""
    from toolkit.data.tokenize.multiple_choice import read_question

    with pytest.raises(Refusal, match=r"asked\.jsonl:1: choice 2 .*\b2 of the 3"):
        read_question({**GOOD, "choices": ["a", "b", 3]}, "asked.jsonl:1")


def test_inspect_lists_every_row_that_training_refuses_and_shows_a_question(encoder: Any) -> None:
    """Fails when: the task has no entry in FORMATS, or a question that was cut is shown with a part of its choice."""
    rows = [GOOD, {**GOOD, "label": 7}, {**GOOD, "question": text(0, 90)}, {**GOOD, "label": -1}]
    found = inspect_splits("multiple_choice", splits_of(rows), encoder, Config(max_length=24))
    assert [problem.origin for problem in found.problems] == ["asked.jsonl:2", "asked.jsonl:4"]
    said, pieces = found.examples[-1]
    assert "choice 1 of 0 to 2 is right" in said
    assert [piece[0].strip() for piece in pieces[1:]] == ["b", "a"]


def test_questions_about_one_context_are_held_out_together() -> None:
    """Fails when: a layout is not in `_WITH_PARTNER`."""
    one, other = ({"article": CONTEXT, "question": q, "options": CHOICES, "answer": "A"} for q in ("Who?", "When?"))
    batch = {name: [one[name], other[name]] for name in one}
    keys = batch_keys(batch)
    assert keys[0] == keys[1]
    shuffled = {"question": ["Who?"] * 2, "choices": [CHOICES, CHOICES[::-1]], "answer": [0, 2]}
    keys = batch_keys(shuffled)
    assert keys[0] == keys[1]
