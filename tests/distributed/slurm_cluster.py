"""A Slurm of two nodes on this machine: the real daemons, on free ports, in a folder of their own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
CONFIG = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MailProg=/bin/true
JobRequeue=1
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=1
KillWait=15
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores}
PartitionName=all Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no such cluster here; empty where there can."""
    absent = [name for name in DAEMONS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "its daemons want to be root"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def cluster(root: Path) -> Iterator[dict[str, str]]:
    """The variables by which sbatch and others find it. `root`: short (a socket's path), and only root can write above it."""
    host = socket.gethostname().split(".")[0]
    (root / "slurm.conf").write_text(CONFIG.format(host=host, ports=_free_ports(3), root=root, cores=os.cpu_count()))
    for name in ("state", "spool-n0", "spool-n1"):
        (root / name).mkdir()
    (root / "munge.key").write_bytes(os.urandom(128))
    (root / "munge.key").chmod(0o400)
    environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
    munge = [f"--{name}-file={root}/munged.{name}" for name in ("pid", "log", "seed")]
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={root}/munge.key", f"--socket={root}/munge.socket", *munge],
        ["slurmctld", "-D", "-f", f"{root}/slurm.conf"],
        *(["slurmd", "-D", "-N", node, "-f", f"{root}/slurm.conf"] for node in ("n0", "n1")),
    ]
    daemons = []
    with (root / "daemons.log").open("wb") as log:
        try:
            for command in commands:
                daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
                time.sleep(0.3)
            wait_for(lambda: "idle" in run(["sinfo", "--noheader", "--states=idle", "--Node"], environment), 30)
            yield environment
        finally:
            run(["scancel", "--signal=KILL", "--full", "--user=root"], environment)
            for daemon in reversed(daemons):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(daemon.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(5)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()
            for left in psutil.process_iter():  # slurmd's steps are in sessions of their own
                with contextlib.suppress(psutil.Error):
                    if left.pid != os.getpid() and str(root) in f"{left.cmdline()} {left.environ().get('SLURM_CONF')}":
                        left.kill()


def run(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False).stdout


def wait_for(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.1)
