"""Loading rewards: each way to name one, and each mistake, refused before a model is loaded."""

import sys
from pathlib import Path

import pytest
from datasets import Dataset

from toolkit.config import Refusal, RunConfig
from toolkit.config.rollouts import RewardFunctionsConfig
from toolkit.rollouts.rewards import load_rewards, rewards_made_of
from toolkit.training.resume import other_reference

GOOD = "def good(completions, **columns):\n    return [1.0] * len(completions)\n\ndef asks(completions, tests):\n    return [1.0] * len(completions)\n\ndef asks_wrongly(completions, prompt):\n    return [1.0] * len(completions)\n\nstd = good_std = good\nclass Kind:\n    pass\n\nnumber = 3\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good_rewards.py").write_text(GOOD)
    (tmp_path / "broken_rewards.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "raising_rewards.py").write_text("x = 1\ny = x / 0\n")
    (tmp_path / "written_wrong.py").write_text("def f(:\n")
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_a_reward_is_found_by_module_file_and_in_trls_way(folder: Path) -> None:
    """Fails when: the working directory is not looked in, or the name is the whole of what was written."""
    (folder / "other.py").write_text(GOOD)
    config = RewardFunctionsConfig(reward_funcs=["good_rewards:good", "./other.py:good", "exact_match"], reward_weights=[1, 2, 3])
    rewards = load_rewards(config)
    assert [(each.name, each.weight) for each in rewards] == [("good_rewards.good", 1), ("other.good", 2), ("exact_match", 3)]
    assert [each.function(completions=["a"]) for each in rewards[:2]] == [[1.0], [1.0]]
    dotted = load_rewards(RewardFunctionsConfig(reward_funcs=["good_rewards.good"], reward_processes=0))
    assert [(each.name, each.weight) for each in dotted] == [("good", 1.0)]


@pytest.mark.parametrize(("written", "name"), [
    ("colon_rewards:good", "colon_rewards.py"), ("dot_rewards.good", "dot_rewards.py"), ("./file_rewards.py:good", "file_rewards.py"),
    ("judge", "judge/config.json"),
])  # fmt: skip
def test_what_a_reward_is_made_of_is_known_by_its_content(folder: Path, written: str, name: str) -> None:
    """Of a module, of a file, of a directory. Fails when: one of them has no digest."""
    (folder / "judge").mkdir()
    (folder / name).write_text(GOOD)
    config = RewardFunctionsConfig(reward_funcs=[written, "exact_match"])
    if written != "judge":
        load_rewards(config)
    before = rewards_made_of(config)["files"]
    assert before.keys() == {written}
    assert rewards_made_of(config)["files"] == before
    (folder / name).write_text(f"{GOOD}\n")
    assert rewards_made_of(config)["files"][written] not in ("", before[written])


def test_a_resume_with_another_reference_next_to_the_rewards_is_refused(folder: Path) -> None:
    """Each is allowed by its own name. Fails when: other_reference in resume.py compares the rewards alone, or `beta` has no part in it."""
    (folder / "start").mkdir()
    (folder / "start" / "config.json").write_text("{}")
    config = RewardFunctionsConfig(reward_funcs=["exact_match"])
    assert "reference" not in rewards_made_of(config)
    before = rewards_made_of(config, "start")
    assert other_reference(before, rewards_made_of(config, "start"), RunConfig()) == []
    (folder / "start" / "config.json").write_text("{ }")
    now = rewards_made_of(config, "start")
    with pytest.raises(Refusal, match="--allow-change model"):
        other_reference(before, now, RunConfig(allow_change=["reward_funcs"]))
    assert len(other_reference(before, now, RunConfig(allow_change=["model"]))) == 1


REFUSED = {
    "none at all": ([], [], ["--reward-funcs", "no reward"]),
    "no module": (["not_a_module_of_mine:f"], [], ["not_a_module_of_mine"]),
    "no file": (["missing.py:f"], [], ["missing.py"]),
    "an import in it": (["broken_rewards.py:f"], [], ["nothing_of_that_name"]),
    "raises": (["raising_rewards:f"], [], ["ZeroDivisionError", "raising_rewards.py:2"]),
    "syntax": (["written_wrong.py:f"], [], ["SyntaxError"]),
    "no such name": (["good_rewards:goood"], [], ["Did you mean good"]),
    "no function": (["good_rewards:number"], [], ["int 3"]),
    "a class": (["good_rewards:Kind"], [], ["class"]),
    "a mistyped name": (["exact_mach"], [], ["exact_match"]),
    "one of TRL's": (["think_format_reward"], [], ["trl.rewards:think_format_reward"]),
    "no directory": (["./runs/reward.v2"], [], ["nor a directory"]),
    "no model in it": (["empty"], [], ["empty"]),
    "fewer weights": (["exact_match", "number"], [1.0], ["--reward-weights", "2"]),
    "more weights": (["exact_match"], [1.0, 2.0], ["--reward-weights"]),
    "weights of 0": (["exact_match"], [0.0], ["--reward-weights"]),
    "twice": (["exact_match", "exact_match"], [], ["twice"]),
    "no length": (["length"], [], ["--reward-length"]),
    "a name that a metric has": (["good_rewards:good", "good_rewards:good_std"], [], ["reward_good_std"]),
    "another name that a metric has": (["good_rewards:std"], [], ["reward_std.", "function std"]),
    "no name": (["good_rewards:"], [], ["module:function"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_reward_that_cannot_be_is_refused_when_it_is_loaded(folder: Path, case: str) -> None:
    """Fails when: its check is taken out of `load_rewards` or `load_function`."""
    written, weights, words = REFUSED[case]
    with pytest.raises(Refusal) as refused:
        load_rewards(RewardFunctionsConfig(reward_funcs=written, reward_weights=weights), tokenizer=object())  # type: ignore[arg-type]
    assert [each for each in words if each not in str(refused.value)] == []


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: `jsonschema_installed` is not asked at the start."""
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(Refusal, match="pip install"):
        load_rewards(RewardFunctionsConfig(reward_funcs=["json_schema"]))


@pytest.mark.parametrize(("name", "settings"), [("regex", {"reward_pattern": "(["}), ("json_schema", {"reward_schema": "schema.json"}), ("json_schema", {"reward_schema": "no.json"})])
def test_a_pattern_and_a_schema_that_are_none_are_refused_at_once(folder: Path, name: str, settings: dict[str, str]) -> None:
    """Fails when: they are not compiled in `_built_in`."""
    pytest.importorskip("jsonschema")
    (folder / "schema.json").write_text('{"type": "objekt"}')
    with pytest.raises(Refusal, match=next(iter(settings)).replace("_", "-")):
        load_rewards(RewardFunctionsConfig(reward_funcs=[name], **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(("written", "answers", "words"), [
    ("number", "", ["--answer-column", "answer", "split validation"]), ("exact_match", "answr", ["the column answr", "Give --answer-column answer"]),
    ("good_rewards:asks", "", ["takes tests", "split train"]), ("good_rewards:asks_wrongly", "", ["takes prompt;"]),
])  # fmt: skip
def test_a_column_that_the_data_have_not_is_refused_before_a_model_is_loaded(folder: Path, written: str, answers: str, words: list[str]) -> None:
    """The test split, which no run reads, may be without. Fails when: `load_rewards` looks at one split, or at the first evaluation alone."""
    config = RewardFunctionsConfig(reward_funcs=[written], **({"answer_column": answers} if answers else {}))  # type: ignore[arg-type]
    rows = Dataset.from_list([{"prompt": "1+1=", "answer": "2"}])
    others = rows.rename_column("answer", "right") if written == "number" else rows
    with pytest.raises(Refusal) as refused:
        load_rewards(config, splits={"train": rows, "validation": others})
    assert [each for each in words if each not in str(refused.value)] == []
    good = RewardFunctionsConfig(reward_funcs=["exact_match", "good_rewards:good"])
    assert len(load_rewards(good, splits={"train": rows, "validation": rows, "test": rows.remove_columns("answer")})) == 2
