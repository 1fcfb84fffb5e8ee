"""Population-based training: forks against a plain loop, the paper's toy, and a real recipe that is killed and replayed."""

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from toolkit.config import Refusal
from toolkit.sweeps.functions import Ended
from toolkit.sweeps.journal import JOURNAL, Job, JournalFile, Objective, Outcome, Plan, read_journal
from toolkit.sweeps.loop import Sweep, run_sweep, steps_used
from toolkit.sweeps.outcomes import trial_folder
from toolkit.sweeps.population import perturbed
from toolkit.sweeps.space import read_space
from toolkit.sweeps.trials import commands_of

pytestmark = pytest.mark.warm
ROOT = Path(__file__).parents[2]
RUNGS = [10, 20, 30, 40, 50]
SEARCH = ["h0=float:0..1", "h1=float:0..1"]


def plan(trials: int = 10, **more: Any) -> Plan:
    more = {"rungs": RUNGS, "parallel": 1, "prune": "pbt", **more}
    return Plan("r.py", "digest", [], SEARCH, "random", 0, trials, [Objective("q", True)], **more)


class Toy:
    """Section 4.1's toy: ascent on 1.2 - h0 x² - h1 y² from (.9, .9), judged by 1.2 - x² - y². A trial's state is (x, y, step)."""

    def __init__(self, one_of_two: bool = False, end: int = RUNGS[-1]) -> None:
        self.end = end
        self.one_of_two = one_of_two
        self.states: dict[int, tuple[float, float, int]] = {}

    def start(self, job: Job, slot: int, prune: object) -> Ended:
        x, y, step = self.states.get(job.trial, (0.9, 0.9, 0))
        rates = float(job.settings["h0"]), float(job.settings["h1"])
        if self.one_of_two:
            rates = (rates[0], 0.0) if rates[0] > rates[1] else (0.0, rates[1])
        for _ in range((job.until or self.end) - step):
            x, y = x * (1 - 0.02 * rates[0]), y * (1 - 0.02 * rates[1])
        self.states[job.trial] = x, y, job.until or self.end
        if float(job.settings["h0"]) > 0.95:
            return Ended(Outcome(reason="diverged", code=1, step=job.until or self.end))
        return Ended(Outcome({"q": 1.2 - x * x - y * y}, step=job.until or self.end))

    def fork(self, trial: int, parent: int) -> None:
        self.states.setdefault(trial, self.states[parent])

    def run(self, folder: Path, asked: Plan, slots: int = 1) -> list[Job]:
        journal = JournalFile(folder)
        return run_sweep(Sweep(journal, asked, journal.liveness(), fork=self.fork), self.start, slots)


def value(job: Job) -> float:
    return job.outcome.values["q"] if job.outcome and job.outcome.values else float("-inf")


def test_the_worst_fifth_are_forks_of_the_best_fifth(tmp_path: Path) -> None:
    """Each generation sorted by a plain loop: who stays, who is replaced and by whose fork; the failed ones always are.

    Fails when: Population in population.py draws a parent among all members.
    """
    toy = Toy()
    jobs = toy.run(tmp_path, plan(), 1)
    lists = [[job for job in jobs if job.until == until] for until in (*RUNGS[:-1], None)]
    assert [len(each) for each in lists] == [10] * 5
    assert steps_used(jobs) == 10 * RUNGS[-1]
    for rung, (before, after) in zip(RUNGS, pairwise(lists), strict=False):
        ranked = sorted(before, key=lambda job: -value(job))
        failed = [job for job in ranked if value(job) == float("-inf")]
        forks = [job for job in after if job.parent and job.parent[1] == rung]
        replaced = {job.trial for job in before} - {job.trial for job in after}
        assert replaced == {job.trial for job in [*ranked[: len(ranked) - len(failed)][-2:], *failed]}
        assert len(forks) == len(replaced)
        assert {job.parent[0] for job in forks if job.parent} <= {job.trial for job in ranked[:2]}


