"""Sweeps of plain functions: proposals, the journal, and sweeps that are cut off anywhere."""

import dataclasses
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.config import Refusal
from toolkit.sweeps.journal import JOURNAL, Outcome, Plan, held, read_journal
from toolkit.sweeps.loop import best_of, run_sweep, value_of
from toolkit.sweeps.space import Point, read_space

SEARCH = ["x=float:-2..2", "y=log:1e-3..1e3", "n=int:1..9"]


def plan(strategy: str = "random", trials: int = 12, search: list[str] = SEARCH, optuna: str | None = None) -> Plan:
    return Plan("r.py", "digest", [], search, strategy, 0, trials, "eval_loss", False, optuna=optuna)


def bowl(number: int, settings: Point) -> Outcome:
    """A known optimum: x = 0.5, y = 1, n = 3."""
    import math

    x, y, n = float(settings.get("x", 0.5)), float(settings.get("y", 1.0)), int(settings.get("n", 3))
    return Outcome((x - 0.5) ** 2 + 0.1 * math.log10(y) ** 2 + 0.05 * (n - 3) ** 2)


class Cut(BaseException):
    """The end of a process."""


def rows(folder: Path) -> list[tuple[int, dict[str, object], float | None]]:
    return [(trial.number, dict(trial.settings), value_of(trial)) for trial in read_journal(folder)[1].values()]


@pytest.mark.parametrize("strategy", ["random", "quasirandom", "tpe", pytest.param("gp", marks=pytest.mark.slow), "cmaes"])
def test_a_sweep_cut_off_anywhere_continues_to_the_same_trials(strategy: str, tmp_path: Path) -> None:
    """A cut before every other trial on average, some of them in the middle of the journal's last line. Equality of all settings and values.

    Fails when: loop.py does not tell the strategy the trials that were in the journal, or repair() leaves a torn line.
    """
    if strategy in ("tpe", "gp", "cmaes"):
        pytest.importorskip("optuna")
    asked = plan(strategy, 14 if strategy != "gp" else 12)
    run_sweep(tmp_path / "whole", asked, bowl)
    chance, computed = random.Random(0), list[int]()

    def sometimes(number: int, settings: Point) -> Outcome:
        if chance.random() < 0.5:
            raise Cut
        computed.append(number)
        return bowl(number, settings)

    cut, cuts = tmp_path / "cut", 0
    while True:
        try:
            run_sweep(cut, asked, sometimes)
            break
        except Cut:
            cuts += 1
            journal = cut / JOURNAL
            content = journal.read_bytes()
            if chance.random() < 0.5:  # the start of the trial was being written
                last = content.rstrip(b"\n").rfind(b"\n") + 1
                journal.write_bytes(content[: chance.randint(last, len(content))])
    assert cuts >= 5
    assert rows(cut) == rows(tmp_path / "whole")
    assert computed == list(range(asked.trials))


def test_an_end_that_was_torn_is_computed_again_and_written_once(tmp_path: Path) -> None:
    """Fails when: repair() in journal.py leaves the torn line, which then swallows the next record."""
    run_sweep(tmp_path, plan(trials=3), bowl)
    before = rows(tmp_path)
    journal = tmp_path / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-9])
    run_sweep(tmp_path, plan(trials=3), bowl)
    assert rows(tmp_path) == before


def test_a_longer_sweep_begins_with_the_shorter_one(tmp_path: Path) -> None:
    """Fails when: strategies.py seeds random proposals by more than the seed and the number of the trial."""
    run_sweep(tmp_path / "long", plan(trials=9), bowl)
    run_sweep(tmp_path / "short", plan(trials=4), bowl)
    run_sweep(tmp_path / "short", plan(trials=9), bowl)
    assert rows(tmp_path / "short") == rows(tmp_path / "long")


def test_a_grid_is_every_combination_once(tmp_path: Path) -> None:
    """Against itertools.product. Fails when: _grid_points leaves out the last choice of a dimension."""
    found = run_sweep(tmp_path, plan("grid", 99, ["a=1,2,3", "b=x,y"]), lambda number, settings: Outcome(float(number)))
    assert [tuple(trial.settings.values()) for trial in found.values()] == list(itertools.product("123", "xy"))


