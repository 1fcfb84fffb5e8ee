"""toolkit sweep as a user types it, with a recipe that computes a formula in place of training."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from toolkit.sweeps.journal import JOURNAL, Job, JournalFile, read_journal
from toolkit.sweeps.storage import JournalDatabase, open_journal

pytestmark = pytest.mark.warm
ROOT = Path(__file__).parents[2]

RECIPE = '''
"""A recipe without a model."""
import json, time
from dataclasses import dataclass
from pathlib import Path
from toolkit.command_line.recipe import run_recipe
from toolkit.config import OutputConfig, Refusal, setting

@dataclass(frozen=True)
class Config(OutputConfig):
    rate: float = setting(1.0, "A rate.", least=0.0)
    wait: float = setting(0.0, "Seconds.")
    kind: str = setting("a", "A kind.", choices=("a", "b", "bad", "full"))

def main(config: Config) -> None:
    folder = Path(config.output_dir)
    (folder / "config.yaml").write_text("rate: 1")
    with open(folder.parent / "started.txt", "a") as file:
        file.write(folder.name + "\\n")
    time.sleep(config.wait)
    if config.kind == "bad":
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
    if config.kind == "full" and not Path("room").exists():
        raise OSError(28, "No space left on device")
    (folder / "summary.json").write_text(json.dumps({"eval_loss": (config.rate - 0.25) ** 2}))

if __name__ == "__main__":
    run_recipe(main)
'''


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "formula.py"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def postgresql(tmp_path: Path) -> Iterator[str]:
    """The URL of a database of a PostgreSQL server of its own, on a free port of loopback."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    pytest.importorskip("psycopg")
    folder = Path(tempfile.mkdtemp(prefix="postgresql-"))  # pytest's own folders are closed to the server's user
    as_server = []
    if os.getuid() == 0:  # with which the server does not start
        shutil.chown(folder, "postgres")
        as_server = ["runuser", "-u", "postgres", "--"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def call(program: str, *words: str) -> None:
        subprocess.run([*as_server, str(programs[-1] / program), *words], check=True, timeout=60, cwd="/", stdout=subprocess.DEVNULL)

    data = str(folder / "data")
    try:
        call("initdb", "-D", data, "-A", "trust", "-U", "tester")
        call("pg_ctl", "-D", data, "-w", "-l", str(folder / "log"), "-o", f"-p {port} -k {folder} -c listen_addresses=127.0.0.1", "start")
        yield f"postgresql+psycopg://tester@127.0.0.1:{port}/postgres"
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            call("pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "toolkit", "sweep", *map(str, words)]


def jobs_of(folder: Path) -> list[Job]:
    return read_journal(JournalFile(folder))[1]


def value_of(job: Job) -> float | None:
    return job.outcome.values.get("eval_loss") if job.outcome else None


def sweep(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=120, cwd=cwd)


def test_trials_are_runs_and_the_best_is_a_command(recipe: Path, tmp_path: Path) -> None:
    """The best against the formula of the recipe; a failed trial has its reason, and ends nothing. Continued from elsewhere too.

    Fails when: loop.py takes the largest value where less is better; `continue` reads its journal after it has changed the folder.
    """
    done = sweep("formula.py", "--search", "rate=0,0.2,1", "--search", "kind=a,bad", "--strategy", "grid", "--sweep-dir", "s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "toolkit train formula.py --rate 0.2 --kind a"
    trials = jobs_of(tmp_path / "s")
    assert [value_of(trials[number]) for number in (0, 2, 4)] == pytest.approx([0.0625, 0.0025, 0.5625])
    reasons = [trials[number].outcome.reason for number in (1, 3, 5)]  # type: ignore[union-attr]
    assert all(reason.startswith("out of memory: ") for reason in reasons)
    assert sweep("best", "s", cwd=tmp_path).stdout.splitlines()[-1] == "toolkit train formula.py --rate 0.2 --kind a"
    for shown in (done.stdout, sweep("status", "s", cwd=tmp_path).stdout):
        assert re.search(r"\b6 of 6 trials .*\b3 with a value", shown)
    (tmp_path / "other").mkdir()
    elsewhere = sweep("best", tmp_path / "s", cwd=tmp_path / "other").stdout.splitlines()
    assert elsewhere[-2:] == [f"cd {tmp_path}", "toolkit train formula.py --rate 0.2 --kind a"]
    before = (tmp_path / "s" / "trials" / "started.txt").read_text()
    for place, written in ((tmp_path, "s"), (tmp_path / "other", "../s")):
        assert sweep("continue", written, cwd=place).returncode == 0
    assert not (tmp_path.parent / "s").exists()  # which is ../s from where the sweep was begun
    journal = tmp_path / "s" / JOURNAL
    journal.write_text(journal.read_text().replace(f'"folder": "{tmp_path}"', '"folder": "/no/where"'))
    assert "/no/where" in sweep("continue", "s", cwd=tmp_path).stderr
    assert (tmp_path / "s" / "trials" / "started.txt").read_text() == before


@pytest.mark.parametrize(
    ("words", "says"),
    [([], "nothing is searched"), (["--search", "rat=1,2"], "rate"), (["--search", "rate=-1,2"], "--rate"), (["--search", "kind=a,c"], "--kind"),
     (["--search", "rate=1,2", "--rate", "1"], "searched and given"), (["--search", "rate=1,2", "--output-dir", "x"], "--sweep-dir"),
     (["--search", "rate=float:0..1", "--strategy", "grid"], "is a range"), (["--search", "rate=1,2", "--strategy", "best"], "--strategy"),
     (["--search", "rate=1,2", "--prune", "halving"], "cannot stop and go on"), (["--search", "rate=1,2", "--prune", "x"], "there are none, median"),
     (["--search", "rate=1,2", "--constraint", "size<8"], "its limit"), (["--search", "rate=1,2", "--objective", "size"], "size:max or size:min"),
     (["--search", "rate=1,2", "--objective", "eval_a", "--objective", "eval_a:max"], "--objective eval_a: given 2 times"),
     (["--search", "rate=1,2", "--seeds", "2"], "no --seed"), (["--search", "missing.yaml"], "missing.yaml"),
     (["--search", "rate=1,2", "--storage", "sqlite:///formula.py"], "not a database"), (["--search", "rate=1,2", "--storage", "nonsense"], "--storage")],
)  # fmt: skip
@pytest.mark.fast(2)
def test_what_cannot_be_meant_is_refused_before_a_trial(words: list[str], says: str, recipe: Path, tmp_path: Path) -> None:
    """Fails when: _check_on_recipe in cli/sweep.py tries the first end of a range only."""
    done = sweep("formula.py", *words, "--sweep-dir", "s", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--sweep-dir", "formula.py"], "--sweep-dir formula.py: is a file"), (["--sweep-dir", "formula.py/x"], "is a file, not a directory"),
     (["--sweep-dir", "/proc/x"], "--sweep-dir /proc/x: can't be written"), (["--sweep-dir", "a\udcff"], "is not Unicode text"),
     (["--sweep-dir", "s", "--storage", "sqlite:///no/where.db"], "mkdir -p")],
)  # fmt: skip
def test_a_place_that_cannot_be_written_is_refused(words: list[str], says: str, recipe: Path, tmp_path: Path) -> None:
    """Fails when: open_journal does not call place_to_write, and a traceback is shown."""
    done = sweep("formula.py", "--search", "rate=1,2", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_other_flags_are_named_by_what_differs(recipe: Path, tmp_path: Path) -> None:
    """Fails when: differing in journal.py shows both lists whole."""
    words = ["formula.py", "--search", "rate=1,2", "--strategy", "grid", "--sweep-dir", "s", "--kind", "a", "--wait"]
    assert sweep(*words, "0", cwd=tmp_path).returncode == 0
    done = sweep(*words, "0.01", cwd=tmp_path)
    assert done.returncode == 2
    assert "(0; now 0.01)" in done.stderr
    journal = tmp_path / "s" / JOURNAL
    whole = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([*whole[:-1], "damaged\n"]))
    done = sweep("status", "s", cwd=tmp_path)
    assert done.returncode == 2
    assert subprocess.run(done.stderr.strip().rpartition("as in: ")[2], shell=True, cwd=tmp_path).returncode == 0
    assert sweep("continue", "s", cwd=tmp_path).returncode == 0
    assert re.search(r"\b2 of 2 trials .*\b2 with a value", sweep("status", "s", cwd=tmp_path).stdout)


def test_the_end_of_a_sweep_says_what_a_reader_would_ask(recipe: Path, tmp_path: Path) -> None:
    """Equal values, a budget that ended it, a run directory that is not here. Fails when: _show_best leaves one of the lines out."""
    words = ["formula.py", "--search", "rate=0,0.5", "--strategy", "grid", "--budget-hours", "1e-9", "--sweep-dir", "s"]
    done = sweep(*words, cwd=tmp_path)
    assert "the budget of 1e-09 hours" in done.stdout
    done = sweep("continue", "s", "--budget-hours", "10", cwd=tmp_path)
    assert "used up" not in done.stdout
    assert "2 trials have this value" in done.stdout
    shutil.rmtree(tmp_path / "s" / "trials" / "0000")
    assert f"a worker on {socket.gethostname()} trained it and not here" in sweep("best", "s", cwd=tmp_path).stdout


@pytest.mark.slow
def test_a_sweep_killed_again_and_again_ends_with_the_same_trials(recipe: Path, tmp_path: Path) -> None:
    """SIGKILL to the sweep at six moments, then continued: equal settings and values, every trial ended once.

    Fails when: loop.py runs a trial whose end is in the journal.
    """
    words = ["formula.py", "--search", "rate=float:0..1", "--trials", "6", "--wait", "0.4", "--sweep-dir"]
    assert sweep(*words, "alone/whole", cwd=tmp_path).returncode == 0  # not next to the other, which would take its results
    for moment in range(6):
        running = subprocess.Popen(command(*words, "cut"), cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL)
        time.sleep(1.0 + 0.35 * moment)
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert sweep(*words, "cut", cwd=tmp_path).returncode == 0
    found = [[(job.trial, job.settings, value_of(job)) for job in jobs_of(tmp_path / each)] for each in ("alone/whole", "cut")]
    assert found[0] == found[1]
    assert len(set((tmp_path / "cut" / "trials" / "started.txt").read_text().split())) == 6
    lines = (tmp_path / "cut" / JOURNAL).read_text().splitlines()
    assert sum('"kind": "end"' in line for line in lines) == 6


@pytest.mark.slow
def test_a_full_disk_stops_the_sweep_and_fails_no_trial(recipe: Path, tmp_path: Path) -> None:
    """The third trial finds no space; with space again the sweep ends with a value of each.

    Fails when: poll in trials.py does not ask _is_out_of_space.
    """
    words = ["formula.py", "--strategy", "grid", "--search", "kind=a,b,full", "--search", "rate=0.5,1.0", "--sweep-dir", "s"]
    stopped = sweep(*words, cwd=tmp_path)
    assert stopped.returncode == 1
    assert "toolkit sweep continue" in stopped.stderr
    assert [value_of(job) for job in jobs_of(tmp_path / "s")] == [0.0625, 0.5625, 0.0625, 0.5625, None]
    (tmp_path / "room").touch()
    assert sweep("continue", "s", cwd=tmp_path).returncode == 0
    assert [value_of(job) for job in jobs_of(tmp_path / "s")] == [0.0625, 0.5625] * 3


def test_a_sweep_is_continued_to_more_trials_up_to_all_combinations(recipe: Path, tmp_path: Path) -> None:
    """Fails when: --trials of `continue` changes nothing, or is not held to the combinations that there are."""
    words = ["formula.py", "--search", "rate=0,0.2,1", "--trials", "1", "--sweep-dir", "s"]
    for command, number in ((words, 1), (["continue", "s", "--trials", "2"], 2), (["continue", "s", "--trials", "9"], 3)):
        assert sweep(*command, cwd=tmp_path).returncode == 0
        assert sweep("status", "s", cwd=tmp_path).stdout.splitlines()[-1].startswith(f"{number} of {number} trials ")
    assert sorted(job.settings["rate"] for job in jobs_of(tmp_path / "s")) == ["0", "0.2", "1"]


def test_data_that_changed_between_trials_are_warned_of(recipe: Path, tmp_path: Path) -> None:
    """Also by `continue`; once. So is --parallel, by which threads are shared out, where a trial has started since, and no package that
    was imported. Fails when: _run in cli/sweep.py compares no addresses, or what importing writes changes one."""
    recipe.write_text(RECIPE.replace("    kind: str", '    data: str = setting("", "A file.")\n    kind: str'))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.jsonl").write_text("1")
    words = [recipe, "--search", "rate=float:0..1", "--data", "rows", "--sweep-dir", "sweep", "--trials"]
    assert "WARNING" not in sweep(*words, "1", cwd=tmp_path).stderr
    (tmp_path / "rows/__pycache__").mkdir()
    (tmp_path / "rows/__pycache__/a.pyc").write_text("1")
    assert "WARNING" not in sweep("continue", "sweep", "--trials", "2", cwd=tmp_path).stderr
    (tmp_path / "rows/a.jsonl").write_text("12")
    assert "WARNING: the data" in sweep("continue", "sweep", "--trials", "3", cwd=tmp_path).stderr
    assert "WARNING" not in sweep("continue", "sweep", "--trials", "4", cwd=tmp_path).stderr
    assert "--parallel have" in sweep("continue", "sweep", "--trials", "5", "--parallel", "2", cwd=tmp_path).stderr
    assert "WARNING" not in sweep("continue", "sweep", "--trials", "6", cwd=tmp_path).stderr


@pytest.mark.slow
def test_equal_trials_of_another_sweep_are_not_trained_again(recipe: Path, tmp_path: Path) -> None:
    """The second sweep has one new point; then the recipe's code changes, and all are new.

    Fails when: address_of in addresses.py leaves out the recipe's code.
    """
    words = ["formula.py", "--strategy", "grid", "--sweep-dir"]
    assert sweep(*words, "sweeps/a", "--search", "rate=0.1,0.2", cwd=tmp_path).returncode == 0
    second = sweep(*words, "sweeps/b", "--search", "rate=0.1,0.2,0.3", cwd=tmp_path)
    assert (tmp_path / "sweeps" / "b" / "trials" / "started.txt").read_text() == "0002\n"
    assert "that of" in second.stdout
    best = sweep("best", "sweeps/b", cwd=tmp_path).stdout
    assert f"run directory: {tmp_path / 'sweeps' / 'a' / 'trials' / '0001'}" in best
    recipe.write_text(recipe.read_text() + "\n# changed")
    assert sweep(*words, "sweeps/c", "--search", "rate=0.1,0.2", cwd=tmp_path).returncode == 0
    assert (tmp_path / "sweeps" / "c" / "trials" / "started.txt").read_text() == "0000\n0001\n"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "postgresql"])
