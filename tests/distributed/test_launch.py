"""The launcher: ranks that know their place, signals that reach them, one exit code, nobody left behind.

The ranks are small programs in processes of their own. Each test names the one-line change under which it fails.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from toolkit.distributed import launch as launching
from toolkit.distributed.launch import Nodes, launch

ROOT = Path(__file__).resolve().parents[2]
# python -c LAUNCHER PATIENCE PROCESSES SCRIPT
LAUNCHER = """
import json, signal, sys
from toolkit.distributed import launch
launch.PATIENCE = tuple(zip(json.loads(sys.argv[1]), (signal.SIGTERM, signal.SIGKILL)))
sys.exit(launch.launch([sys.executable, "-S", *sys.argv[3:]], int(sys.argv[2])))
"""
# Says that it runs by a file with its pid, notes every signal it hears, and acts on them as its argument says.
RANK = """
import os, pathlib, signal, sys, time
rank, act = os.environ.get("RANK", "0"), sys.argv[1]
here = pathlib.Path(sys.argv[0]).parent
def heard(number, frame):
    with open(here / f"heard.{rank}", "a") as file:
        file.write(signal.Signals(number).name + " ")
    if act == "save":
        sys.exit(75)
    if act == "save slowly":
        signal.signal(number, signal.SIG_DFL)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, heard)
(here / f"pid.{rank}.new").write_text(str(os.getpid()))
os.rename(here / f"pid.{rank}.new", here / f"pid.{rank}")
while True:
    time.sleep(0.01)
"""


class Launched:
    """A launcher in a process of its own, and its ranks."""

    def __init__(self, folder: Path, source: str, *arguments: str, processes: int = 2, patience: tuple[float, float] = (10, 15)) -> None:
        (folder / "rank.py").write_text(source)
        command = [sys.executable, "-c", LAUNCHER, json.dumps(patience), str(processes), str(folder / "rank.py"), *arguments]
        self.folder, self.pids = folder, []
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT)
        until(lambda: len(list(folder.glob("pid.?"))) == processes)
        self.pids = [int((folder / f"pid.{rank}").read_text()) for rank in range(processes)]

    def end(self) -> tuple[int, str]:
        """Its exit code and what it said, when it has ended by itself and all ranks are gone."""
        _, said = self.process.communicate(timeout=20)
        assert not [pid for pid in self.pids if is_running(pid)]
        return self.process.returncode, said

    def heard(self, rank: int) -> list[str]:
        path = self.folder / f"heard.{rank}"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start_one(*arguments: object, **settings: object) -> Launched:
        started.append(Launched(tmp_path, *arguments, **settings))  # type: ignore[arg-type]
        return started[-1]

    yield start_one
    for each in started:
        for pid in (each.process.pid, *each.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        each.process.wait(10)
        each.process.stderr.close()


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Not gone, and not a zombie whose parent (whoever takes in orphans here) has yet to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run_ranks(tmp_path: Path, source: str, processes: int, nodes: Nodes = Nodes()) -> int:  # noqa: B008
    script = tmp_path / "rank.py"
    script.write_text(source)
    return launch([sys.executable, "-S", str(script), str(tmp_path)], processes, nodes)


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([0], 0), ([7], 7), ([75], 75), ([-15], 143),
        ([0, 0], 0), ([75, 75], 75), ([0, 75], 75), ([75, 0], 75),
        ([0, 3], 3), ([75, 3], 3), ([2, 2], 2), ([-9, 0], 137), ([75, -6], 134),
    ],
)  # fmt: skip
def test_exit_codes_of_all_ranks_become_one(tmp_path: Path, ends: list[int], code: int) -> None:
    """Fails when: the last rank's code is taken, 75 wins over a failure, or a signal's number is not moved by 128."""
    source = f"import os; end = {ends}[int(os.environ.get('RANK', 0))]\nos.kill(os.getpid(), -end) if end < 0 else os._exit(end)"
    assert run_ranks(tmp_path, source, len(ends)) == code


def test_the_first_rank_that_ended_badly_gives_the_code(tmp_path: Path) -> None:
    """Fails when: the code is that of the lowest rank, or of the worst one."""
    source = "import os, time; late = os.environ['RANK'] == '0'; time.sleep(0.5 * late); os._exit(9 if late else 4)"
    assert run_ranks(tmp_path, source, 2) == 4


def test_every_rank_of_two_machines_knows_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: RANK does not count the machines before, or each machine meets at a port of its own."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launching, "usable_cores", lambda: 7)
    source = "import json, os, sys; open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}', 'w').write(json.dumps(dict(os.environ)))"
    for this in (0, 1):
        assert run_ranks(tmp_path, source, 2, Nodes(count=2, this=this, main_address="10.0.0.7")) == 0
    ranks = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in ranks] == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    shared = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "3"}
    assert all(shared.items() <= each.items() for each in ranks)


def test_ranks_of_one_machine_meet_at_a_free_port_and_keep_the_number_of_threads_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the port is fixed, so that two trainings on one machine collide, or OMP_NUM_THREADS is overwritten."""
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    one, other = launching.rank_environments(2), launching.rank_environments(2)
    assert one[0]["MASTER_PORT"] == one[1]["MASTER_PORT"] != other[0]["MASTER_PORT"]
    assert one[0]["MASTER_ADDR"] == "127.0.0.1"
    assert {each["OMP_NUM_THREADS"] for each in one} == {"5"}


