"""The embedded task with checkable answers: right, as hard as asked for, the same each time, held out by construction."""

import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from toolkit.config import DataConfig, Refusal
from toolkit.data.sources.load import describe_source, load_splits
from toolkit.demo_corpus import synthetic

NAMES = ("arithmetic", "arithmetic/digits=1", "arithmetic/digits=4/terms=5", "arithmetic_solved/terms=3/seed=7")


@pytest.fixture(autouse=True, scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of its own, in which each name's rows are made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("synthetic"))
        yield


def rows_of(name: str) -> dict[str, list[dict[str, str]]]:
    return {split: list(rows) for split, rows in load_splits(f"synthetic:{name}").items()}


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_python_and_problems_as_hard_as_the_name_says(name: str) -> None:
    """Fails when: a sign is lost; a number is longer than `digits`; there are other than `terms` of them; the answer is a string
    of the last step and not its value."""
    digits, terms = (int(dict(re.findall(r"(\w+)=(\d+)", name)).get(key, 2)) for key in ("digits", "terms"))
    for rows in rows_of(name).values():
        for row in rows:
            numbers = re.findall(r"\d+", row["prompt"])
            assert row["prompt"].endswith("=")
            assert len(numbers) == terms
            assert all(number == str(int(number)) and len(number) <= digits for number in numbers)
            assert row["answer"] == str(eval(row["prompt"][:-1]))
        longest = max(len(number) for row in rows for number in re.findall(r"\d+", row["prompt"]))
        assert longest == digits
        assert {"+", "-"} <= {sign for row in rows for sign in row["prompt"]}


def test_a_worked_completion_adds_up_term_by_term_to_the_answer() -> None:
    """Each step worth as much as the problem, one number shorter. Fails when: a step leaves out a term or ends early."""
    for row in rows_of("arithmetic_solved/digits=3/terms=4")["train"]:
        steps = row["completion"].split("=")
        assert [len(re.findall(r"\d+", step)) for step in steps] == [3, 2, 1]
        assert {eval(step) for step in steps} == {int(row["answer"])}
        assert steps[-1] == row["answer"]


@pytest.mark.parametrize("name", NAMES)
def test_no_held_out_problem_is_in_another_split_in_any_order(name: str) -> None:
    """17+25 is 25+17. Fails when: the split is a hash of the text; a problem is drawn twice; solved ones are split otherwise."""
    splits = rows_of(name)
    found = {
        split: [tuple(sorted(int(term) for term in re.findall(r"[+-]?\d+", row["prompt"]))) for row in rows]
        for split, rows in splits.items()
    }
    assert list(found) == ["train", "validation", "test"]
    assert all(len(set(problems)) == len(problems) for problems in found.values())
    assert all(set(found[one]).isdisjoint(found[other]) for one, other in combinations(found, 2))
    if "digits=1" not in name:  # of which there are fewer
        assert {split: len(problems) for split, problems in found.items()} == {"train": 4096, "validation": 512, "test": 512}


def test_solved_problems_are_those_to_be_solved_and_stay_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Made twice; and as the first version made them, since a cache is found by its name alone.

    Fails when: the draws depend on the process; the solved problems are others; the seed changes nothing.
    """
    first, solved, other = (rows_of(name) for name in ("arithmetic", "arithmetic_solved", "arithmetic/seed=1"))
    assert [row["prompt"] for row in first["train"][:3]] == ["39+77=", "66-53=", "66-59="]
    assert [(row["prompt"], row["answer"]) for row in first["test"]] == [(row["prompt"], row["answer"]) for row in solved["test"]]
    assert first["train"][:9] != other["train"][:9]
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "another")
    assert rows_of("arithmetic") == first
    assert first["validation"][4]["origin"] == "synthetic:arithmetic (validation):5"


def test_a_mixture_of_difficulties_can_be_read_and_a_source_says_what_it_is() -> None:
    """Fails when: the name of a difficulty is taken for a path or cut at its colon."""
    mixed = load_splits(DataConfig(dataset="synthetic:arithmetic:0.5,synthetic:arithmetic/terms=3:0.5", max_eval_examples=1024))
    counts = {len(re.findall(r"\d+", prompt)) for prompt in mixed["train"]["prompt"]}
    assert counts == {2, 3}
    assert "3 numbers of up to 2 digits" in describe_source("synthetic:arithmetic/terms=3")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("arithmetics", "Did you mean synthetic:arithmetic?"), ("chess", "There are: arithmetic, arithmetic_solved"),
        ("arithmetic/digits=0", "digits=1 to 9"), ("arithmetic/digits=99999999999999999999", "digits=1 to 9"), ("arithmetic/terms=1", "terms=2 to 9"),
        ("arithmetic/size=3", "is no difficulty"), ("arithmetic/digits", "is no difficulty"), ("arithmetic/digits=x", "is no difficulty"),
    ],
)  # fmt: skip
def test_what_is_no_task_or_difficulty_is_refused_with_what_there_is(name: str, words: str) -> None:
    """Fails when: an unknown difficulty is passed over; the range of a number is not looked at."""
    with pytest.raises(Refusal) as refused:
        load_splits(f"synthetic:{name}")
    assert words in str(refused.value)
    assert synthetic.read_task("arithmetic/digits=3") == ("arithmetic", synthetic.Difficulty(digits=3))