def test_two_processes_share_a_sweep_and_one_is_killed(kind: str, recipe: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """SIGKILL to one of two workers, three times, and another one in its place: the trials of one process, each ended once.

    Fails when: _take_over in loop.py hands out only jobs of this process.
    """
    common = ["formula.py", "--search", "rate=float:0..1", "--trials", "12", "--wait", "0.3", "--parallel", "2"]
    assert sweep(*common, "--sweep-dir", "alone/whole", cwd=tmp_path).returncode == 0  # no sweep next to which results are found
    shared = ["--sweep-dir", "shared", "--slots", "1"]
    if kind == "postgresql":
        shared += ["--storage", request.getfixturevalue("postgresql")]
    steady = subprocess.Popen(command(*common, *shared), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        for moment in range(3):
            other = subprocess.Popen(command(*common, *shared), cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL)
            time.sleep(2.0 + 0.2 * moment)
            os.killpg(other.pid, signal.SIGKILL)
            other.wait()
        assert steady.wait(timeout=120) == 0, steady.stderr.read() if steady.stderr else ""
    finally:
        steady.kill()
        steady.communicate()
    assert re.match(r"12 of 12 trials .*\b12 with a value", sweep("status", "shared", cwd=tmp_path).stdout.splitlines()[-1])
    found = [[(job.trial, job.settings, value_of(job)) for job in read_journal(open_journal(tmp_path / each))[1]] for each in ("alone/whole", "shared")]
    assert found[0] == found[1]
    assert len(set((tmp_path / "shared" / "trials" / "started.txt").read_text().split())) == 12
    records = list(open_journal(tmp_path / "shared").records(0))
    assert sorted(record["number"] for record in records if record["kind"] == "end") == list(range(12))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_workers_that_begin_at_the_same_moment_make_one_database(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Eight of them open an empty database at once, ten times; each can then write its record.

    Fails when: _prepare in storage.py takes the error of a table that another process makes for one of the database.
    """
    url = request.getfixturevalue("postgresql") if kind == "postgresql" else ""
    for turn in range(10):
        if kind == "postgresql":
            import psycopg

            with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
                connection.execute(f"create database turn{turn}")
        place = url.replace("/postgres", f"/turn{turn}") if url else f"sqlite:///{tmp_path}/{turn}.db"
        start = threading.Barrier(8)

        def write(worker: int, place: str = place, start: threading.Barrier = start) -> None:
            start.wait(timeout=60)
            journal = JournalDatabase(place, "one")
            with journal.exclusive():
                journal.append({"worker": worker})

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, range(8)))
        assert sorted(each["worker"] for each in JournalDatabase(place, "one").records(0)) == list(range(8))


ACCELERATED = ["--max-train-examples", "96", "--max-eval-examples", "40", "--use-cpu", "--hidden-size", "16", "--num-hidden-layers", "1", "--max-steps", "9"]


@pytest.mark.slow
def test_a_halving_sweep_that_is_stopped_and_killed_has_a_winner_with_the_bits_of_a_run_alone(tmp_path: Path) -> None:
    """A real recipe, two trials at a time, SIGTERM once and SIGKILL twice; then the same settings trained alone, without a stop.

    Fails when: Run in run.py stops at a step without saving a checkpoint, or the schedule of a trial is that of its rung.
    """
    search = "learning_rate=log:1e-3..1e-1"
    words = [str(ROOT / "recipes" / "accelerated.py"), "--search", search, "--trials", "6", "--prune", "halving"]
    words += ["--rungs", "3,9", "--parallel", "2", "--sweep-dir", "s", *ACCELERATED[:-2]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for number, seconds in ((signal.SIGKILL, 4.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 4.0)):
        running = subprocess.Popen(command(*words), cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(seconds)
        running.send_signal(number)
        code = running.wait(60)
        assert code in (0, 75 if number == signal.SIGTERM else -number)
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    jobs = jobs_of(tmp_path / "s")
    assert [job.until for job in jobs] == [3] * 6 + [None] * 2
    *_, folder, shown = done.stdout.splitlines()
    winner = Path(folder.removeprefix("run directory: "))
    alone = [sys.executable, "-m", *shlex.split(shown), "--output-dir", "alone"]
    subprocess.run(alone, check=True, capture_output=True, timeout=300, cwd=tmp_path, env=environment)
    files = [next((place / "model").rglob("model.safetensors")).read_bytes() for place in (winner, tmp_path / "alone")]
    assert files[0] == files[1]
    again = [sys.executable, str(ROOT / "recipes" / "accelerated.py"), *ACCELERATED, "--output-dir", "steps", "--stop-at-step", "4"]
    for more in ([], ["--resume"]):  # the second one is there already
        assert subprocess.run([*again, *more], capture_output=True, timeout=120, cwd=tmp_path, env=environment).returncode == 75
        assert json.loads((tmp_path / "steps" / "summary.json").read_text())["steps"] == 4


CALLED = """
import sys, time
import toolkit as tk
def wait(settings):
    print("called", flush=True)
    time.sleep(settings["seconds"])
    return settings["seconds"]
print(tk.sweep(wait, {"seconds": [float(sys.argv[1])]}, strategy="grid", trials=1, folder="called"))
"""


def test_ctrl_c_ends_a_function_that_is_swept_and_it_is_called_again(tmp_path: Path) -> None:
    """Fails when: tk.sweep collects the signals of its process, as the command does, whose trials are other processes."""
    (tmp_path / "script.py").write_text(CALLED)
    process = subprocess.Popen(
        [sys.executable, "script.py", "90"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(20) != 0
    [job] = jobs_of(tmp_path / "called")
    assert job.outcome is None
    journal = tmp_path / "called" / JOURNAL
    journal.write_text(journal.read_text().replace("90.0", "0.0"))  # so that the other call is short
    again = subprocess.run([sys.executable, "script.py", "0"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert "called" in again.stdout
    assert [job.outcome and job.outcome.values for job in jobs_of(tmp_path / "called")] == [{"value": 0.0}]


MAIN = """
import sys
sys.path.insert(0, sys.argv[1])
import toolkit as tk
import accelerated
base = accelerated.Config(
    max_train_examples=96, max_eval_examples=40, use_cpu=True, hidden_size=16, num_hidden_layers=1, max_steps=9, eval_strategy="steps", eval_steps=3
)
found = tk.sweep(accelerated.main, {"learning_rate": "log:1e-3..1e-1"}, config=base, trials=4, prune="halving", rungs=[3, 9], folder="python")
print(found[0].outcome.values)
try:
    tk.sweep(accelerated.main, {"learning_speed": "log:1e-3..1e-1"}, config=base)
except tk.config.Refusal as refusal:
    print(refusal)
"""


@pytest.mark.slow
def test_a_recipes_main_is_swept_from_python_as_by_the_command(tmp_path: Path) -> None:
    """The same jobs and values from one process and from forks. Fails when: _run in functions.py leaves out stop_at_step."""
    (tmp_path / "script.py").write_text(MAIN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    place = {"capture_output": True, "text": True, "timeout": 200, "cwd": tmp_path, "env": environment}
    done = subprocess.run([sys.executable, "script.py", str(ROOT / "recipes")], **place)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert "learning_speed: " in done.stdout
    words = [str(ROOT / "recipes" / "accelerated.py"), "--search", "learning_rate=log:1e-3..1e-1", "--trials", "4", "--prune", "halving"]
    words += ["--rungs", "3,9", "--sweep-dir", "shell", *ACCELERATED[:-2]]
    subprocess.run(command(*words), check=True, **place)  # type: ignore[call-overload]
    found = [[(job.trial, job.settings, job.until, value_of(job)) for job in jobs_of(tmp_path / each)] for each in ("python", "shell")]
    assert found[0] == found[1]
