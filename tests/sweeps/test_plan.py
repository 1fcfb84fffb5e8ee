"""What a sweep is asked for: read from flags and files, checked on the recipe, and what makes two trials the same."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import toolkit as tk
from toolkit.cli.main import app
from toolkit.cli.sweep_plan import SweepOptions, make_plan
from toolkit.command_line.reading import read_command_line
from toolkit.command_line.recipe import config_class_of_file
from toolkit.config import Refusal, settings_of
from toolkit.sweeps.addresses import _NOT_OF_THE_RESULT, address_of, recipe_digest
from toolkit.sweeps.functions import FunctionTrial
from toolkit.sweeps.journal import JournalFile, Plan, plan_record
from toolkit.sweeps.space import searches_in_file

RECIPE = str(Path(__file__).parents[2] / "recipes" / "accelerated.py")
RATE = ["learning_rate=log:1e-4..1e-2"]


@pytest.mark.parametrize(
    ("words", "asked", "says"),
    [([], {"search": ["num_hidden_layers=float:1..3"]}, "whole number"), ([], {"search": ["num_hidden_layers=log:1..8"]}, "whole number"),
     ([], {"search": RATE, "rungs": "3,9"}, "no effect"), ([], {"search": RATE, "reduction": 4}, "no effect"),
     (["--max-steps", "20"], {"search": RATE, "prune": "median", "rungs": "3,9"}, "no effect"),
     ([], {"search": ["max_steps=5,10"], "prune": "asha", "rungs": "2,5"}, "length of every trial"),
     ([], {"search": RATE, "budget_hours": math.nan}, "--budget-hours"), ([], {"search": RATE, "hang_minutes": math.inf}, "--hang-minutes"), ([], {"search": RATE, "budget_hours": 0.0}, "--budget-hours"),
     ([], {"search": RATE, "objective": ["eval_acuracy"]}, "--objective eval_acuracy"), ([], {"search": ["allow_change=a,b"]}, "decides that one"),
     ([], {"search": RATE, "objective": [":max"]}, "write METRIC:max")],
)  # fmt: skip
def test_what_cannot_be_meant_of_a_recipe_is_refused(words: list[str], asked: dict[str, Any], says: str) -> None:
    """Fails when: ends in space.py has no value between, or _check_options or _check_measured in sweep_plan.py is not called."""
    with pytest.raises(Refusal, match=says):
        make_plan(RECIPE, words, SweepOptions(**asked))


@pytest.mark.parametrize(
    ("words", "says"),
    [(["status", "s", "--strategy", "tpe"], "--strategy: has no effect with `toolkit sweep status`"),
     (["continue", "s", "--seeds", "3"], "--seeds: has no effect"), (["continue", "s", "--dry-run"], "--dry-run: has no effect"),
     (["best", "s", "--output", "x"], "--output: has no effect"),
     (["report", "s", "--storage", ""], "--storage: is empty"), (["accelerated", "--search", "seed=1,2", "--dry-run", "--output", "x"], "--output: has no effect"),
     (["accelerated", "--search", "seed=1,2", "--dry-run", "--sweep-dir="], "--sweep-dir: is empty")],
)  # fmt: skip
def test_an_option_without_effect_is_refused(words: list[str], says: str) -> None:
    """Fails when: sweep in cli/sweep.py does not call check_given."""
    done = CliRunner().invoke(app, ["sweep", *words])
    assert isinstance(done.exception, Refusal), done.output
    assert says in str(done.exception)


def test_the_number_of_trials_of_hyperband_is_refused_from_the_start_and_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: a sweep is continued with one, which would change nothing."""
    asked = {"search": RATE, "prune": "hyperband", "rungs": "1,2,4"}
    with pytest.raises(Refusal, match="--trials 9"):
        make_plan(RECIPE, [], SweepOptions(**asked, trials=9))
    monkeypatch.chdir(tmp_path)
    JournalFile(tmp_path).append(plan_record(make_plan(RECIPE, [], SweepOptions(**asked))))
    monkeypatch.setattr("toolkit.cli.sweep._run", lambda *_: pytest.fail("begins"))
    done = CliRunner().invoke(app, ["sweep", "continue", str(tmp_path), "--trials", "9"])
    assert isinstance(done.exception, Refusal), done.output
    assert "--trials 9" in str(done.exception)


def test_metrics_that_are_measured_may_decide() -> None:
    """Fails when: _check_measured in sweep_plan.py refuses every objective, or a metric that is no evaluation's."""
    plan = make_plan(RECIPE, [], SweepOptions(search=RATE, objective=["eval_loss", "eval_accuracy", "parameters:min"]))
    assert [(each.metric, each.maximize) for each in plan.objectives] == [("eval_loss", False), ("eval_accuracy", True), ("parameters", False)]


