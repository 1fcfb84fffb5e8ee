"""`toolkit runs`: what each directory's files and lock say of its run."""

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from toolkit.checkpoint import State, save_checkpoint
from toolkit.cli.main import app
from toolkit.cli.table import fit, table

pytestmark = pytest.mark.warm
COLD = sys.executable  # for the test of what is imported
ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, status: str | None = "finished", loss: float = 2.0, steps: int = 10, hours: float = 1.0, **more: Any) -> Path:
    """A run's files as it leaves them; without a status those of one that has not ended."""
    folder.mkdir(parents=True)
    began = (datetime.now(UTC) - timedelta(hours=hours)).isoformat(timespec="seconds")
    card: dict[str, Any] = {"started": {"date": began}, "recipe": {"file": "sft.py"}, "layout": {"steps": 20}}
    if status is not None:
        card["end"] = {"status": status, "wall_seconds": 100.0 * steps, "device_seconds": 200.0 * steps}
        summary = {"status": status, "steps": steps, "eval_loss": loss, "best": {"name": "eval_loss", "value": loss - 0.5}, **more}
        (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "run.json").write_text(json.dumps(card))
    events = [{"step": step, "time": 1.0 * step, "loss": 3.0} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*events, {"step": steps, "eval_loss": loss}]))
    (folder / ".lock").touch()
    (folder / ".owner.json").write_text(json.dumps({"pid": 1}))
    return folder


def listed(*words: object) -> list[dict[str, Any]]:
    ran = CliRunner().invoke(app, ["runs", *map(str, words), "--json"])
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def test_the_state_of_each_run_is_told_from_its_files_and_its_lock(tmp_path: Path) -> None:
    """Fails when: a lock that is held counts for nothing, or a run that was killed passes for one that runs or has finished."""
    write(tmp_path / "done")
    write(tmp_path / "below/stopped", "interrupted", steps=4)
    save_checkpoint(tmp_path / "below/stopped/checkpoints", 4, State({}, {}, [], {"step": 4}))
    write(tmp_path / "diverged", "diverged", warnings=["the loss is 3 times the first"])
    failed = write(tmp_path / "failed", None, steps=2)
    (failed / ".owner.json").write_text(json.dumps({"failed": "OutOfMemoryError: too little"}))
    write(tmp_path / "killed", None, steps=7)
    running = write(tmp_path / "running", None, steps=5)
    with FileLock(running / ".lock"):
        found = {each["name"]: each for each in listed(tmp_path)}
    assert {name: each["status"] for name, each in found.items()} == {
        "done": "finished", "below/stopped": "interrupted", "diverged": "diverged", "failed": "failed", "killed": "died",
        "running": "running",
    }  # fmt: skip
    assert found["below/stopped"]["note"] == "resumable from step 4"
    assert found["failed"]["note"] == "OutOfMemoryError: too little"
    assert found["diverged"]["note"] == "the loss is 3 times the first"
    done, going = found["done"], found["running"]
    assert (done["steps"], done["planned"], done["metric"], done["best"], done["last"]) == (10, 20, "eval_loss", 1.5, 2.0)
    assert (done["seconds"], done["device_seconds"], done["recipe"]) == (1000.0, 2000.0, "sft")
    assert (going["steps"], going["seconds"], going["last"]) == (5, 5.0, 2.0)
    assert abs(time.time() - 3600 - done["began"]) < 60


