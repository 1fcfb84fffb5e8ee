"""Trials that are forked from a process with the imports done."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.sweeps.zygote import Zygote

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, time
print(__name__, sys.argv, sys.path[0], sys.stdin.read() == "", os.getsid(0) == os.getpid(), "torch" in sys.modules, flush=True)
how = sys.argv[1]
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    print("ready", flush=True)
    time.sleep(60)
if how == "raise":
    raise ValueError("out of ideas")
sys.exit(int(how))
"""

PAIR = """
import os, sys, time
from pathlib import Path
number = int(sys.argv[1])
print(os.environ["SLOT"], flush=True)
here = Path(__file__).parent
(here / str(number)).touch()
while not (here / str(1 - number)).exists():
    time.sleep(0.01)
sys.exit(10 + number)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="trials are forked on Linux alone")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as started:
        yield started


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
def test_a_fork_is_a_process_of_its_own(zygote: Zygote, script: Path, tmp_path: Path) -> None:
    """Codes as `launch` has them; name, arguments, path, session and log as of `python SCRIPT`, with torch already there.

    Fails when: _become in zygote.py does not replace standard output, or Forked reads a code before the trial has ended.
    """
    log = tmp_path / "log.txt"
    ends = {"0": 0, "2": 2, "75": 75, "raise": 1, "kill": -signal.SIGKILL}
    assert {how: zygote.start([str(script), how], log).wait(60) for how in ends} == ends
    text = log.read_text()
    for how in ends:
        assert f"__main__ {[str(script), how]} {tmp_path} True True True\n" in text
    assert "ValueError: out of ideas" in text


@pytest.mark.slow
def test_a_signal_reaches_a_fork_and_its_code_comes_back(zygote: Zygote, script: Path, tmp_path: Path) -> None:
    """Fails when: Forked.send_signal sends nothing."""
    log = tmp_path / "log.txt"
    trial = zygote.start([str(script), "wait"], log)
    for _ in range(600):
        if log.exists() and "ready" in log.read_text():
            break
        time.sleep(0.05)
    trial.send_signal(signal.SIGTERM)
    assert trial.wait(30) == 75


@pytest.mark.slow
def test_forks_run_at_the_same_time_with_their_own_variables(zygote: Zygote, tmp_path: Path) -> None:
    """The first waits for the second. Fails when: _serve in zygote.py waits for a child before it reads the next request."""
    script, log = tmp_path / "pair.py", tmp_path / "log.txt"
    script.write_text(PAIR)
    first = zygote.start([str(script), "0"], log, {"SLOT": "zero"})
    second = zygote.start([str(script), "1"], log, {"SLOT": "one"})
    assert (first.wait(60), second.wait(60)) == (10, 11)
    assert sorted(log.read_text().split()) == ["one", "zero"]


@pytest.mark.slow
def test_a_fork_dies_with_its_zygote(script: Path, tmp_path: Path) -> None:
    """Fails when: _serve in zygote.py forks without die_with_the_zygote."""
    with Zygote() as started:
        trial = started.start([str(script), "wait"], tmp_path / "log.txt")
    for _ in range(200):
        try:
            os.kill(trial.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("it still runs")


@pytest.mark.slow
def test_another_zygote_is_started_where_one_was_killed(zygote: Zygote, script: Path, tmp_path: Path) -> None:
    """Two forks run when it is killed: both are told as killed, whichever is asked first, also after the next one was started.

    Fails when: _ask in zygote.py forgets the forks of the process before.
    """
    forks = [zygote.start([str(script), "wait"], tmp_path / f"{number}.txt") for number in range(2)]
    assert zygote._process
    zygote._process.kill()
    assert forks[0].wait(30) == -signal.SIGKILL
    third = zygote.start([str(script), "wait"], tmp_path / "2.txt")
    assert forks[1].wait(30) == -signal.SIGKILL
    third.kill()
    assert third.wait(30) == -signal.SIGKILL


@pytest.mark.slow
def test_a_fork_trains_the_same_weights_as_a_process_of_its_own(zygote: Zygote, tmp_path: Path) -> None:
    """Equality of all bytes of the model's file, after another trial was forked before it.

    Fails when: _become in zygote.py changes the settings, such as the learning rate.
    """
    words = [str(ROOT / "recipes" / "basic.py"), "--max-steps", "3", "--learning-rate", "0.003", "--output-dir"]
    subprocess.run([sys.executable, *words, str(tmp_path / "own")], check=True, capture_output=True, timeout=300)
    for name in ("first", "second"):
        assert zygote.start([*words, str(tmp_path / name)], tmp_path / "log.txt").wait(120) == 0
    files = {name: next((tmp_path / name).rglob("model.safetensors")) for name in ("own", "first", "second")}
    assert len({hashlib.sha256(file.read_bytes()).hexdigest() for file in files.values()}) == 1
