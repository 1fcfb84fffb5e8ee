"""The reward of Python code: which tests pass, and each limit, broken for real by code that runs."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rollouts.rollouts_of import rollouts_of
from toolkit.config.rollouts import RewardFunctionsConfig
from toolkit.rollouts import sandbox
from toolkit.rollouts.python_reward import code_of, python, run_tests
from toolkit.rollouts.rewards import load_rewards
from toolkit.rollouts.scoring import score_rollouts

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="these limits are Linux's")


def test_the_reward_is_the_share_of_tests_that_pass() -> None:
    """Fails when: a test that raises is counted, or tests share their names."""
    text = "I double it.\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
    found = python([text, [{"role": "assistant", "content": text}], "def double(x): return x", "nothing", text], tests=[
        ["assert double(2) == 4", "assert double(2) == 5", "seen = 1", "assert 'seen' not in globals()"],
        "assert double('a') == 'aa'", "assert double(1) == 2", ["assert double(1) == 2"], None,
    ])  # fmt: skip
    assert found == [0.75, 1.0, 0.0, 0.0, None]


@pytest.mark.parametrize(("text", "code"), [
    ("```python\na = 1\n```\ntext\n```py\na = 2\n```\n```\noutput\n```", "a = 2\n"), ("```\nb\n```", "b\n"), ("c = 3", "c = 3"),
    ("```python\nd = '''\n``` no fence'''\n```", "d = '''\n``` no fence'''\n"), ("```python\ncut", "cut"), ("~~~python\ne\n~~~", "e\n"),
])  # fmt: skip
def test_the_code_is_the_last_block_of_python(text: str, code: str) -> None:
    """Fails when: the first block is taken, or one that the longest length cut off is not."""
    assert code_of(text) == code


@pytest.mark.parametrize("code", [
    "raise SystemExit(0)", "import os; os._exit(0)", "print('0\\n' * 9)", "import os\nfor fd in range(3, 60):\n  try: os.write(fd, b'x 0\\n')\n  except OSError: pass",
    "import sys; sys.stdin.read()", "input()", "assert False", "def f(:", "import os; os.close(0); os.closerange(3, 60)",
])  # fmt: skip
def test_ending_early_and_writing_success_is_none(code: str) -> None:
    """Fails when: the exit code decides, or lines without the word count."""
    assert run_tests(code, ["assert False", "assert answer == 42"]) == 0.0


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(1000)", "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass"])
def test_time_is_limited(code: str) -> None:
    """Fails when: the process is not killed at its wall time."""
    began = time.monotonic()
    assert run_tests(code, "pass", cpu_seconds=1) == 0.0
    assert time.monotonic() - began < 8


def test_cpu_time_is_limited(tmp_path: Path) -> None:
    """Where the clock allows more. Fails when: RLIMIT_CPU is not set."""
    began = time.monotonic()
    command = [sys.executable, "-I", sandbox.__file__, "1", "1", "512", "16"]
    ended = subprocess.run(command, input=json.dumps({"code": "while True: pass", "tests": ["pass"]}) + "\nword\n", text=True, cwd=tmp_path, capture_output=True, timeout=60)
    assert ended.returncode == -9
    assert time.monotonic() - began < 50


@on_linux
@pytest.mark.parametrize(("code", "error"), [
    ("x = bytearray(2 * 10**9)", "MemoryError"), ("open('big', 'wb').write(b'x' * 10**8)", "OSError"),
    ("import socket; socket.create_connection(('127.0.0.1', PORT))", "OSError"), ("import socket; socket.socket()", "OSError"),
    ("import os; os.fork()", "OSError"), ("import subprocess; subprocess.run(['true'])", "OSError"),
    ("import os; os.kill(os.getppid(), 9)", "OSError"), ("open('OUTSIDE/new', 'w')", "OSError"), ("import os; os.remove('OUTSIDE/kept')", "OSError"),
    ("open('OUTSIDE/kept', 'r+').truncate(0)", "OSError"), ("import os; os.rename('OUTSIDE/kept', 'OUTSIDE/moved')", "OSError"),
    ("import os; os.environ['HF_TOKEN']", "KeyError"),
])  # fmt: skip
def test_what_code_must_not_do_is_an_error_in_it(code: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: its limit is taken out of `confine` (a rlimit, `_landlock`, `_filter_calls`), or the environment is handed on."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    (tmp_path / "kept").write_text("kept")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        code = code.replace("OUTSIDE", str(tmp_path)).replace("PORT", str(server.getsockname()[1]))
        body = "\n".join(f"    {line}" for line in code.splitlines())
        assert run_tests(f"try:\n{body}\n    found = 'nothing'\nexcept {error}:\n    found = 'error'", ["assert found == 'error'"]) == 1.0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"kept": "kept"}


def test_a_process_that_does_not_start_is_no_fault_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: no line of the sandbox counts as no test passed."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="not started"):
        run_tests("x = 1", "assert x")


def test_what_code_may_do() -> None:
    """Threads, files in its own directory, installed packages. Fails when: clone is refused whatever its flags."""
    code = (
        "import threading, numpy\nopen('mine', 'w').write('x')\nseen = []\n"
        "thread = threading.Thread(target=seen.append, args=[1])\nthread.start(); thread.join()"
    )
    assert run_tests(code, ["assert seen == [1] and open('mine').read() == 'x' and numpy.arange(4).sum() == 6"]) == 1.0


def test_as_a_reward_completions_are_run_at_once_and_in_order() -> None:
    """Fails when: `threads.map` gives results as they come."""
    rewards = load_rewards(RewardFunctionsConfig(reward_funcs=["python"], reward_processes=2, reward_timeout=1.0))
    groups = [({"prompt": "p", "tests": [f"assert x == {n}"]}, ["while True: pass" if n == 0 else f"x = {n}", "x = 1"]) for n in range(3)]
    assert [each.reward for each in score_rollouts(rollouts_of(groups), rewards)] == [0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