def plain_population(seed: int = 0) -> dict[tuple[int, int], tuple[dict[str, float], tuple[int, int] | None, float]]:
    """Population-based training of the toy as one loop over generations, with nothing of the toolkit in it: for each member at
    each rung its settings, what it was forked from, and its value."""
    point = {number: [random.Random(f"{seed} {number}")] for number in range(10)}
    settings = {number: {name: draws[0].random() for name in ("h0", "h1")} for number, draws in point.items()}
    states, parents = dict.fromkeys(range(10), (0.9, 0.9)), dict.fromkeys(range(10))
    members, following, found = list(range(10)), 10, {}
    for generation, until in enumerate(RUNGS):
        values = {}
        for member in members:
            x, y = states[member]
            for _ in range(10):
                x, y = x - 0.02 * settings[member]["h0"] * x, y - 0.02 * settings[member]["h1"] * y
            states[member] = x, y
            values[member] = 1.2 - x * x - y * y if settings[member]["h0"] <= 0.95 else float("-inf")
            found[member, until] = settings[member], parents[member], values[member]
        ranked = sorted((member for member in members if values[member] > float("-inf")), key=lambda member: (-values[member], member))
        failed, best, worst = [member for member in members if member not in ranked], ranked[:2], ranked[-2:]
        members = [member for member in ranked if member not in worst]
        for member in [*failed, *worst] if until < RUNGS[-1] else []:
            draws = random.Random(f"{seed} {generation} {member}")
            parent = best[draws.randrange(2)]
            near = {}
            for name, value in settings[parent].items():
                anew, factor = draws.random(), draws.choice((0.8, 1.2))
                near[name] = anew if draws.random() < 0.25 else min(1.0, value * factor)
            settings[following], states[following], parents[following] = near, states[parent], (parent, until)
            members.append(following)
            following += 1
    return found


@pytest.mark.parametrize("slots", [1, 3])
def test_a_population_is_that_of_a_plain_loop(slots: int, tmp_path: Path) -> None:
    """All members at all rungs: settings, parents and values. Fails when: perturbed draws in another order, or a fork begins anew."""
    jobs, expected = Toy().run(tmp_path, plan(), slots), plain_population()
    found = {(job.trial, job.until or RUNGS[-1]): job for job in jobs}
    assert found.keys() == expected.keys()
    for place, (settings, parent, reached) in expected.items():
        assert (found[place].settings, found[place].parent) == (settings, parent)
        assert value(found[place]) == pytest.approx(reached, rel=1e-12)
    assert sum(parent is not None for _, parent, _ in expected.values()) > 10


def test_it_finds_what_no_fixed_setting_reaches(tmp_path: Path) -> None:
    """Trained is x or y, as the setting says: alone each comes to 1.2 - .81 at most; members that fork train both.

    Fails when: perturbed in population.py gives back the parent's settings, or _propose in loop.py does not fork.
    """
    best = []
    for prune in ("pbt", "none"):
        asked = dataclasses.replace(plan(prune=prune), search=["h0=0,0.9", "h1=0,0.9"], rungs=[*range(10, 210, 10)] if prune == "pbt" else [])
        toy = Toy(one_of_two=True, end=200)
        jobs = toy.run(tmp_path / prune, asked)
        best.append(max(value(job) for job in jobs if job.until is None))
    assert best[0] > best[1] + 0.1
    assert best[1] <= 1.2 - 0.81


@pytest.mark.parametrize("slots", [1, 3])
def test_a_cut_changes_nothing(slots: int, tmp_path: Path) -> None:
    """The journal cut at every fifth record, and continued with the states of then.

    Fails when: _next_generation in population.py draws from random.Random().
    """
    asked, toy = plan(parallel=3), Toy()
    whole = [(job.trial, job.settings, job.until, job.told, job.parent, value(job)) for job in toy.run(tmp_path / "whole", asked, slots)]
    lines = (tmp_path / "whole" / JOURNAL).read_bytes().splitlines(keepends=True)
    for kept in range(1, len(lines), 5):
        folder = tmp_path / str(kept)
        folder.mkdir()
        (folder / JOURNAL).write_bytes(b"".join(lines[:kept]))
        again = Toy()
        for job in read_journal(JournalFile(folder))[1]:
            if job.parent:
                again.fork(job.trial, job.parent[0])
            if job.outcome:
                again.start(job, 0, None)
        found = [(job.trial, job.settings, job.until, job.told, job.parent, value(job)) for job in again.run(folder, asked, slots)]
        assert found == whole


