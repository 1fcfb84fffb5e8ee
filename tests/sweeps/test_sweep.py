"""Sweeps of plain functions: proposals, the journal, sweeps that are cut off anywhere, and several workers."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from toolkit.config import Refusal
from toolkit.sweeps.functions import Ended
from toolkit.sweeps.journal import JOURNAL, Job, Journal, JournalFile, Objective, Outcome, Plan, read_journal
from toolkit.sweeps.loop import Stopped, Sweep, run_sweep
from toolkit.sweeps.results import best_trials, result_of, trials_of
from toolkit.sweeps.space import Point, read_space
from toolkit.sweeps.storage import JournalDatabase, open_journal
from toolkit.sweeps.strategies import count_points, make_strategy

SEARCH = ["x=float:-2..2", "y=log:1e-3..1e3", "n=int:1..9"]


def plan(strategy: str = "random", trials: int = 12, search: list[str] = SEARCH, **more: Any) -> Plan:
    return Plan("r.py", "digest", [], search, strategy, 0, trials, [Objective("eval_loss")], **more)


def bowl(settings: Point) -> Outcome:
    """A known optimum: x = 0.5, y = 1, n = 3."""
    x, y, n = float(settings.get("x", 0.5)), float(settings.get("y", 1.0)), int(settings.get("n", 3))
    return Outcome({"eval_loss": (x - 0.5) ** 2 + 0.1 * math.log10(y) ** 2 + 0.05 * (n - 3) ** 2})


def run(place: Path | Journal, asked: Plan, trial: Callable[[Point], Outcome] = bowl, slots: int = 1) -> list[Job]:
    journal = JournalFile(place) if isinstance(place, Path) else place
    return run_sweep(Sweep(journal, asked, journal.liveness()), lambda job, slot, prune: Ended(trial(job.settings)), slots)


class Cut(BaseException):
    """The end of a process."""


def rows(folder: Path) -> list[tuple[int, dict[str, object], list[float]]]:
    asked, jobs = read_journal(JournalFile(folder))
    assert asked is not None
    return [(job.trial, dict(job.settings), list(result_of(job, asked).values)) for job in jobs]


@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize("strategy", ["random", "quasirandom", "tpe", pytest.param("gp", marks=pytest.mark.slow), "cmaes"])
def test_a_sweep_cut_off_anywhere_continues_to_the_same_trials(strategy: str, parallel: int, tmp_path: Path) -> None:
    """A cut before every other trial on average, some of them in the middle of the journal's last line. Equality of all settings and values.

    Fails when: Sweep.read in loop.py does not tell the schedule what a proposal was told, or _repair leaves a torn line.
    """
    if strategy in ("tpe", "gp", "cmaes"):
        pytest.importorskip("optuna")
    asked = plan(strategy, 14 if strategy != "gp" else 12, parallel=parallel)
    run(tmp_path / "whole", asked)
    chance, computed = random.Random(0), list[Point]()

    def sometimes(settings: Point) -> Outcome:
        if chance.random() < 0.5:
            raise Cut
        computed.append(settings)
        return bowl(settings)

    cut, cuts = tmp_path / "cut", 0
    while True:
        try:
            run(cut, asked, sometimes)
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


def test_trials_are_computed_once_however_often_the_sweep_is_cut(tmp_path: Path) -> None:
    """Fails when: claim in loop.py hands out a job that has an outcome."""
    computed = list[Point]()

    def sometimes(settings: Point) -> Outcome:
        if len(computed) % 3 == 2 and settings not in computed:
            computed.append({})
            raise Cut
        computed.append(settings)
        return bowl(settings)

    for _ in range(9):
        with __import__("contextlib").suppress(Cut):
            run(tmp_path, plan(trials=10), sometimes)
    assert sorted(str(each) for each in computed if each) == sorted(str(settings) for _, settings, _ in rows(tmp_path))


def test_an_end_that_was_torn_is_computed_again_and_written_once(tmp_path: Path) -> None:
    """Fails when: _repair in journal.py leaves the torn line, which then swallows the next record."""
    run(tmp_path, plan(trials=3))
    before = rows(tmp_path)
    journal = tmp_path / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-9])
    run(tmp_path, plan(trials=3))
    assert rows(tmp_path) == before


def test_a_longer_sweep_begins_with_the_shorter_one(tmp_path: Path) -> None:
    """Fails when: strategies.py seeds random proposals by more than the seed and the number of the trial."""
    run(tmp_path / "long", plan(trials=9))
    run(tmp_path / "short", plan(trials=4))
    run(tmp_path / "short", plan(trials=9))
    assert rows(tmp_path / "short") == rows(tmp_path / "long")


def test_a_grid_is_every_combination_once(tmp_path: Path) -> None:
    """Against itertools.product. Fails when: _grid_points leaves out the last choice of a dimension."""
    jobs = run(tmp_path, plan("grid", 99, ["a=1,2,3", "b=x,y"]))
    assert [tuple(job.settings.values()) for job in jobs] == list(itertools.product("123", "xy"))


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


def test_random_draws_of_choices_are_every_combination_once_in_an_order_of_the_seed(tmp_path: Path) -> None:
    """With a condition. Fails when: one is drawn twice (as members of a population are), they don't end, or a range is taken for
    choices."""
    space = read_space(["a=1,2,3", "b=4,5", "c=6,7,8 when a=1"])
    orders = []
    for seed in range(3):
        strategy = make_strategy("random", space, seed, [False])
        asked = [strategy.ask(number) for number in range(11)]
        assert (count_points("random", space), asked[10]) == (10, None)
        orders.append(str(asked[:10]))
        assert sorted(map(str, asked[:10])) == sorted(str(make_strategy("grid", space, 0, [False]).ask(number)) for number in range(10))
        assert asked[7] == make_strategy("random", space, seed, [False]).ask(7)  # as another process asks
    assert len(set(orders)) == 3
    assert len({str(make_strategy("random", space, 0, [False], repeats=True).ask(number)) for number in range(10)}) < 10
    assert count_points("random", read_space(["a=1,2", "x=float:0..1"])) is None
    assert count_points("random", read_space([f"{name}=" + ",".join(map(str, range(50))) for name in "abcd"])) is None


@pytest.mark.parametrize("parallel", [1, 4])
def test_equal_settings_are_computed_once_and_failures_do_not_end_a_sweep(parallel: int, tmp_path: Path) -> None:
    """Fails when: _equal in loop.py returns None always."""
    computed = list[Point]()

    def trial(settings: Point) -> Outcome:
        computed.append(settings)
        return Outcome(reason="out of memory", code=1) if settings["a"] == "1" else bowl({})

    jobs = run(tmp_path, plan("quasirandom", 30, ["a=1,2,3"], parallel=parallel), trial, parallel)
    assert len(jobs) == 30
    assert sum(settings["a"] != "1" for settings in computed) == 2
    assert {job.outcome.reason for job in jobs if job.outcome and not job.outcome.values} == {"out of memory"}
    assert all(job.outcome is not None for job in jobs)


@pytest.mark.parametrize("strategy", ["tpe", "cmaes"])
def test_what_learns_from_results_beats_what_does_not(strategy: str, tmp_path: Path) -> None:
    """40 trials on a bowl. Fails when: strategies.py tells Optuna the negated value."""
    pytest.importorskip("optuna")
    values = {}
    for name in (strategy, "random"):
        asked = plan(name, 40)
        best = best_trials(list(trials_of(run(tmp_path / name, asked)).values()), asked)
        values[name] = result_of(best[0], asked).values[0]
    assert values[strategy] < values["random"]


def test_cmaes_proposes_what_optuna_alone_proposes(tmp_path: Path) -> None:
    """Optuna's own optimize, run for real, on the same function and seed: the same 25 points, exactly.

    Fails when: _CmaEs in strategies.py asks a second time for a point that is accepted.
    """
    optuna = pytest.importorskip("optuna")
    search = ["x=float:-2..2", "y=log:1e-3..1e3"]

    def objective(trial: "optuna.Trial") -> float:
        point = {"x": trial.suggest_float("x", -2, 2), "y": trial.suggest_float("y", 1e-3, 1e3, log=True)}
        return bowl(point).values["eval_loss"]

    study = optuna.create_study(sampler=optuna.samplers.CmaEsSampler(seed=0))
    study.optimize(objective, n_trials=25)
    assert [dict(job.settings) for job in run(tmp_path, plan("cmaes", 25, search))] == [trial.params for trial in study.trials]


def test_tpe_proposes_what_optuna_proposes_from_the_same_results(tmp_path: Path) -> None:
    """Optuna's own study, told every trial before with ask and tell, and its sampler seeded for each: the same 25 points, exactly.

    Fails when: _Rebuilt in strategies.py gives the study the trials without their values.
    """
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study()
    for job in run(tmp_path, plan("tpe", 25)):
        study.sampler = optuna.samplers.TPESampler(seed=random.Random(f"0 {job.trial}").getrandbits(32))
        space = {
            "x": optuna.distributions.FloatDistribution(-2, 2), "y": optuna.distributions.FloatDistribution(1e-3, 1e3, log=True),
            "n": optuna.distributions.IntDistribution(1, 9),
        }  # fmt: skip
        trial = study.ask(space)
        assert trial.params == dict(job.settings)
        study.tell(trial, bowl(trial.params).values["eval_loss"])


@pytest.mark.parametrize("strategy", ["random", "tpe"])
@pytest.mark.parametrize("kind", ["file", "database"])
def test_workers_of_one_journal_share_its_trials(kind: str, strategy: str, tmp_path: Path) -> None:
    """Two workers that take turns, trial by trial, next to one with two slots: the same trials, each computed by one of them.

    Fails when: claim in loop.py hands out a job that a living worker runs.
    """
    if strategy == "tpe":
        pytest.importorskip("optuna")
    asked, computed = plan(strategy, 12, parallel=2), list[int]()
    run(tmp_path / "whole", asked, slots=2)

    def opened() -> Journal:
        return JournalFile(tmp_path / "shared") if kind == "file" else JournalDatabase(f"sqlite:///{tmp_path / 'sweeps.db'}", "shared")

    workers = [Sweep(journal := opened(), asked, journal.liveness()) for _ in range(2)]
    for worker in workers:
        worker.open()
    held: list[Job | None] = [None, None]
    turns = itertools.cycle([0, 1, 1, 0, 0])
    for _ in range(200):
        number = next(turns)
        worker, job = workers[number], held[number]
        if job is not None:
            worker.end(job.number, bowl(job.settings))
            held[number] = None
            computed.append(job.number)
        claimed = worker.claim()
        held[number] = claimed if isinstance(claimed, Job) else None
    assert sorted(computed) == list(range(12))
    found = read_journal(opened())[1]
    assert [(job.trial, dict(job.settings), list(result_of(job, asked).values)) for job in found] == rows(tmp_path / "whole")


def test_one_plan_a_journal(tmp_path: Path) -> None:
    """Fails when: other_fields in journal.py compares nothing, or a changed recipe is sent to `continue`, which refuses it too."""
    run(tmp_path, plan(trials=2))
    others: list[dict[str, Any]] = [
        {"seed": 1}, {"recipe_digest": "changed"}, {"search": ["x=float:0..1"]}, {"objectives": [Objective("eval_f1", True)]},
    ]  # fmt: skip
    for other in others:
        with pytest.raises(Refusal, match="--sweep-dir") as refused:
            run(tmp_path, dataclasses.replace(plan(trials=2), **other))
        assert ("sweep continue" in str(refused.value)) == ("recipe_digest" not in other)


@pytest.mark.parametrize(
    ("written", "says"),
    [([], "nothing is searched"), (["x"], "values are expected"), (["x=float:2..1"], "upside down"), (["x=1..2"], "needs its kind"),
     (["x=log:0..1"], "above 0"), (["x=int:1.5..2"], "integers"), (["x=float:0..inf"], "finite"), (["x=a,a"], "twice"),
     (["x=a", "x=b"], "2 times"), (["x=cauchy:1..2"], "no kind of range"), (["x=float:1..1"], r"empty.*leave out --search x and give --x 1\.0\."), (["x=float:nan..1"], "finite"),
     (["x=a,b", "y=1,2 when z=a"], "searched too"), (["x=a,b", "y=1,2 when x=c"], "no value of x"), (["x=a,b when y=1", "y=1,2 when x=a"], "circle"),
     (["x=float:0..1", "y=1,2 when x=0.5"], "by its choices"), (["x=a,b", "y=1,2 when x"], "expected"), (["x=log:1e-5...1e-3"], "three dots"),
     (["x=int:1.." + "9" * 400], "within"), (["x=int:-" + "9" * 400 + "..5"], "within"), (["x=float:-1e308..1e308"], "within")],
)  # fmt: skip
def test_a_space_that_cannot_be_meant_is_refused(written: list[str], says: str) -> None:
    """Fails when: the check of that case is taken out of space.py."""
    with pytest.raises(Refusal, match=says):
        read_space(written)


@pytest.mark.parametrize("strategy", ["random", "quasirandom", "grid", "tpe"])
def test_a_setting_with_a_condition_is_searched_only_where_that_holds(strategy: str, tmp_path: Path) -> None:
    """Given before what it depends on. Fails when: Dimension.applies returns True always."""
    if strategy == "tpe":
        pytest.importorskip("optuna")
    search = ["momentum=0.8,0.9 when optim=sgd", "optim=adamw,sgd"]
    jobs = run(tmp_path, plan(strategy, 16, search), lambda settings: Outcome({"eval_loss": float(settings.get("momentum", 1))}))
    assert all(("momentum" in job.settings) == (job.settings["optim"] == "sgd") for job in jobs)
    distinct = {tuple(job.settings.items()) for job in jobs}
    assert distinct == {(("optim", "adamw"),), (("optim", "sgd"), ("momentum", "0.8")), (("optim", "sgd"), ("momentum", "0.9"))}
    assert len(jobs) == (3 if strategy in ("random", "grid") else 16)


@pytest.mark.parametrize("line", ["{\"kind\": \"study\"}", "{\"kind\": \"end\", \"number\": 7}", "no JSON"])
def test_a_journal_of_something_else_is_refused_by_line(line: str, tmp_path: Path) -> None:
    """Fails when: Sweep.read in loop.py skips records of an unknown kind."""
    run(tmp_path, plan(trials=2))
    journal = tmp_path / JOURNAL
    journal.write_bytes(journal.read_bytes() + line.encode() + b"\n")
    for read in (lambda: run(tmp_path, plan(trials=2)), lambda: read_journal(JournalFile(tmp_path))):
        with pytest.raises(Refusal, match=f"{JOURNAL}:6"):
            read()


@pytest.mark.parametrize(
    ("kind", "changed"),
    [("plan", {"search": 5}), ("plan", {"objectives": []}), ("plan", {"trials": "9"}), ("plan", {"parallel": 0}), ("plan", {"rungs": None}),
     ("plan", {"color": "blue"}), ("start", {"settings": [1]}), ("start", {"number": 7}), ("start", {"told": 9}), ("start", {"same": 1}),
     ("start", {"trial": True}), ("end", {"number": -1}), ("end", {"values": {"eval_loss": "low"}}), ("end", {"seconds": None}),
     ("end", {"curve": [[1]]}), ("end", {"step": 1.5})],
)  # fmt: skip
def test_a_record_with_values_of_another_kind_is_refused(kind: str, changed: dict[str, Any], tmp_path: Path) -> None:
    """The last record of its kind. Fails when: made_of in records.py checks no types, or take_in in journal.py takes any number."""
    run(tmp_path, plan(trials=2))
    journal = tmp_path / JOURNAL
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    place = max(place for place, record in enumerate(records) if record["kind"] == kind)
    records[place] |= changed
    journal.write_text("".join(json.dumps(record) + "\n" for record in records))
    for read in (lambda: run(tmp_path, plan(trials=2)), lambda: read_journal(JournalFile(tmp_path))):
        with pytest.raises(Refusal, match=f"{JOURNAL}:{place + 1}: is no record"):
            read()


def test_a_row_of_a_database_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Fails when: records in storage.py parses a row that is NULL."""
    asked, url = plan(trials=2), f"sqlite:///{tmp_path / 'sweeps.db'}"
    run(JournalDatabase(url, "one"), asked)
    with contextlib.closing(sqlite3.connect(tmp_path / "sweeps.db")) as database:
        database.execute("update toolkit_sweep_records set line = NULL where number = 2")
        database.commit()
    with pytest.raises(Refusal, match="record 2 of one"):
        read_journal(JournalDatabase(url, "one"))