@pytest.mark.parametrize("recipe", ["accelerated", "grpo"])
def test_the_last_rung_is_the_length_of_a_run_whose_length_was_not_given(recipe: str) -> None:
    """Of a recipe with a number of steps of its own, too. Fails when: _with_evaluations in sweep_plan.py compares with a default."""
    script = Path(RECIPE).with_name(f"{recipe}.py")
    plan = make_plan(str(script), [], SweepOptions(search=RATE, prune="halving", rungs="1,2"))
    assert plan.words[:2] == ["--max-steps", "2"]
    with pytest.raises(Refusal, match="--max-steps 3"):
        make_plan(str(script), ["--max-steps", "3"], SweepOptions(search=RATE, prune="halving", rungs="1,2"))


@pytest.mark.parametrize(
    ("written", "says"),
    [("a: [1, 2]\na: [3, 4]", "twice"), ("a: [[1, 2], [3]]", "choice"), ("a: ['x,y', z]", "'x,y'"), ("a: [null, 1]", "choice"),
     ("a: ['p when q=1', z]", "choice"), ("a: &x [*x]", "levels deep"), ("a: null", "no value"), ("a: {min: 1, max: 2}", "has min, max"), ("[]", "expected")],
)  # fmt: skip
def test_a_file_that_would_be_read_as_something_else_is_refused(written: str, says: str, tmp_path: Path) -> None:
    """Fails when: searches_in_file in space.py reads with yaml.safe_load, or _listed joins whatever it is given."""
    path = tmp_path / "space.yaml"
    path.write_text(written)
    with pytest.raises(Refusal, match=says):
        searches_in_file(path)


def test_a_device_in_the_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    """One like /dev/zero has no end. Fails when: searches_in_file in space.py does not read with read_text_file."""
    (tmp_path / "space.yaml").symlink_to("/dev/null")
    with pytest.raises(Refusal, match="is a device"):
        searches_in_file(tmp_path / "space.yaml")


def test_a_file_is_read_as_the_same_flags(tmp_path: Path) -> None:
    """Booleans, ranges, an anchor and a condition. Fails when: _listed in space.py writes True for true."""
    path = tmp_path / "space.yaml"
    path.write_text("a: &rates [1.5, 2]\nb: *rates\nc: [true, false]\nd: {values: log:1..2, when: {c: true}}\n")
    assert searches_in_file(path) == ["a=1.5,2", "b=1.5,2", "c=true,false", "d=log:1..2 when c=true"]


@pytest.mark.parametrize(
    ("space", "more", "says"),
    [({"x": [(1, 2), (3, 4)]}, {}, "short name"), ({"x": 3}, {}, "no range"), ({"x-y": "float:0..1"}, {}, "x-y"),
     ({"x": "float:0..1"}, {"trials": 0}, "trials=0"), ({"x": "float:0..1"}, {"parallel": 0}, "parallel=0"), ({"x": "float:0..1"}, {"prune": "pbt"}, "prune"),
     ({"x": "float:0..1"}, {"prune": "asha"}, "rungs"), ({"x": "float:0..1"}, {"prune": "asha", "rungs": [9, 3]}, "rungs"),
     ({"x": "float:0..1"}, {"rungs": [3, 9]}, "no effect"), ({"x": "float:0..1"}, {"prune": "asha", "rungs": [3, 9], "reduction": 1}, "reduction=1"),
     ({"x": "float:0..1"}, {"maximize": {}}, "maximize")],
)  # fmt: skip
def test_arguments_in_python_are_refused_as_flags_are(space: dict[str, Any], more: dict[str, Any], says: str) -> None:
    """Fails when: sweep in functions.py does not call _check."""
    with pytest.raises(Refusal, match=says):
        tk.sweep(lambda settings: 0.0, space, **more)


def test_choices_come_back_as_they_were_given() -> None:
    """None, a number and a truth, in the function and in what is returned. Fails when: sweep in functions.py returns the journal's texts."""
    given: list[Any] = []

    def function(settings: dict[str, Any]) -> float:
        given.append(settings["x"])
        return float(len(given))

    trials = tk.sweep(function, {"x": [None, 2, True]}, strategy="grid", trials=3)
    assert given == [trial.settings["x"] for trial in trials] == [None, 2, True]


def test_a_value_that_is_not_returned_fails_the_trial_by_name() -> None:
    """A constraint on what is not returned; a pruned trial has returned nothing yet. Fails when: _call in functions.py compares no names."""
    trials = tk.sweep(lambda settings: 1.0, {"x": "float:0..1"}, trials=2, constraints=["size<=1"])
    assert [trial.outcome and trial.outcome.reason for trial in trials] == ["returned no size"] * 2

    def reporting(settings: dict[str, Any], trial: FunctionTrial) -> dict[str, float]:
        for step in range(1, 4):
            trial.report(step, settings["x"])
        return {"value": settings["x"], "size": 1.0}

    trials = tk.sweep(reporting, {"x": "float:0..1"}, trials=12, prune="median", constraints=["size<=1"])
    pruned = [trial.outcome for trial in trials if trial.outcome]
    assert any(each.pruned for each in pruned)
    assert not any(each.reason for each in pruned)


