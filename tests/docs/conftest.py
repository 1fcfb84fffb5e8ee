"""A shell like a reader's, in which Python starts with the heavy imports done: a page of commands costs what it trains.

`python` and `toolkit` on its path hand their arguments, folder, environment, output and signals to a process forked here.
"""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.prefix) / "bin"
SECONDS = 400  # for one block, on a machine where other tests run beside it

# What stands for `python`: -c and standard input go to the real one. Killed, it takes the process that it stands for along.
# The shell finds its Python: a first line that names one can hold no space, nor a path of more than 127 characters.
CLIENT = """#!/bin/sh
'''exec' {python_quoted} -IS "$0" "$@"
' '''
import json, os, signal, socket, sys
words = sys.argv[1:] if os.path.basename(sys.argv[0]) == "python" else [{bin!r} + "/" + os.path.basename(sys.argv[0]), *sys.argv[1:]]
if not words or not (words[0].endswith(".py") or words[0] == "-m" or os.path.isabs(words[0])):
    os.execv({python!r}, [{python!r}, *words])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
asked = json.dumps(dict(words=words, folder=os.getcwd(), environment=dict(os.environ), pid=os.getpid()))
server.sendall(asked.encode() + b"\\n")
answers = server.makefile()
child = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: os.kill(child, number))
code = int(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@pytest.fixture(scope="session")
def reader(fork_run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`reader(shell, folder)` runs a block in bash as a reader would, and gives its exit code and its output."""
    folder = tmp_path_factory.mktemp("bin")
    address = str(folder / "socket")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    client = client_script(BIN, address)
    for program in BIN.iterdir():
        (folder / program.name).symlink_to(program)
    for name in ("python", "toolkit"):
        (folder / name).unlink()
        (folder / name).write_text(client)
        (folder / name).chmod(0o755)
    threading.Thread(target=_serve, args=(listening, fork_run, str(folder / "python")), daemon=True).start()
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                   "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip

    def run(shell: str, where: Path) -> subprocess.CompletedProcess[str]:
        if not (where / ".venv").exists():
            (where / ".venv").mkdir()
            (where / ".venv/bin").symlink_to(folder)
            (where / "recipes").symlink_to(ROOT / "recipes")
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", shell], cwd=where, env=environment, start_new_session=True, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            out, _ = process.communicate(timeout=SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(shell, process.returncode, out)

    yield run
    listening.close()


def client_script(programs: Path, address: str) -> str:
    """The text of what stands for the Python among these programs."""
    python = str(programs / "python")
    return CLIENT.format(python=python, python_quoted=shlex.quote(python), bin=str(programs), address=address)


@pytest.fixture(scope="session", name="client_script")
def client_script_fixture() -> Callable[[Path, str], str]:
    return client_script


def _serve(listening: socket.socket, fork_run: Callable[..., Any], python: str) -> None:
    with contextlib.suppress(OSError):  # closed: the tests are over
        while True:
            threading.Thread(target=_answer, args=(listening.accept()[0], fork_run, python), daemon=True).start()


def _answer(connection: socket.socket, fork_run: Callable[..., Any], python: str) -> None:
    asked = json.loads(connection.makefile().readline())
    out, err = (f"/proc/{asked['pid']}/fd/{number}" for number in (1, 2))
    script = str(Path(__file__).with_name("as_a_reader.py"))
    process = fork_run(script, [python, *asked["words"]], out, asked["folder"], asked["environment"], err=err)
    process.start()
    connection.sendall(f"{process.pid}\n".encode())
    threading.Thread(target=_die_with_it, args=(connection, process.pid), daemon=True).start()
    process.join()
    with contextlib.suppress(OSError):
        connection.sendall(f"{process.exitcode}\n".encode())


def _die_with_it(connection: socket.socket, pid: int) -> None:
    with contextlib.suppress(OSError):
        connection.recv(1)  # returns when the one who asked is gone
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
