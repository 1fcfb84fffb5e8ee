"""toolkit slurm against the real slurmctld: jobs that are stopped for their time, come back, and end with the same bits."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from toolkit.cli.main import app
from toolkit.cli.slurm import batch_script
from toolkit.config import Refusal
from toolkit.sweeps.journal import JournalFile, Objective, Plan, plan_record

ROOT = Path(__file__).resolve().parents[2]
specification = importlib.util.spec_from_file_location("slurm_cluster", Path(__file__).with_name("slurm_cluster.py"))
assert specification is not None
assert specification.loader is not None
slurm_cluster = importlib.util.module_from_spec(specification)
specification.loader.exec_module(slurm_cluster)
run, wait_for = slurm_cluster.run, slurm_cluster.wait_for

FLAGS = [
    "--vocab-size", "300", "--hidden-size", "32", "--num-hidden-layers", "1", "--max-length", "64", "--max-train-examples", "200",
    "--max-eval-examples", "20", "--max-steps", "240", "--logging-steps", "5", "--save-steps", "120", "--eval-steps", "240", "--use-cpu",
    "--dataloader-num-workers", "1", "--global-batch-size", "4", "--dropout", "0.1",
]  # fmt: skip
RECIPE = str(ROOT / "recipes/accelerated.py")


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, slurm_cluster.cluster(Path(folder)) as environment:
        yield {**environment, "OMP_NUM_THREADS": "1"}


def toolkit(*words: str, cwd: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolkit", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


def submitted(cwd: Path, environment: dict[str, str], *words: str) -> str:
    sent = toolkit("slurm", "submit", RECIPE, *FLAGS, *words, cwd=cwd, environment=environment)
    assert sent.returncode == 0, sent.stderr
    return re.search(r"Submitted (\d+)", sent.stdout)[1]


def state(job: str, environment: dict[str, str]) -> str:
    found = re.search(r"JobState=(\w+)", run(["scontrol", "show", "job", job], environment))
    return found[1] if found else ""


def begin_again(job: str, environment: dict[str, str]) -> None:
    """A job that came back would wait for two minutes. slurmd refuses it in the second in which it was killed."""
    time.sleep(2.5)

    def begins() -> bool:
        run(["scontrol", "update", f"jobid={job}", "StartTime=now"], environment)
        return state(job, environment) not in ("PENDING", "")

    wait_for(begins, 60)


def has_reached(folder: Path, step: int) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and f'"step": {step}' in metrics.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_out_of_time_comes_back_and_ends_with_the_same_bits(slurm: dict[str, str], tmp_path: Path, nodes: int) -> None:
    """Stopped as Slurm does it ahead of the end of the time; with a data worker, whom the signal reaches too.

    Fails when: ranks take the launcher's hint for a second signal, a data worker dies of the first, or the other node's ranks are
    ended while they save.
    """
    job = submitted(tmp_path, slurm, "--output-dir", "run", "--time", "10", "--nodes", str(nodes))
    wait_for(lambda: has_reached(tmp_path / "run", 20), 60)
    run(["scancel", "--signal=USR1", "--batch", job], slurm)
    log = tmp_path / f"run.slurm-{job}.log"
    wait_for(lambda: state(job, slurm) not in ("RUNNING", "COMPLETING", "REQUEUED"), 90)
    assert state(job, slurm) == "PENDING", log.read_text()
    assert "out of time: " in log.read_text()
    assert not has_reached(tmp_path / "run", 240)
    begin_again(job, slurm)
    wait_for(lambda: state(job, slurm) in ("COMPLETED", "FAILED"), 90)
    assert "SIGUSR1: finishing this step" in log.read_text(), log.read_text()
    assert (tmp_path / "run/model/model.safetensors").exists(), log.read_text()
    whole = toolkit(
        "train", RECIPE, *FLAGS, "--output-dir", "whole", "--processes", str(nodes), cwd=tmp_path, environment=slurm
    )
    assert whole.returncode == 0, whole.stderr
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == (tmp_path / "whole/model/model.safetensors").read_bytes()


STOPS = "bash -c 'trap \"exit 75\" USR1 TERM; echo ready; sleep 60 & wait'"


def sent(script: str, logs: list[str], folder: Path, environment: dict[str, str]) -> str:
    """The number of a job whose commands have set their traps."""
    sent = subprocess.run(
        ["sbatch", "--parsable"],
        input=script,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    wait_for(lambda: all((folder / log).exists() and "ready" in (folder / log).read_text() for log in logs), 60)
    return sent.stdout.strip()


@pytest.mark.slow
def test_a_canceled_job_stays_away(slurm: dict[str, str], tmp_path: Path) -> None:
    """Fails when: scancel brings a job back that nobody can get rid of."""
    job = sent(batch_script("stops", STOPS, log=str(tmp_path / "log")), ["log"], tmp_path, slurm)
    run(["scancel", job], slurm)
    wait_for(lambda: state(job, slurm) == "CANCELLED", 60)
    assert "back into the queue" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_of_an_array_one_job_is_stopped_and_comes_back_alone(slurm: dict[str, str], tmp_path: Path) -> None:
    """The last one, which has the array's own number. Fails when: that number is what is stopped."""
    script = batch_script("array", STOPS, log=str(tmp_path / "%a.log"), array=2)
    job = sent(script, ["0.log", "1.log"], tmp_path, slurm)
    run(["scancel", "--signal=USR1", "--batch", f"{job}_1"], slurm)
    wait_for(lambda: state(f"{job}_1", slurm) == "PENDING", 60)
    assert state(f"{job}_0", slurm) == "RUNNING"
    run(["scancel", job], slurm)