@pytest.mark.parametrize("value", [math.nan, math.inf, "1.0", (1.0,), 10**400, {"value": [1.0], "size": 1.0}])
def test_a_value_that_is_no_finite_number_fails_the_trial_by_name(value: Any) -> None:
    """The others go on. Fails when: _is_number in functions.py lets an error of math.isfinite pass, or _call compares with `values`."""
    trials = tk.sweep(lambda settings: value if settings["x"] == 1 else 2.0, {"x": [1, 2]}, strategy="grid", trials=2)
    good, bad = (trial.outcome for trial in trials)
    assert good is not None
    assert bad is not None
    assert good.values == {"value": 2.0}
    assert bad.reason.startswith("value is ")
    assert "value" not in bad.values


def address(*words: str, search: list[str] = RATE) -> str:
    config_class = config_class_of_file(Path(RECIPE))
    plan = dataclasses.replace(Plan(RECIPE, "digest", [], search, "random", 0, 1, []))
    return address_of(read_command_line(config_class, list(words), {}), plan)


def test_a_trial_is_known_by_what_decides_its_value() -> None:
    """How it stops, what fails it and what it measures count; where it logs and saves does not, unless that is searched.

    Fails when: address_of in addresses.py leaves out all settings that a resume may change, or those that are searched.
    """
    assert len({address(*words) for words in [(), ("--logging-steps", "7"), ("--run-name", "x"), ("--save-strategy", "no")]}) == 1
    assert address("--learning-rate", "1e-2") == address("--learning-rate", "0.01")
    others = [("--early-stopping-patience", "1"), ("--metrics", "f1"), ("--eval-on-start",), ("--learning-rate", "3e-3")]
    assert len({address(*words) for words in [(), *others]}) == 5
    searched = ["dataloader_num_workers=0,1"]
    assert address("--dataloader-num-workers", "1", search=searched) != address("--dataloader-num-workers", "0", search=searched)
    known = set().union(*(settings_of(config_class_of_file(path)) for path in Path(RECIPE).parent.glob("[gs]*.py")))
    assert known >= _NOT_OF_THE_RESULT


@pytest.mark.parametrize("value", [
    "rows.jsonl", "rows.jsonl:0.7,other.jsonl:0.3", "rows.jsonl:good", "rows.py:good", "parts.rows:good", "parts",
])  # fmt: skip
def test_files_that_a_setting_names_are_a_part_of_a_trial(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a mixture and code of rewards too. Fails when: _places in addresses.py knows the whole value alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    files = [tmp_path / name for name in ("rows.jsonl", "rows.py", "parts/rows.py")]
    found = set()
    for text in ("", "x", "xy"):
        for file in files:
            file.write_text(text)
        found.add(address("--metrics", "f1", "--run-name", "x", "--dataset", value))
    assert len(found) == 3


def test_what_a_recipe_imports_is_a_part_of_it(tmp_path: Path) -> None:
    """A file next to it, one that this imports in a function, and one of a package; another file is none.

    Fails when: _imported in addresses.py looks at the recipe's own text only, or at no package, or parses what is no Python.
    """
    files = {"recipe.py": "import losses\nimport torch\n", "losses.py": "def loss():\n    from parts import one\n", "parts/__init__.py": "",
             "parts/one.py": "from . import two\n", "parts/two.py": "x = 1\n", "other.py": "x = 1\n"}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    digests = [recipe_digest(tmp_path / "recipe.py")]
    for name in ("other.py", "losses.py", "parts/__init__.py", "parts/one.py", "parts/two.py"):
        (tmp_path / name).write_text((tmp_path / name).read_text() + "# changed\n")
        digests.append(recipe_digest(tmp_path / "recipe.py"))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5
    (tmp_path / "parts" / "two.py").write_bytes("# -*- coding: latin-1 -*-\nx = 'é'\n".encode("latin-1"))
    latin = recipe_digest(tmp_path / "recipe.py")
    (tmp_path / "parts" / "two.py").write_text("print 'of another Python'\n")
    assert len({*digests, latin, recipe_digest(tmp_path / "recipe.py")}) == 7


def test_a_recipe_that_raises_at_import_is_refused_with_its_line(tmp_path: Path) -> None:
    """Fails when: import_recipe in cli/recipe.py catches ImportError alone."""
    path = tmp_path / "broken.py"
    path.write_text("\n\nraise ValueError('boom')\n")
    with pytest.raises(Refusal, match=r"broken\.py:3: .*ValueError: boom"):
        make_plan(str(path), [], SweepOptions(search=RATE))
