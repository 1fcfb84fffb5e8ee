"""Worker processes that can't be started, and those that one which dies leaves behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import popen_fork, synchronize
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from toolkit.config import Refusal
from toolkit.data.loading import loaders
from toolkit.data.worker_processes import started


def deaf(worker: int) -> None:
    loaders._outlive_a_stop(worker)


@pytest.mark.parametrize("what", ["processes", "threads", "shared memory"])
def test_workers_that_cannot_be_started_are_refused_and_none_is_left(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a limit of processes, or without /dev/shm. The workers of a run hear no SIGTERM, with which Python ends those that
    are left: it waited ten minutes for them. Fails when: started in worker_processes.py raises what torch does, or kills nobody."""
    rows = torch.arange(8)
    running = started(DataLoader(rows, num_workers=1), "--dataloader-num-workers")  # type: ignore[arg-type]
    before = set(multiprocessing.active_children())
    launch, calls = popen_fork.Popen._launch, []

    def second_fails(popen: Any, process: Any) -> None:
        calls.append(process)
        if len(calls) > 1:
            raise BlockingIOError(11, "Resource temporarily unavailable") if what == "processes" else RuntimeError("can't start new thread")
        launch(popen, process)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    if what == "shared memory":
        monkeypatch.setattr(synchronize.SemLock, "__init__", fails)
    else:
        monkeypatch.setattr(popen_fork.Popen, "_launch", second_fails)
    with pytest.raises(Refusal, match=r"--dataloader-num-workers 2: .*(unavailable|new thread|Read-only)") as refused:
        started(DataLoader(rows, num_workers=2, worker_init_fn=deaf), "--dataloader-num-workers")  # type: ignore[arg-type]
    left = set(multiprocessing.active_children())
    for process in left - before:
        process.kill()  # else this Python waits for it, too
    assert left == before
    assert refused.value.__cause__  # held so far, as by a process that ends: without it torch's pipes are closed, and so are its workers
    assert [int(row) for row in running] == list(range(8))


LOSES_ONE = """import multiprocessing, os, signal, torch
from torch.utils.data import DataLoader
from toolkit.data.loading.loaders import _outlive_a_stop
from toolkit.data.worker_processes import started
rows = started(DataLoader(torch.arange(10**6), num_workers=2, worker_init_fn=_outlive_a_stop), "--dataloader-num-workers")
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
    assert process.returncode == 1
    assert "DataLoader worker" in printed