def test_the_only_process_is_a_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: a single process is treated as a rank."""
    monkeypatch.delenv("RANK", raising=False)
    assert run_ranks(tmp_path, "import os, sys; sys.exit(any(name in os.environ for name in ('RANK', 'WORLD_SIZE')))", 1) == 0


@pytest.mark.parametrize(("sent", "heard"), [("SIGTERM", "SIGTERM"), ("SIGUSR1", "SIGTERM")])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_reaches_every_rank_and_their_75_is_handed_on(start, sent: str, heard: str, processes: int) -> None:
    """Fails when: the launcher dies of the signal, sends it to the first rank only, or hands SIGUSR1 on as it is."""
    launched = start(RANK, "save", processes=processes)
    launched.process.send_signal(signal.Signals[sent])
    assert launched.end() == (75, "")
    assert [launched.heard(rank) for rank in range(processes)] == [[heard]] * processes


def test_ctrl_c_in_a_terminal_is_heard_once_by_every_rank(start) -> None:
    """A terminal sends SIGINT to the whole foreground group. Fails when: the ranks stay in the launcher's group."""
    launched = start(RANK, "note")
    os.killpg(launched.process.pid, signal.SIGINT)
    until(lambda: bool(launched.heard(0) and launched.heard(1)))
    time.sleep(0.2)
    assert [launched.heard(0), launched.heard(1)] == [["SIGINT"], ["SIGINT"]]


def test_a_second_signal_reaches_the_ranks_too(start) -> None:
    """Fails when: the launcher forwards one signal and swallows the next."""
    launched = start(RANK, "save slowly")
    launched.process.terminate()
    until(lambda: bool(launched.heard(0) and launched.heard(1)))
    launched.process.terminate()
    code, said = launched.end()
    assert code == 143
    assert "was ended by SIGTERM" in said


def test_a_third_signal_ends_ranks_that_heed_none(start) -> None:
    """Fails when: a rank that is stuck outside Python survives every Ctrl-C."""
    launched = start(RANK, "note")
    for count in (1, 2, 3):
        launched.process.send_signal(signal.SIGINT)
        until(lambda count=count: count == 3 or len(launched.heard(0)) == len(launched.heard(1)) == count)
    assert launched.end()[0] == 137


def test_a_killed_rank_is_named_and_the_others_may_end_by_themselves(start) -> None:
    """Fails when: the others are killed at once (no rank could write down what it knows), or are waited for without end."""
    survivor = RANK.replace("while True:", "while rank == '1' or os.path.exists(here / 'pid.1'):")
    launched = start(survivor + "time.sleep(0.5)\n(here / 'done').write_text('')\n", "note")
    os.kill(launched.pids[1], signal.SIGKILL)
    (launched.folder / "pid.1").unlink()
    assert launched.end() == (137, "rank 1 was ended by SIGKILL\n")
    assert (launched.folder / "done").exists()
    assert launched.heard(0) == []


def test_ranks_that_do_not_end_after_a_failure_get_sigterm_and_then_sigkill(start) -> None:
    """Rank 0 is stopped, so that it hears no SIGTERM; rank 2 saves when it hears one. Fails when: SIGKILL does not follow."""
    launched = start(RANK.replace('act == "save"', 'rank == "2"'), "note", processes=3, patience=(0.3, 0.8))
    os.kill(launched.pids[0], signal.SIGSTOP)
    os.kill(launched.pids[1], signal.SIGKILL)
    code, said = launched.end()
    assert code == 137
    assert said.startswith("rank 1 was ended by SIGKILL\n")
    assert "SIGTERM" in said
    assert launched.heard(2) == ["SIGTERM"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_ranks_die_with_a_launcher_that_is_killed(start) -> None:
    """Fails when: the ranks are not asked to die with their parent, and train on with nobody to stop them."""
    launched = start(RANK, "note")
    launched.process.kill()
    until(lambda: not any(is_running(pid) for pid in launched.pids), 5)


def test_what_a_rank_leaves_running_is_ended_with_it(tmp_path: Path) -> None:
    """Such as the data workers of a killed rank. Fails when: only the rank itself is waited for."""
    source = (
        "import os, subprocess, sys; child = subprocess.Popen(['sleep', '60'], close_fds=True)\n"
        "open(sys.argv[1] + '/child', 'w').write(str(child.pid)); os._exit(0)"
    )
    assert run_ranks(tmp_path, source, 1) == 0
    child = int((tmp_path / "child").read_text())
    until(lambda: not is_running(child), 5)


def test_a_program_that_cannot_be_started_leaves_no_rank_and_no_handler(tmp_path: Path) -> None:
    """Fails when: the signals are not given back after a failure."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(FileNotFoundError):
        launch([str(tmp_path / "absent")], 2)
    assert signal.getsignal(signal.SIGTERM) is before
