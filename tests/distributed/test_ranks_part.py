"""Ranks that end: their group is destroyed in time, whatever Gloo's threads still have in hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.system.network import free_port

RANK = """
import faulthandler, os, sys, time
import torch
from types import SimpleNamespace
from toolkit.distributed.compat import import_before_the_default_group
from toolkit.distributed.ranks import close_process_group

faulthandler.dump_traceback_later(60, exit=True)
import_before_the_default_group()
torch.distributed.init_process_group("gloo")
accelerator = SimpleNamespace(end_training=torch.distributed.destroy_process_group)

def gloo_threads():
    threads = os.listdir("/proc/self/task")
    return sum("gloo_runloop" in open(f"/proc/self/task/{thread}/comm").read() for thread in threads)

def train():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert gloo_threads() > 0
    if os.environ["RANK"] == "1":
        time.sleep(0.5)  # so that the collectives of rank 0 are still under way when it leaves
    sys.setswitchinterval(1000)  # this thread gives Python's lock away where it is made to, and nowhere else
    tensors = [torch.ones(100_000) for _ in range(50)]
    for tensor in tensors:
        torch.distributed.broadcast(tensor, 0, async_op=True)
    close_process_group(accelerator, model)

train()
sys.setswitchinterval(0.005)
print("threads left:", gloo_threads())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_group_is_destroyed_while_its_threads_still_drop_tensors(tmp_path: Path) -> None:
    """Fails when: DDP's reducer is the last to hold the group (both ranks hang), or an import keeps it alive."""
    (tmp_path / "rank.py").write_text(RANK)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "rank.py")], env={**os.environ, **place, "RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            said = rank.communicate(timeout=120)[0]
            assert (rank.returncode, said.splitlines()[-1]) == (0, "threads left: 0"), said
    finally:
        for rank in ranks:
            rank.kill()