@pytest.mark.parametrize(("search", "make"), [("n=int:2..5", int), ("n=logint:1..64", int), ("n=log:1e-5..1e-3", float)])
def test_ranges_hold_both_ends_and_nothing_else(search: str, make: Callable[[float], float]) -> None:
    """Fails when: Dimension.at leaves out the half around the ends of integers, so that the highest is never reached."""
    dimension = read_space([search])[0]
    values = [dimension.at(share / 4000) for share in range(4000)]
    assert all(dimension.low <= float(value) <= dimension.high and type(value) is make for value in values)
    if make is int:
        assert {min(values), max(values)} == {int(dimension.low), int(dimension.high)}
    if search == "n=int:2..5":
        assert [values.count(number) for number in (2, 3, 4, 5)] == [1000] * 4
    if search.startswith("n=log:"):
        assert sum(float(value) < 1e-4 for value in values) == pytest.approx(2000, abs=2)


def test_equal_settings_are_computed_once_and_failures_do_not_end_a_sweep(tmp_path: Path) -> None:
    """Fails when: _known in loop.py returns None always."""
    computed = list[Point]()

    def trial(number: int, settings: Point) -> Outcome:
        computed.append(settings)
        return Outcome(None, "out of memory", 1) if settings["a"] == "1" else bowl(number, {})

    found = run_sweep(tmp_path, plan("random", 30, ["a=1,2,3"]), trial)
    assert len(found) == 30
    assert sum(settings["a"] != "1" for settings in computed) == 2
    assert all(each.outcome is not None for each in found.values())
    assert {each.outcome.reason for each in found.values() if each.outcome and value_of(each) is None} == {"out of memory"}


@pytest.mark.parametrize("strategy", ["tpe", "cmaes"])
def test_what_learns_from_results_beats_what_does_not(strategy: str, tmp_path: Path) -> None:
    """40 trials on a bowl. Fails when: strategies.py tells Optuna the negated value."""
    pytest.importorskip("optuna")
    values = {}
    for name in (strategy, "random"):
        best = best_of(run_sweep(tmp_path / name, plan(name, 40), bowl), False)
        assert best is not None
        values[name] = value_of(best) or 0.0
    assert values[strategy] < values["random"]


def test_tpe_proposes_what_optuna_alone_proposes(tmp_path: Path) -> None:
    """Optuna's own optimize, run for real, on the same function and seed: the same 25 points, exactly.

    Fails when: strategies.py seeds its sampler otherwise.
    """
    optuna = pytest.importorskip("optuna")

    def objective(trial: "optuna.Trial") -> float:
        point = {
            "x": trial.suggest_float("x", -2, 2),
            "y": trial.suggest_float("y", 1e-3, 1e3, log=True),
            "n": trial.suggest_int("n", 1, 9),
        }
        return bowl(0, point).value or 0.0

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=25)
    found = run_sweep(tmp_path, plan("tpe", 25), bowl)
    assert [dict(trial.settings) for trial in found.values()] == [trial.params for trial in study.trials]


def test_one_process_at_a_time_and_one_plan_a_folder(tmp_path: Path) -> None:
    """Fails when: _check_same in loop.py compares nothing."""
    run_sweep(tmp_path, plan(trials=2), bowl)
    with held(tmp_path), pytest.raises(Refusal, match="another process"):
        run_sweep(tmp_path, plan(trials=2), bowl)
    for other in ({"seed": 1}, {"recipe_digest": "changed"}, {"search": ["x=float:0..1"]}, {"metric": "eval_f1"}):
        with pytest.raises(Refusal, match="--sweep-dir"):
            run_sweep(tmp_path, dataclasses.replace(plan(trials=2), **other), bowl)


@pytest.mark.parametrize(
    ("written", "says"),
    [([], "nothing is searched"), (["x"], "values are expected"), (["x=float:2..1"], "upside down"), (["x=1..2"], "needs its kind"),
     (["x=log:0..1"], "above 0"), (["x=int:1.5..2"], "integers"), (["x=float:0..inf"], "finite"), (["x=a,a"], "twice"),
     (["x=a", "x=b"], "2 times"), (["x=cauchy:1..2"], "no kind of range"), (["x=float:1..1"], "empty"), (["x=float:nan..1"], "finite")],
)  # fmt: skip
def test_a_space_that_cannot_be_meant_is_refused(written: list[str], says: str) -> None:
    """Fails when: the check of that case is taken out of space.py."""
    with pytest.raises(Refusal, match=says):
        read_space(written)


def test_a_journal_of_something_else_is_refused_by_line(tmp_path: Path) -> None:
    """Fails when: read_journal skips lines that it cannot read."""
    run_sweep(tmp_path, plan(trials=2), bowl)
    journal = tmp_path / JOURNAL
    journal.write_bytes(journal.read_bytes() + b'{"kind": "study"}\n')
    with pytest.raises(Refusal, match=f"{JOURNAL}:6"):
        run_sweep(tmp_path, plan(trials=2), bowl)