def test_settings_are_perturbed_within_their_range() -> None:
    """1,000 draws: times .8 or 1.2, cut at the ends, an integer rounded; a quarter of them drawn anew, choices too.

    Fails when: perturbed in population.py does not cut at the ends.
    """
    space = read_space(["a=log:1e-3..1e-1", "b=int:2..9", "c=x,y"])
    points = [perturbed(space, {"a": 0.09, "b": 5, "c": "x"}, random.Random(seed)) for seed in range(1000)]
    near = [point for point in points if point["a"] in (0.09 * 0.8, 0.1)]
    assert 700 < len(near) < 800
    assert all(1e-3 <= float(point["a"]) <= 1e-1 and point["b"] in range(2, 10) for point in points)
    assert 700 < sum(point["b"] in (4, 6) for point in points) < 900
    assert 50 < sum(point["c"] == "y" for point in points) < 200


@pytest.mark.slow
def test_a_killed_population_has_the_bits_of_its_replay(tmp_path: Path) -> None:
    """A real recipe, SIGKILL twice and SIGTERM once; then the commands that `best` prints, one after another in one run.

    Fails when: fork_run in trials.py leaves out the checkpoints, or the parent goes on before it is forked from.
    """
    common = [sys.executable, "-m", "toolkit", "sweep"]
    words = [*common, str(ROOT / "recipes" / "accelerated.py"), "--search", "learning_rate=log:1e-4..1", "--trials", "4", "--prune", "pbt"]
    words += ["--rungs", "3,6,9", "--parallel", "2", "--sweep-dir", "s", "--max-train-examples", "96", "--max-eval-examples", "40"]
    words += ["--use-cpu", "--hidden-size", "16", "--num-hidden-layers", "1", "--save-total-limit", "1", "--sweep-seed", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for number, seconds in ((signal.SIGKILL, 6.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 4.0)):
        running = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(seconds)
        running.send_signal(number)
        assert running.wait(60) in (0, 75 if number == signal.SIGTERM else -number)
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    jobs = read_journal(JournalFile(tmp_path / "s"))[1]
    assert [job.until for job in jobs] == [3] * 4 + [6] * 4 + [None] * 4
    assert sum(job.parent is not None for job in {job.trial: job for job in jobs}.values()) == 2
    assert steps_used(jobs) == 36
    fork = max(jobs, key=lambda job: job.trial)
    plan_found, _ = read_journal(JournalFile(tmp_path / "s"))
    assert plan_found
    commands = commands_of(plan_found, jobs, fork.trial)
    assert len(commands) > 1
    for place, command in enumerate(commands):
        alone = [sys.executable, "-m", *command]
        last = subprocess.run(alone, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
        assert last.returncode == (0 if place == len(commands) - 1 else 75), last.stderr
    places = [trial_folder(tmp_path / "s", fork.trial), tmp_path / "runs" / "best"]
    files = [next((place / "model").rglob("model.safetensors")).read_bytes() for place in places]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--strategy", "tpe"], "first members by random"),
        (["--search", "hidden_size=16,32"], "hidden_size.*checkpoint of another member"),
        (["--trials", "1"], "2 members or more"),
        (["--constraint", "parameters<=1e6"], "no constraints"),
    ],
)
def test_what_a_population_cannot_search_is_refused(more: list[str], says: str) -> None:
    """Fails when: make_plan in sweep_plan.py does not call _check_population."""
    from toolkit.cli.sweep_plan import SweepOptions, make_plan

    given = dict(zip((word[2:] for word in more[::2]), more[1::2], strict=True))
    lists = {name: [given.pop(name)] for name in ("constraint",) if name in given}
    search = ["learning_rate=log:1e-5..1e-3", *([given.pop("search")] if "search" in given else [])]
    number = {"trials": int(given.pop("trials", 4))}
    with pytest.raises(Refusal, match=says):
        make_plan(str(ROOT / "recipes" / "accelerated.py"), [], SweepOptions(search, prune="pbt", rungs="3,6", **given, **lists, **number))  # type: ignore[arg-type]


@pytest.mark.parametrize(("prune", "trials"), [("pbt", 8), ("none", 2)])
def test_members_may_begin_alike_and_trials_may_not(prune: str, trials: int) -> None:
    """Of two choices. Fails when: make_plan in sweep_plan.py takes no more members than there are combinations."""
    from toolkit.cli.sweep_plan import SweepOptions, make_plan

    rungs = {"rungs": "3,6"} if prune == "pbt" else {}
    options = SweepOptions(["learning_rate=1e-3,1e-4"], prune=prune, trials=8, **rungs)  # type: ignore[arg-type]
    assert make_plan(str(ROOT / "recipes" / "accelerated.py"), [], options).trials == trials