@pytest.mark.slow
def test_the_jobs_of_an_array_share_the_trials_of_a_sweep(slurm: dict[str, str], tmp_path: Path) -> None:
    """Each trial once. Fails when: a job of the array gets no command, or works on a sweep of its own."""
    words = ["--sweep-workers", "2", "--sweep-dir", "rates", "--search", "learning_rate=1e-4,1e-3,1e-2", "--max-steps", "2", "--time", "10"]
    few = ["--save-steps", "2", "--eval-steps", "2"]
    job = submitted(tmp_path, slurm, *words, *few)
    jobs = [f"{job}_0", f"{job}_1"]
    wait_for(lambda: all(state(each, slurm) in ("COMPLETED", "FAILED") for each in jobs), 120)
    logs = [(tmp_path / f"rates.slurm-{each}.log").read_text() for each in jobs]
    assert [state(each, slurm) for each in jobs] == ["COMPLETED"] * 2, logs
    assert sorted(path.name for path in (tmp_path / "rates/trials").iterdir()) == ["0000", "0001", "0002"]
    assert sorted(number for log in logs for number in re.findall(r"^trial (\d+)  eval_loss", log, re.MULTILINE)) == ["0000", "0001", "0002"]
    assert all("3 of 3 trials have ended, 3 with a value" in log for log in logs)


def test_what_slurm_or_the_recipe_refuses_is_one_message(slurm: dict[str, str], tmp_path: Path) -> None:
    """Fails when: a mistake is found after hours in the queue."""
    for words, said in (
        (["--partition", "none"], "sbatch refuses the job"), (["--time", "soon"], "no time of Slurm"), (["--learning-rat", "1"], "learning-rate"),
        (["--overwrite-output-dir"], "--overwrite-output-dir"), (["--nodes", "2", "--sweep-workers", "2"], "one machine"),
    ):  # fmt: skip
        refused = toolkit("slurm", "submit", RECIPE, *FLAGS, *words, cwd=tmp_path, environment=slurm)
        assert refused.returncode == 2, refused
        assert said in refused.stderr
        assert "Traceback" not in refused.stderr
    assert run(["squeue", "--noheader"], slurm) == ""