@pytest.mark.slow
def test_a_real_run_is_running_then_killed_and_one_that_fails_says_why(tmp_path: Path) -> None:
    """Fails when: the lock is not asked, or `claimed` keeps no reason."""
    words = [sys.executable, str(ROOT / "tests/tiny_run.py"), "--use-cpu", "--save-steps", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TINY_RUN": json.dumps({"step_seconds": 0.2})}
    process = subprocess.Popen([*words, "--max-steps", "500", "--output-dir", str(tmp_path / "a")], env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (tmp_path / "a/checkpoints/step-2").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    going = listed(tmp_path)
    process.kill()
    process.communicate(timeout=30)
    killed = listed(tmp_path)
    assert [each["status"] for each in (*going, *killed)] == ["running", "died"]
    assert killed[0]["note"].startswith("resumable from step ")
    ill = {**environment, "TINY_RUN": json.dumps({"out_of_memory_above": 1})}
    failed = [*words, "--max-steps", "4", "--no-auto-find-batch-size", "--output-dir", str(tmp_path / "b")]
    assert subprocess.run(failed, env=ill, timeout=60, check=False, capture_output=True).returncode != 0
    found = listed(tmp_path, "--filter", "failed")
    assert [each["name"] for each in found] == ["b"]
    assert "out of memory" in found[0]["note"].lower()


def test_runs_are_sorted_and_filtered(tmp_path: Path) -> None:
    """Fails when: the smallest loss is not the best one, the oldest run comes first, or a filter lets others pass."""
    write(tmp_path / "a", loss=2.0, hours=3, steps=10)
    write(tmp_path / "b", "interrupted", loss=1.0, hours=1, steps=9)
    write(tmp_path / "c", loss=3.0, hours=2, steps=20)
    for words, names in (
        ([], "bca"), (["--sort", "best"], "bac"), (["--sort", "steps"], "cab"), (["--sort", "name", "--reverse"], "cba"),
        (["--sort", "time"], "cab"), (["--filter", "finished"], "ca"), (["--filter", "finished", "--filter", "interrupted"], "bca"),
    ):  # fmt: skip
        assert "".join(each["name"] for each in listed(tmp_path, *words)) == names, words
    for words in (["--sort", "speed"], ["--filter", "bad"]):
        assert CliRunner().invoke(app, ["runs", str(tmp_path), *words]).exit_code == 2
    none = CliRunner().invoke(app, ["runs", str(tmp_path), "--filter", "running"])
    assert (none.exit_code, "none of 3" in none.output) == (0, True)


def test_a_sweep_is_one_line_and_its_trials_are_listed_when_asked(tmp_path: Path) -> None:
    """Fails when: a hundred trials fill the table."""
    sweep = tmp_path / "sweeps/sft"
    for number in range(4):
        write(sweep / f"trials/{number:04d}", loss=2.0 - number / 10)
    (sweep / "sweep.jsonl").write_text('{"kind": "plan"}\n' + '{"kind": "start"}\n' * 4 + '{"kind": "end"}\n' * 3 + '{"kind": "e')
    (found,) = listed(tmp_path)
    assert (found["name"], found["status"], found["note"]) == ("sweeps/sft", "sweep", "4 trials, 3 of 4 jobs ended")
    assert found["best"] == pytest.approx(1.2)
    assert [each["name"] for each in listed(tmp_path, "--trials", "--sort", "name")] == [f"sweeps/sft/trials/{n:04d}" for n in range(4)]


def test_the_table_fits_the_terminal_and_is_whole_when_piped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: a line is wider than the terminal, or a name is cut in a file."""
    name = "a-very-long-name-" * 4
    write(tmp_path / name, "failed")
    (tmp_path / name / ".owner.json").write_text(json.dumps({"failed": "ValueError: " + "long " * 30}))
    piped = CliRunner().invoke(app, ["runs", str(tmp_path)]).stdout
    assert name in piped
    assert "\x1b" not in piped
    for width in (80, 160):
        monkeypatch.setattr("toolkit.cli.runs.width_of_screen", lambda width=width: width)
        monkeypatch.setattr("toolkit.cli.table.width_of_screen", lambda width=width: width)
        lines = CliRunner().invoke(app, ["runs", str(tmp_path)]).stdout.splitlines()
        assert max(map(len, lines)) <= width
        assert ("RECIPE" in lines[0]) == (width == 160)
    widths = [30, 50, 10]
    fit(widths, 60, (0, 1))
    assert sum(widths) + 4 == 60
    assert table([["a", "bb"], ["ccc", "d"]], frozenset({1})) == ["a    bb", "ccc   d"]


def test_what_is_no_run_is_left_out_and_a_missing_directory_refused(tmp_path: Path) -> None:
    """Fails when: a folder of configs or a model's directory is listed."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/config.yaml").write_text("a: 1\n")
    write(tmp_path / "a")
    (tmp_path / "a/model").mkdir()
    (tmp_path / "a/model/run.json").write_text("{}")
    assert [each["name"] for each in listed(tmp_path)] == ["a"]
    assert [each["name"] for each in listed(tmp_path / "a")] == ["."]
    from toolkit.config import Refusal

    missing = CliRunner().invoke(app, ["runs", str(tmp_path / "none")], standalone_mode=False)
    assert isinstance(missing.exception, Refusal)


def test_listing_loads_no_torch(tmp_path: Path) -> None:
    """Fails when: run_list.py or what it imports loads torch at its top."""
    write(tmp_path / "a")
    code = "import sys\nfrom toolkit.report.run_list import list_runs\nfrom pathlib import Path\n"
    code += "assert len(list_runs(Path(sys.argv[1]))) == 1\nprint('torch' in sys.modules)"
    ran = subprocess.run([COLD, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    assert ran.stdout.strip() == "False"