def test_what_is_in_the_place_of_a_file_stops_or_refuses_the_sweep(tmp_path: Path) -> None:
    """A folder as the lock, a pipe as the journal, which nobody writes to.

    Fails when: run_sweep in loop.py lets an error of its first look through, or open_journal in storage.py reads what is no file.
    """
    (tmp_path / "locked" / ".sweep.lock").mkdir(parents=True)
    with pytest.raises(Stopped, match=r"locked/\.sweep\.lock: Is a directory"):
        run(tmp_path / "locked", plan(trials=2))
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped" / JOURNAL)
    with pytest.raises(Refusal, match="named pipe"):
        open_journal(tmp_path / "piped")


def test_a_grid_that_no_memory_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its points are made. Fails when: _grid_points in strategies.py does not ask how many there are."""
    space = read_space(["a=1,2,3", "b=1,2", "c=1,2"])
    assert count_points("grid", space) == 12
    monkeypatch.setattr("toolkit.sweeps.strategies.MOST_POINTS", 11)
    with pytest.raises(Refusal, match="12 combinations"):
        count_points("grid", space)


def test_a_seed_of_any_size_is_taken(tmp_path: Path) -> None:
    """Fails when: _CmaEs in strategies.py gives numpy a seed beyond 32 bits."""
    pytest.importorskip("optuna")
    for strategy in ("random", "quasirandom", "tpe", "cmaes"):
        asked = dataclasses.replace(plan(strategy, 2, SEARCH[:2]), seed=10**20)
        assert len(run(tmp_path / strategy, asked)) == 2


def test_several_objectives_give_the_front_that_a_plain_loop_finds(tmp_path: Path) -> None:
    """All pairs compared. Fails when: _dominates in results.py takes equal points for better ones."""
    asked = dataclasses.replace(plan("random", 40, ["x=float:0..1", "y=float:0..1"]), objectives=[Objective("a"), Objective("b", True)])
    jobs = run(tmp_path, asked, lambda settings: Outcome({"a": float(settings["x"]), "b": round(float(settings["y"]), 1)}))
    points = [(job.outcome.values["a"], -job.outcome.values["b"]) for job in jobs if job.outcome]
    front = {n for n, p in enumerate(points) if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
    assert {trial.number for trial in best_trials(list(trials_of(jobs).values()), asked)} == front


def test_a_constraint_decides_before_the_value(tmp_path: Path) -> None:
    """The best value is at x = 0; the constraint wants x of .5 and more. Fails when: best_trials in results.py ignores violations."""
    asked = plan("random", 30, ["x=float:0..1"], constraints=["size>=0.5"])
    jobs = run(tmp_path, asked, lambda settings: Outcome({"eval_loss": float(settings["x"]), "size": float(settings["x"])}))
    best = best_trials(list(trials_of(jobs).values()), asked)[0]
    assert float(best.settings["x"]) == min(float(job.settings["x"]) for job in jobs if float(job.settings["x"]) >= 0.5)


def test_a_budget_of_steps_ends_the_sweep(tmp_path: Path) -> None:
    """Trials of ten steps and a budget of 35: four are started. Fails when: _is_over_budget in loop.py returns False always."""
    jobs = run(tmp_path, plan(trials=12, budget_steps=35), lambda settings: dataclasses.replace(bowl(settings), step=10))
    assert len(jobs) == 4


def test_a_budget_of_hours_is_shared_by_the_trials_at_a_time(tmp_path: Path) -> None:
    """Trials of half an hour, two at a time, and an hour: four are started. Fails when: spent_budget in results.py does not divide."""
    asked = plan(trials=12, budget_hours=1.0, parallel=2)
    jobs = run(tmp_path, asked, lambda settings: dataclasses.replace(bowl(settings), seconds=1800.0))
    assert len(jobs) == 4
    assert len(run(tmp_path, dataclasses.replace(asked, budget_hours=1.5), lambda settings: dataclasses.replace(bowl(settings), seconds=1800.0))) == 6


def test_numbers_that_are_equal_are_computed_once(tmp_path: Path) -> None:
    """Written in two ways, with one address. Fails when: _equal in loop.py compares settings alone."""
    computed = list[Point]()

    def trial(settings: Point) -> Outcome:
        computed.append(settings)
        return bowl({"x": float(settings["x"])})

    journal = JournalFile(tmp_path)
    sweep = Sweep(journal, plan("grid", 4, ["x=1,1.0,2,2e0"]), journal.liveness(), address=lambda settings: str(float(settings["x"])))
    jobs = run_sweep(sweep, lambda job, slot, prune: Ended(trial(job.settings)))
    assert [settings["x"] for settings in computed] == ["1", "2"]
    assert [job.outcome.values for job in jobs if job.outcome] == [{"eval_loss": 0.25}] * 2 + [{"eval_loss": 2.25}] * 2


class Unlogged(Ended):
    def poll(self) -> Outcome | None:
        raise Refusal("the trial did not log eval_loss")


@pytest.mark.parametrize("first", [False, True])
def test_a_trial_that_does_not_log_the_metric_ends_the_sweep_only_where_none_has(first: bool, tmp_path: Path) -> None:
    """Fails when: run_sweep in loop.py lets every refusal of a trial through, or none."""
    journal = JournalFile(tmp_path)
    state = Sweep(journal, plan(trials=3), journal.liveness())

    def start(job: Job, slot: int, prune: object) -> Ended:
        return (Unlogged if job.number == 1 or first else Ended)(bowl(job.settings))

    if first:
        with pytest.raises(Refusal, match="did not log"):
            run_sweep(state, start)
    else:
        reasons = [job.outcome.reason for job in run_sweep(state, start) if job.outcome]
        assert [bool(reason) for reason in reasons] == [False, True, False]
        assert "did not log eval_loss" in reasons[1]


def test_a_directory_with_a_database_may_be_moved_and_read_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path to SQLite's file. Fails when: JournalDatabase keeps the path as it was given, or _known forgets the name."""
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    run(open_journal(Path("s"), "sqlite:///sweeps.db"), plan(trials=3))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "s").rename(tmp_path / "elsewhere" / "t")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(read_journal(open_journal(Path("t"), must_exist=True))[1]) == 3
    assert [path.name for path in Path().iterdir()] == ["t"]