@pytest.mark.parametrize("workers", [[], ["--sweep-workers", "2", "--search", "seed=1,2"]])
@pytest.mark.parametrize("option", ["--array=0-3", "--array 0-3", "-a 0-3", "-a0-3", "--arr=0-3", ""])
def test_jobs_of_an_array_are_not_given_one_output_directory(
    option: str, workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: one way of asking for an array goes into the script; the last one is a variable that sbatch reads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SBATCH_ARRAY_INX", "" if option else "0-3")
    done = CliRunner().invoke(app, ["slurm", "submit", RECIPE, "--dry-run", *workers, *([f"--sbatch={option}"] if option else [])])
    assert isinstance(done.exception, Refusal), done.output
    assert (option or "SBATCH_ARRAY_INX") in str(done.exception)
    assert done.output == ""
    monkeypatch.setenv("SBATCH_ARRAY_INX", "")
    for allowed in ("-Aname", "--account=name"):
        assert CliRunner().invoke(app, ["slurm", "submit", RECIPE, "--dry-run", *workers, f"--sbatch={allowed}"]).exit_code == 0


def test_names_with_spaces_and_signs_reach_slurm_as_they_are(slurm: dict[str, str], tmp_path: Path) -> None:
    """Fails when: an option is not quoted (sbatch takes the rest for another one, or for a comment), or a % is not doubled."""
    name, folder = 'a "b" #1', tmp_path / "100% of #2"
    job = submitted(tmp_path, slurm, "--job-name", name, "--output-dir", str(folder), "--sbatch=--hold", "--sbatch=--comment=two words")
    shown = run(["scontrol", "show", "job", job], slurm)
    run(["scancel", job], slurm)
    assert f"JobName={name}" in shown
    assert "Comment=two words" in shown
    assert f"StdOut={str(folder).replace('%', '%%')}.slurm-{job}.log" in shown


SWEEP = ["slurm", "submit", RECIPE, "--sweep-workers", "4", "--search", "learning_rate=1e-4,1e-3,1e-2"]


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        ([], "--parallel 4 --slots 1"), (["--parallel", "6"], "--slots 2"), (["--processes", "2"], "--processes 2 --parallel 4 --slots 1"),
        (["--slots=2", "--parallel", "8"], ""),
    ],
)
def test_a_worker_of_a_sweep_types_what_is_its_share(words: list[str], typed: str, tmp_path: Path) -> None:
    """With its log next to the trials. Fails when: --sweep-dir is not looked at, workers wait for one trial at a time, or each runs all of them."""
    shown = CliRunner().invoke(app, [*SWEEP, "--sweep-dir=there/rates", *words, "--dry-run"], prog_name="toolkit").stdout
    assert "#SBATCH --output=there/rates.slurm-%A_%a.log" in shown
    (command,) = (line.strip() for line in shown.splitlines() if "toolkit sweep" in line)
    assert command.endswith(typed)
    assert (command.count("--parallel"), command.count("--slots")) == (1, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--learning-rat", "1"], "learning-rat"), (["--learning-rate", "1"], "learning-rate"), (["--search", "nothing=1,2"], "nothing"),
        (["--search", "num_train_epochs=-1,1"], "num-train-epochs"), (["--strategy", "guess"], "guess"), (["--trials", "0"], "--trials"),
        (["--resume"], "--resume"), (["--output", "x.html"], "--output"), (["--wandb", "x"], "--wandb"), (["--sweep-dir", "/proc/x"], "--sweep-dir"),
        (["--sweep-dir", "old"], "holds a sweep with another"),
    ],
)
def test_what_a_sweep_refuses_is_refused_before_it_is_sent(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: the words of a sweep go into the script as they are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    plan = Plan("other.py", "", [], ["seed=1,2"], "grid", 0, 2, [Objective("eval_loss", False)])
    JournalFile(tmp_path / "old").append(plan_record(plan)) if "old" in words else None
    done = CliRunner().invoke(app, [*SWEEP, *words], prog_name="toolkit")
    assert isinstance(done.exception, Refusal) or getattr(done.exception, "code", 0) == 2, done.output
    assert said in done.output + str(done.exception)
    assert "sbatch" not in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["old"] * ("old" in words)


@pytest.mark.parametrize(
    ("time", "refused"),
    [("1:00", True), ("2", True), ("0:02:00", True), ("3", False), ("2:01", False), ("1:00:00", False), ("1-0", False), ("0-1:00", False),
     ("0-0:01:30", True), ("0", False), ("UNLIMITED", False)],
)  # fmt: skip
def test_a_time_that_leaves_none_for_training_is_refused(time: str, refused: bool, tmp_path: Path) -> None:
    """Who types 1:00 means an hour, and Slurm a minute. Fails when: a time is read in another way than Slurm's."""
    done = CliRunner().invoke(app, ["slurm", "submit", "sft", "--time", time, "--dry-run", "--output-dir", str(tmp_path / "a")])
    assert (done.exit_code == 2) == refused, done.output
    assert ("hour is 1:00:00" in done.output) == refused


def test_without_slurm_the_script_can_be_looked_at(tmp_path: Path) -> None:
    """Fails when: an option of ours reaches the recipe, or one of the recipe is left out."""
    words = [
        "slurm",
        "submit",
        RECIPE,
        "--gpus-per-node",
        "8",
        *FLAGS,
        "--nodes",
        "2",
        "--sbatch=--qos=high",
        "--setup",
        "module load cuda",
        "--output-dir",
        "it's",
    ]
    nowhere = {**os.environ, "PATH": str(tmp_path)}
    shown = toolkit(*words, "--dry-run", cwd=tmp_path, environment=nowhere)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --qos=high", "#SBATCH --requeue"} <= set(lines)
    command = next(line for line in lines if "toolkit train" in line)
    assert "--processes 8" in command
    assert "--resume" in command
    assert "'it'\"'\"'s'" in command
    assert "--qos" not in command
    assert lines[lines.index(command) - 1].strip() == "module load cuda"
    assert subprocess.run(["bash", "-n"], input=shown.stdout, text=True, check=False).returncode == 0
    refused = toolkit(*words, cwd=tmp_path, environment=nowhere)
    assert refused.returncode == 2
    assert "--dry-run" in refused.stderr
