"""A `python` that starts with the heavy imports done: what it costs is what it does.

It hands its arguments, folder, environment, output and signals to a process forked by the fixture `fork_run`, and ends as that one
does. `-` and what it doesn't know go to the real Python. For tests of what a command does; one of how it starts, or of what it
imports, needs the real one.
"""

import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
BIN = Path(sys.prefix) / "bin"

# Killed, it takes the process behind it along.
# The shell finds its Python: a first line that names one can hold no space, nor a path of more than 127 characters.
CLIENT = """#!/bin/sh
'''exec' {python_quoted} -IS "$0" "$@"
' '''
import json, os, signal, socket, sys
words = sys.argv[1:] if os.path.basename(sys.argv[0]) == "python" else [{bin!r} + "/" + os.path.basename(sys.argv[0]), *sys.argv[1:]]
words = words[1:] if words[:1] == ["-u"] else words
known = words and (words[0].endswith(".py") or words[0] in ("-m", "-c") or os.path.isabs(words[0]))
if not known:
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


@pytest.fixture(scope="module", autouse=True)
def as_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """In a file that has `pytestmark = pytest.mark.warm`, `sys.executable` is the Python of this file."""
    real = sys.executable
    if request.node.get_closest_marker("warm"):
        sys.executable = request.getfixturevalue("warm_python")
    yield
    sys.executable = real


@pytest.fixture(scope="session")
def warm_python(warm_programs: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a test gives `subprocess` in place of `sys.executable`."""
    return str(warm_programs(tmp_path_factory.mktemp("warm"), HERE / "as_python.py") / "python")


@pytest.fixture(scope="session")
def warm_programs(fork_run: Callable[..., Any]) -> Iterator[Callable[..., Path]]:
    """`warm_programs(folder, script)` makes `python` and `toolkit` in that folder, which run `script` with the path of this
    `python` and then their own arguments."""
    open_sockets = []

    def make(folder: Path, script: Path) -> Path:
        address = str(folder / "socket")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address)
        listening.listen(64)
        open_sockets.append(listening)
        for program in BIN.iterdir():
            (folder / program.name).symlink_to(program)
        for name in ("python", "toolkit"):
            (folder / name).unlink()
            (folder / name).write_text(client_script(BIN, address))
            (folder / name).chmod(0o755)
        threading.Thread(target=_serve, args=(listening, fork_run, str(script), str(folder / "python")), daemon=True).start()
        return folder

    yield make
    for listening in open_sockets:
        listening.close()


def client_script(programs: Path, address: str) -> str:
    """The script that runs in place of the Python among these programs."""
    python = str(programs / "python")
    return CLIENT.format(python=python, python_quoted=shlex.quote(python), bin=str(programs), address=address)


@pytest.fixture(scope="session", name="client_script")
def client_script_fixture() -> Callable[[Path, str], str]:
    return client_script


def _serve(listening: socket.socket, fork_run: Callable[..., Any], script: str, python: str) -> None:
    with contextlib.suppress(OSError):  # closed: the tests are over
        while True:
            threading.Thread(target=_answer, args=(listening.accept()[0], fork_run, script, python), daemon=True).start()


def _answer(connection: socket.socket, fork_run: Callable[..., Any], script: str, python: str) -> None:
    asked = json.loads(connection.makefile().readline())
    read, out, err = (f"/proc/{asked['pid']}/fd/{number}" for number in range(3))
    read = read if asked["words"][:2] == ["-m", "toolkit.sweeps.zygote"] else os.devnull  # which is asked through it
    process = fork_run(script, [python, *asked["words"]], out, asked["folder"], asked["environment"], err=err, read=read, clean=True)
    process.start()
    with contextlib.suppress(OSError):  # who asked was killed
        connection.sendall(f"{process.pid}\n".encode())
    threading.Thread(target=_die_with_it, args=(connection, process.pid), daemon=True).start()
    process.join()
    with contextlib.suppress(OSError):
        connection.sendall(f"{process.exitcode}\n".encode())


def _die_with_it(connection: socket.socket, pid: int) -> None:
    with contextlib.suppress(OSError):
        connection.recv(1)  # returns when the one who asked is gone
    for kill in (os.killpg, os.kill):  # one that has just been forked has no group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