def test_workers_that_begin_at_once_name_the_database_one_after_another(tmp_path: Path) -> None:
    """Eight of them, five times. Fails when: open_journal in storage.py writes storage.json outside of the database's lock."""
    pytest.importorskip("sqlalchemy")
    open_journal(tmp_path / "s", url := f"sqlite:///{tmp_path / 'sweeps.db'}")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: open_journal(tmp_path / "s", url), range(40)))
    assert len(found) == 40


@pytest.mark.parametrize("written", ['{"url": "postgresql://me:***@host/db"}', "damaged"])
def test_a_url_that_is_given_again_counts(written: str, tmp_path: Path) -> None:
    """The directory has none, or one whose password was left out. Fails when: _known in storage.py refuses before the URL is looked at."""
    pytest.importorskip("sqlalchemy")
    (tmp_path / "storage.json").write_text(written)
    with pytest.raises(Refusal, match="--storage URL"):
        open_journal(tmp_path, must_exist=True)
    run(open_journal(tmp_path, f"sqlite:///{tmp_path / 'x.db'}"), plan(trials=2))
    with pytest.raises(Refusal, match="in memory"):
        open_journal(tmp_path, "sqlite://")


def test_seeds_repeat_each_point_and_the_strategy_hears_the_mean(tmp_path: Path) -> None:
    """Three seeds of four points. Fails when: _Whole in schedule.py asks for a new point for each seed."""
    asked = plan("random", 4, seeds=3)
    jobs = run(tmp_path, asked)
    assert [job.settings["seed"] for job in jobs] == [42, 43, 44] * 4
    points = [{name: value for name, value in job.settings.items() if name != "seed"} for job in jobs]
    assert all(points[number] == points[number - number % 3] for number in range(12))
    assert len({str(point) for point in points}) == 4
