"""Trackers that raise or hang cost warnings, and the others nothing; and what the real ones show of a run that was killed."""

import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import toolkit as tk
from toolkit.config import settings_of
from toolkit.tracking import trackers
from toolkit.tracking.services import OPEN, PROJECT, Opened, logged_to_mlflow, logged_to_trackio, tracker_names

pytestmark = pytest.mark.warm


@dataclass(frozen=True)
class Config(tk.OutputConfig):
    run_name: str | None = None


class Told:
    """A tracker that keeps what it is sent, and does something before."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.before, self.records, self.finished = before, [], False

    def log(self, values: dict[str, float], step: int) -> None:
        self.before()
        self.records.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[trackers.Trackers, list[str]]]:
    def open_them(**made: Callable[[], Any]) -> tuple[trackers.Trackers, list[str]]:
        said: list[str] = []
        for name, make in made.items():
            monkeypatch.setitem(trackers.OPEN, name, lambda *what, make=make: Opened(make()))
        return trackers.Trackers(list(made), Config(output_dir=str(tmp_path)), {}, 0, said.append), said

    return open_them


def test_a_tracker_that_raises_costs_a_warning_and_the_others_nothing(opened: Any) -> None:
    """Fails when: an error leaves the thread of its tracker, is said for each record, or ends the others."""
    good, bad = Told(), Told(before=lambda: 1 / 0)  # type: ignore[arg-type,return-value]

    def unable() -> None:
        raise SystemExit("no login")

    sent, said = opened(tensorboard=lambda: bad, trackio=lambda: good, wandb=unable)
    for step in range(5):
        sent.log({"loss": 1.0 / (step + 1)}, step)
    sent.close(lambda: [])
    assert good.records == [(step, {"loss": 1.0 / (step + 1)}) for step in range(5)]
    assert good.finished
    assert bad.finished
    assert sum("SystemExit: no login" in line for line in said) == 1
    assert sum("tensorboard: ZeroDivisionError" in line for line in said) == 1
    assert sum("tensorboard: 5 records were not taken" in line for line in said) == 1
    assert len(said) == 3


def test_a_tracker_that_hangs_is_waited_for_at_the_end_only_and_not_long(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Fails when: a full queue blocks, or the end waits for a thread without a limit."""
    monkeypatch.setattr(trackers, "WAITING", 50)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.5)
    forever, good = threading.Event(), Told()
    sent, said = opened(tensorboard=lambda: Told(before=forever.wait), trackio=lambda: good)  # type: ignore[arg-type]
    began = time.monotonic()
    for step in range(200):
        sent.log({"loss": 1.0}, step)
        time.sleep(0.001)  # a step: the good one keeps up
    sent.close(lambda: [])
    assert time.monotonic() - began < 5
    assert len(good.records) == 200
    assert sum("50 records" in line for line in said) == 1
    assert sum("the last 199 records" in line for line in said) == 1
    forever.set()


# Steps 1 to 5, killed; then from a checkpoint after step 2 to step 7. Speeds differ, what was computed doesn't.
LIFE = """
import os, signal, sys, time
from dataclasses import dataclass, field
from accelerate import PartialState
import toolkit as tk
from toolkit.tracking import trackers

@dataclass(frozen=True)
class Config(tk.OutputConfig):
    run_name: str | None = None
    allow_change: list[str] = field(default_factory=list)

life, arrived = int(sys.argv[1]), "lost" not in os.environ
start, end = (0, 5) if life == 1 else (2, 7)
PartialState(cpu=True)
config = Config(output_dir="out", allow_change=sys.argv[3:])
trackers.CLOSE_SECONDS = 200.0  # a busy machine
sent = trackers.Trackers(sys.argv[2].split(","), config, {}, start, print)
if life == 2 and not arrived:
    sent.catch_up([{"step": step, "epoch": 0.5, "time": 1.0, "examples": 9, "loss": 10.0 - step} for step in (1, 2)])
for step in range(start + 1, end + 1):
    if life == 1 and not arrived and step != 2:
        continue
    sent.log({"loss": 10.0 - step, "tokens_per_second": 100.0 * life + step}, step)
    if step == 4:
        sent.add_samples([{"prompt": "a", "text": "b"}], step)
if life == 1:
    while not all(sender._records.empty() for sender in sent._senders):
        time.sleep(0.05)
    time.sleep(2)  # trackio and TensorBoard write in threads of their own
    os.kill(os.getpid(), signal.SIGKILL)
sent.close(lambda: [])
"""


