"""Which trial is trained next, and how far: halving, Hyperband and ASHA against their papers, the median against Optuna."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk
from toolkit.config import Refusal
from toolkit.sweeps.functions import Ended, FunctionTrial
from toolkit.sweeps.journal import JOURNAL, Job, JournalFile, Objective, Outcome, Plan, read_journal
from toolkit.sweeps.loop import Sweep, run_sweep, steps_used
from toolkit.sweeps.results import best_trials, trials_of
from toolkit.sweeps.schedule import brackets_of, planned_steps

RUNGS = [1, 3, 9, 27]


def plan(prune: str = "halving", trials: int = 27, **more: Any) -> Plan:
    more = {"rungs": RUNGS, "parallel": 1, "search": ["x=float:0..1"], "strategy": "random", **more}
    return Plan("r.py", "digest", [], seed=0, trials=trials, objectives=[Objective("loss")], prune=prune, **more)


def curve(x: float, until: int | None) -> Outcome:
    """A loss that falls with the steps, to a floor of its own: at step 1 the order is not yet that of the end."""
    steps = until or RUNGS[-1]
    points = [(step, x + random.Random(f"{x} {step}").random() / step) for step in range(1, steps + 1)]
    return Outcome({"loss": min(value for _, value in points)}, step=steps, curve=points)


def run(folder: Path, asked: Plan, slots: int = 1) -> list[Job]:
    journal = JournalFile(folder)

    def start(job: Job, slot: int, prune: object) -> Ended:
        return Ended(curve(float(job.settings["x"]), job.until))

    return run_sweep(Sweep(journal, asked, journal.liveness()), start, slots)


@pytest.mark.parametrize("parallel", [1, 4])
def test_halving_costs_its_distinct_steps_and_takes_on_the_best(parallel: int, tmp_path: Path) -> None:
    """27 trials, of which 9, 3 and 1 go on: 27 + 9·2 + 3·6 + 18 steps; against a sort of all values of each rung.

    Fails when: _promoted in schedule.py sorts by the number of the trial.
    """
    jobs = run(tmp_path, plan(parallel=parallel), parallel)
    by_rung = {until: [job for job in jobs if job.until == until] for until in (1, 3, 9, None)}
    assert [len(each) for each in by_rung.values()] == [27, 9, 3, 1]
    assert steps_used(jobs) == 27 + 9 * 2 + 3 * 6 + 1 * 18 == planned_steps(plan())
    for lower, upper, most in ((1, 3, 9), (3, 9, 3), (9, None, 1)):
        ranked = sorted(by_rung[lower], key=lambda job: job.outcome.values["loss"] if job.outcome else 0.0)
        assert {job.trial for job in by_rung[upper]} == {job.trial for job in ranked[:most]}


def test_hyperband_costs_what_was_said_before(tmp_path: Path) -> None:
    """Fails when: planned_steps in schedule.py leaves out a bracket."""
    assert steps_used(run(tmp_path, asked := plan("hyperband"))) == planned_steps(asked)


def test_hyperband_has_the_brackets_of_its_paper() -> None:
    """Li et al. (2018), table 1, R = 81 and a reduction of 3; its first bracket's last rung is a whole run too.

    Fails when: brackets_of in schedule.py begins every bracket at the lowest rung.
    """
    found = brackets_of(plan("hyperband", rungs=[1, 3, 9, 27, 81]))
    assert [(count, rungs[0]) for count, rungs in found] == [(81, 1), (34, 3), (15, 9), (8, 27), (5, 81)]
    assert all(rungs[-1] == 81 for _, rungs in found)


@pytest.mark.parametrize("parallel", [1, 3])
def test_asha_takes_on_only_who_is_among_the_best_third_of_a_rung(parallel: int, tmp_path: Path) -> None:
    """Each promotion against a sort of what the journal says it was proposed from; all 27 trials begin, and one is trained whole.

    Fails when: _promoted in schedule.py counts trials that have not ended, or rounds a third up.
    """
    jobs = run(tmp_path, plan("asha", parallel=parallel), parallel)
    assert len({job.trial for job in jobs}) == 27
    lower = {3: 1, 9: 3, None: 9}
    for job in jobs:
        if job.until == 1:
            continue
        told = [each for each in jobs[: job.told] if each.until == lower[job.until]]
        ranked = [each.trial for each in sorted(told, key=lambda each: each.outcome.values["loss"] if each.outcome else 0.0)]
        assert job.trial in ranked[: max(1, len(told) // 3)]
        assert job.told >= job.number + 1 - parallel
    assert any(job.until is None for job in jobs)


@pytest.mark.parametrize("prune", ["halving", "asha", "hyperband"])
def test_a_cut_changes_nothing(prune: str, tmp_path: Path) -> None:
    """The journal cut at every third record, and continued. Fails when: _Brackets.accept in schedule.py does nothing."""
    asked = plan(prune, 9, rungs=[1, 3, 9], parallel=2)
    whole = [(job.trial, job.settings, job.until, job.told) for job in run(tmp_path / "whole", asked, 2)]
    lines = (tmp_path / "whole" / JOURNAL).read_bytes().splitlines(keepends=True)
    for kept in range(1, len(lines), 3):
        folder = tmp_path / str(kept)
        folder.mkdir()
        (folder / JOURNAL).write_bytes(b"".join(lines[:kept]))
        assert [(job.trial, job.settings, job.until, job.told) for job in run(folder, asked, 2)] == whole


def test_a_grid_that_is_pruned_is_tried_in_a_shuffled_order(tmp_path: Path) -> None:
    """Values in a falling order of losses: ASHA in that order would take on nearly all of them.

    Fails when: make_schedule in schedule.py makes a bracket's strategy without shuffled.
    """
    asked = plan("asha", search=[f"x={','.join(str(1 - number / 27) for number in range(27))}"], strategy="grid")
    jobs = run(tmp_path, asked)
    assert sorted(float(job.settings["x"]) for job in jobs if job.until == 1) == sorted(1 - number / 27 for number in range(27))
    assert sum(job.until == 3 for job in jobs) <= 13


def test_a_failure_takes_no_place_on_a_rung(tmp_path: Path) -> None:
    """The trials below .5 fail, those are the best. Fails when: _promoted in schedule.py takes on a trial without a value."""
    journal = JournalFile(tmp_path)

    def start(job: Job, slot: int, prune: object) -> Ended:
        x = float(job.settings["x"])
        return Ended(Outcome(reason="diverged", code=1) if x < 0.5 else curve(x, job.until))

    jobs = run_sweep(Sweep(journal, asked := plan(trials=12), journal.liveness()), start)
    assert best_trials(list(trials_of(jobs).values()), asked)[0].until is None
    assert all(float(job.settings["x"]) >= 0.5 for job in jobs if job.until != 1)


def learner(settings: dict[str, Any], trial: FunctionTrial) -> float:
    best = 9.0
    for step in range(1, 11):
        value = float(settings["x"]) + random.Random(f"{settings['x']} {step}").random() / step
        best = min(best, value)
        trial.report(step, value)
    return best


def test_the_median_prunes_what_optunas_median_pruner_prunes(tmp_path: Path) -> None:
    """Its own, run for real on the same curves: the same trials at the same steps.

    Fails when: _below_median in pruning.py compares the last value, not the best one.
    """
    optuna = pytest.importorskip("optuna")
    tk.sweep(learner, {"x": "float:0..1"}, trials=40, prune="median", folder=tmp_path)
    jobs = read_journal(JournalFile(tmp_path))[1]
    pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2, n_min_trials=5)
    study = optuna.create_study(pruner=pruner)
    pruned = {}
    for job in jobs:
        trial, best = study.ask(), 9.0
        for step in range(1, 11):
            value = float(job.settings["x"]) + random.Random(f"{job.settings['x']} {step}").random() / step
            best = min(best, value)
            trial.report(value, step)
            if trial.should_prune():
                pruned[job.trial] = step
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
        else:
            study.tell(trial, best)
    assert {job.trial: job.outcome.step for job in jobs if job.outcome and job.outcome.pruned} == pruned
    assert len(pruned) > 5


def test_a_function_is_swept_and_its_errors_fail_a_trial() -> None:
    """A known optimum, in a space with choices that are no texts. Fails when: tk.sweep sorts the worst first."""
    layers = {1: 0.3, 2: 0.0, 3: 0.1}

    def loss(settings: dict[str, Any]) -> float:
        if settings["layers"] == 3:
            raise MemoryError("too large")
        return (settings["rate"] - 0.25) ** 2 + layers[settings["layers"]]

    found = tk.sweep(loss, {"rate": "float:0..1", "layers": [1, 2, 3]}, trials=40)
    assert found[0].settings["layers"] == 2
    assert abs(float(found[0].settings["rate"]) - 0.25) < 0.1
    failed = [trial.outcome.reason for trial in found if trial.outcome and not trial.outcome.values]
    assert set(failed) == {"MemoryError: too large"}


def test_a_functions_sweep_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    """Ctrl-C in a notebook, and the same call again. Fails when: workers.py takes an ended sweep of this process for a living one."""
    calls = list[float]()

    def loss(settings: dict[str, Any]) -> float:
        calls.append(settings["x"])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return float(settings["x"])

    with pytest.raises(KeyboardInterrupt):
        tk.sweep(loss, {"x": "float:0..1"}, trials=8, folder=tmp_path)
    assert len(tk.sweep(loss, {"x": "float:0..1"}, trials=8, folder=tmp_path)) == 8
    assert len(calls) == 9
    assert calls[3] == calls[4]


def test_a_value_that_is_not_finite_is_no_point_of_a_curve(tmp_path: Path) -> None:
    """A loss that is NaN at its second step; the journal, which is JSON, has no NaN. Fails when: report in functions.py keeps it."""

    def diverging(settings: dict[str, Any], trial: FunctionTrial) -> float:
        for step in range(1, 4):
            trial.report(step, float("nan") if step == 2 else settings["x"])
        return settings["x"]

    found = tk.sweep(diverging, {"x": "float:0..1"}, trials=3, prune="median", folder=tmp_path)
    assert [[step for step, _ in trial.outcome.curve] for trial in found if trial.outcome] == [[1, 3]] * 3


def test_two_values_give_a_front() -> None:
    """Fails when: functions.py takes the first of the returned values alone."""
    found = tk.sweep(
        lambda settings: {"loss": settings["x"], "speed": settings["x"]}, {"x": "float:0..1"}, trials=10,
        maximize={"loss": False, "speed": True},
    )  # fmt: skip
    assert len([trial for trial in found if trial.outcome]) == 10
    with pytest.raises(Refusal, match="one objective"):
        tk.sweep(lambda settings: 0.0, {"x": "float:0..1", "y": "float:0..1"}, strategy="cmaes", maximize={"a": True, "b": True})


def test_the_reasons_of_a_refused_trial_are_kept(tmp_path: Path) -> None:
    """Fails when: end_record in journal.py leaves out the reason."""
    tk.sweep(lambda settings: 1 / 0, {"x": "float:0..1"}, trials=2, folder=tmp_path)
    jobs = read_journal(JournalFile(tmp_path))[1]
    assert [dataclasses.asdict(job.outcome)["reason"] for job in jobs if job.outcome] == ["ZeroDivisionError: division by zero"] * 2
