"""Worker processes that can't be started, and those that one which dies leaves behind."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from toolkit.data.worker_processes import started

CANNOT_START = """import multiprocessing, sys, torch
from multiprocessing import popen_fork, synchronize
from torch.utils.data import DataLoader
from toolkit.config import Refusal
from toolkit.data.loading.loaders import _begin_worker
from toolkit.data.worker_processes import started
rows = torch.arange(8)
running = started(DataLoader(rows, num_workers=1), "--dataloader-num-workers")
before = set(multiprocessing.active_children())
launch, calls = popen_fork.Popen._launch, []
def second_fails(popen, process):
    calls.append(process)
    if len(calls) > 1:
        raise BlockingIOError(11, "Resource temporarily unavailable") if sys.argv[1] == "processes" else RuntimeError("can't start new thread")
    launch(popen, process)
def fails(*_, **__):
    raise OSError(30, "Read-only file system")
if sys.argv[1] == "shared memory":
    synchronize.SemLock.__init__ = fails
else:
    popen_fork.Popen._launch = second_fails
try:
    started(DataLoader(rows, num_workers=2, worker_init_fn=_begin_worker), "--dataloader-num-workers")
except Refusal as refused:
    held = refused  # as by a process that ends: without it torch's pipes are closed, and so are its workers
    print(refused)
left = set(multiprocessing.active_children()) - before
for process in left:
    process.kill()  # else this Python waits for it, too
print(len(left), "left,", [int(row) for row in running])"""


@pytest.mark.parametrize("what", ["processes", "threads", "shared memory"])
def test_workers_that_cannot_be_started_are_refused_and_none_is_left(what: str) -> None:
    """Under a limit of processes, or without /dev/shm. The workers of a run hear no SIGTERM, with which Python ends those that
    are left: it waited ten minutes for them. Fails when: started in worker_processes.py raises what torch does, or kills nobody.

    In a process of its own: torch's handler of SIGCHLD raises wherever Python is."""
    command = [sys.executable, "-c", CANNOT_START, what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert re.match(r"--dataloader-num-workers 2: .*(unavailable|new thread|Read-only)", done.stdout), done.stderr
    assert done.stdout.splitlines()[-1] == f"0 left, {list(range(8))}"


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_cannot_be_read_are_not_blamed_on_the_workers(workers: int) -> None:
    """The main process reads the first ones while workers start. Fails when: any OSError is taken for one of starting them."""

    def rows() -> Iterator[int]:
        yield 1
        raise OSError(5, "Input/output error", "data.jsonl")

    loader = DataLoader(torch.arange(8), sampler=rows(), batch_size=None, num_workers=workers)  # type: ignore[arg-type]
    with pytest.raises(OSError, match=r"data\.jsonl"):
        list(started(loader, "--preprocessing-num-workers"))


LOSES_ONE = """import multiprocessing, os, signal, torch
from torch.utils.data import DataLoader
from toolkit.data.loading.loaders import _begin_worker
from toolkit.data.worker_processes import started
rows = started(DataLoader(torch.arange(10**6), num_workers=2, worker_init_fn=_begin_worker), "--dataloader-num-workers")
next(rows)
os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
for row in rows: pass"""


def test_a_worker_that_is_killed_ends_the_process_at_once() -> None:
    """As the kernel kills one when memory runs out; the other hears no SIGTERM. Fails when: _end_them_at_the_end in
    worker_processes.py is not called, or kills nobody."""
    process = subprocess.Popen([sys.executable, "-c", LOSES_ONE], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, printed = process.communicate(timeout=40)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, printed = process.communicate()
    assert process.returncode == 1, printed  # what torch says, or multiprocessing of the broken connection


LOSES_FOLDER = """import os, shutil, sys, tempfile, torch
from torch.utils.data import DataLoader
from toolkit.data.loading.loaders import _begin_worker
from toolkit.data.worker_processes import LostSockets, started
def load():
    return started(DataLoader(torch.arange(10**6), num_workers=2, worker_init_fn=_begin_worker), "--dataloader-num-workers")
rows = load()
for _ in range(4): next(rows)  # of both workers, which have their sockets now
shutil.rmtree(tempfile.gettempdir())
try:
    for row in rows if sys.argv[1] == "the rows that are being read" else load(): pass
except LostSockets as lost:
    print(lost)"""


@pytest.mark.parametrize("which", ["the rows that are being read", "the rows of an evaluation"])
def test_workers_without_the_folder_of_their_sockets_are_named(which: str) -> None:
    """TMPDIR is removed; no worker adds a traceback of its own, and what is loaded next doesn't wait for ever. Fails when:
    _reached doesn't look for the folder, started doesn't before it starts them, or _lost kills nobody."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # the path of a socket has 107 letters at most
        command = [sys.executable, "-c", LOSES_FOLDER, which]
        environment = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{folder}/")


BEGINS = """import os, shutil, sys, tempfile, torch
from torch.utils.data import DataLoader
from toolkit.config import Refusal
from toolkit.data.loading.loaders import _begin_worker
from toolkit.data.worker_processes import LostSockets, started
def begin(worker):
    if sys.argv[1] == "lost before": shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    _begin_worker(worker)
    if sys.argv[1] == "lost after": shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
try:
    print(sum(map(int, started(DataLoader(torch.arange(8), num_workers=2, worker_init_fn=begin), "--dataloader-num-workers"))))
except (LostSockets, Refusal) as error:
    print(type(error).__name__, error)"""


@pytest.mark.parametrize(
    ("what", "characters", "said"),
    [
        ("long", 75, "28"),
        ("too long", 76, r"Refusal TMPDIR=/.*\b76\b"),
        ("lost before", 50, "LostSockets /"),
        ("lost after", 50, "LostSockets /"),
    ],
)
def test_workers_whose_sockets_cannot_be_opened_are_not_waited_for(what: str, characters: int, said: str) -> None:
    """TMPDIR's path is too long for sockets, or it is removed before a worker's first tensors. Fails when: open_socket is not
    called as a worker begins, or opens nothing; a TMPDIR that is short enough is refused."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        place = os.path.join(folder, "x" * (characters - len(folder) - 1))
        os.mkdir(place)
        environment = {**os.environ, "TMPDIR": place}
        command = [sys.executable, "-c", BEGINS, what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(said, done.stdout), done.stdout