@pytest.fixture
def lives(tmp_path: Path) -> Callable[..., None]:
    def live(names: str, *allow_change: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        for number, code in (("1", -signal.SIGKILL), ("2", 0)):
            command = [sys.executable, "-c", LIFE, number, names, *(allow_change if number == "2" else ())]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
            assert done.returncode == code, done.stdout + done.stderr
            assert "WARNING: " not in done.stdout

    return live


@pytest.mark.slow
def test_steps_that_a_killed_run_had_logged_and_trains_again_are_shown_once(lives: Any, tmp_path: Path) -> None:
    """In MLflow, trackio and TensorBoard, in one run of each. Fails when: they are sent again, or what the killed life had not
    sent yet is left out."""
    lives("mlflow,trackio,tensorboard")
    once = [(step, 10.0 - step) for step in range(1, 8)]
    found = _in_mlflow(tmp_path), _in_trackio(tmp_path), _in_tensorboard(tmp_path)
    assert found == (once, once, once)
    (table,) = (tmp_path / "out/trackers/mlflow/files").rglob("samples.json")
    assert json.loads(table.read_text())["data"] == [[4, "a", "b"]]


@pytest.mark.slow
def test_steps_before_the_checkpoint_that_had_not_arrived_when_a_run_was_killed_are_sent_later(
    lives: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first life sent step 2 alone, and the second continues after it. Fails when: what MLflow and trackio lack isn't looked for,
    or step 2 is sent again."""
    monkeypatch.setenv("lost", "1")
    lives("mlflow,trackio")
    once = [(step, 10.0 - step) for step in range(1, 8)]
    assert (_in_mlflow(tmp_path), _in_trackio(tmp_path)) == (once, once)


def test_earlier_steps_are_not_sent_again_where_it_is_not_known_what_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of trackio's that is on a Space, and a server of MLflow's that fails. Fails when: what isn't known is taken for nothing,
    and every resume sends all there was before once more."""
    pytest.importorskip("trackio")
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")  # else ./mlflow.db
    monkeypatch.setattr("trackio.sqlite_storage.SQLiteStorage.get_logs", lambda *_, **__: [])
    assert logged_to_trackio("toolkit", "run", "1") is None

    def fails(*_: Any) -> None:
        from mlflow.exceptions import MlflowException

        raise MlflowException("away")

    monkeypatch.setattr("mlflow.tracking.MlflowClient.get_run", fails)
    assert logged_to_mlflow("1") is None
    sent: list[int] = []
    for logged, expected in ((None, []), (set(), [1, 2]), ({("loss", 1)}, [2])):
        sent.clear()
        tracker = Opened(SimpleNamespace(log=lambda metrics, step: sent.append(step)), logged)
        trackers._log_lacking(tracker, [{"step": step, "loss": 1.0, "epoch": 0.1} for step in (1, 2)])
        assert sent == expected


def test_wandb_that_is_disabled_takes_metrics_tables_and_files_and_keeps_nothing(tmp_path: Path) -> None:
    """WANDB_MODE=disabled, without a login. Fails when: the mode is set here, and wandb asks for a key."""
    (tmp_path / "run.json").write_text("{}")
    script = LIFE.replace("config, {}, start", "config, {'wandb': 'abcd1234'}, start")
    script = script.replace("\nsent.close(lambda: [])", "\nfrom pathlib import Path\nsent.close(lambda: [Path('run.json')])")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", script, "2", "wandb"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []


@pytest.mark.slow
def test_steps_that_are_trained_again_otherwise_are_shown_twice(lives: Any, tmp_path: Path) -> None:
    """After --allow-change, where MLflow and trackio can't forget the first. Fails when: the metrics of now are left out."""
    lives("mlflow,trackio", "learning_rate")
    twice = sorted((step, 10.0 - step) for step in [*range(1, 8), 3, 4, 5])
    assert (_in_mlflow(tmp_path), _in_trackio(tmp_path)) == (twice, twice)


def _in_mlflow(folder: Path) -> list[tuple[int, float]]:
    (database,) = (folder / "out/trackers/mlflow").glob("*.db")
    with sqlite3.connect(database) as connection:
        assert len(connection.execute("select distinct run_uuid from metrics").fetchall()) == 1
        return connection.execute("select step, value from metrics where key = 'loss' order by step").fetchall()


def _in_trackio(folder: Path) -> list[tuple[int, float]]:
    with sqlite3.connect(folder / f"trackio/{PROJECT}.db") as connection:
        assert len(connection.execute("select distinct run_id from metrics").fetchall()) == 1
        rows = [(step, json.loads(text)) for step, text in connection.execute("select step, metrics from metrics order by step")]
    return [(step, metrics["loss"]) for step, metrics in rows if "loss" in metrics]


def _in_tensorboard(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / f"out/trackers/{PROJECT}"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (["wandb"], "--report-to wandb: .*pip install wandb"),
        (["wandb", "mlflow"], "--report-to wandb,mlflow: .*pip install wandb mlflow-skinny sqlalchemy alembic"),
    ],
)
def test_all_missing_trackers_are_told_at_once_with_what_to_install(missing: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the first one is refused alone, or MLflow is to be installed whole, next to which pyarrow is another."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else find_spec(name))
    with pytest.raises(tk.Refusal, match=f"^{said}$"):
        tracker_names(tk.RunConfig(report_to=["wandb", "tensorboard", "mlflow"]))


def test_report_to_takes_the_trackers_that_there_are() -> None:
    """Fails when: a tracker is added to OPEN alone, or to the setting's choices alone."""
    assert set(settings_of(tk.RunConfig)["report_to"].choices) == {*OPEN, "all", "none"}
