"""Start a program once for each rank of this machine, hand signals on to the ranks, make one exit code of theirs.

Our own launcher, since torchrun's agent (torchelastic, torch 2.13) turns every exit code into 1 and kills the ranks 30 s
after a signal, whatever they are still saving. `accelerate launch` (1.15) is built on it; with one process it dies of a
SIGTERM itself and leaves its child running.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, Any, Protocol

from toolkit.system.children import death_with_this_process
from toolkit.system.console import say
from toolkit.system.environment import usable_cores
from toolkit.system.network import free_port, interface_toward

REFUSED, TRY_AGAIN = 2, 75
MAIN_PORT = 29500  # where several nodes meet by default
TRAIN_OPTIONS = "TOOLKIT_TRAIN_OPTIONS"  # the variable with the options of `toolkit train`, for its ranks
POLL_SECONDS = 0.02
# After the first rank ended badly, in seconds: a rank may be writing a message or a checkpoint, or wait for the dead one.
PATIENCE = ((10.0, signal.SIGTERM), (15.0, signal.SIGKILL))
_FORWARDED = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "SIGUSR1": signal.SIGTERM}
_GROUPS_OF_ONE = {"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"}  # engines that need a process group in any case


@dataclass(frozen=True)
class Nodes:
    """The machines of a job: how many, which of them this is (from 0), and where machine 0 is reached.

    `main_port`: None takes a free one on a single machine, and 29500 on several, which must all have it.
    """

    count: int = 1
    this: int = 0
    main_address: str = "127.0.0.1"
    main_port: int | None = None


class Process(Protocol):
    """What is needed of a process that runs; subprocess.Popen has it."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


ONE_MACHINE = Nodes()
NOTHING_MORE: Mapping[str, str] = MappingProxyType({})


def launch(
    command: Sequence[str], processes: int = 1, nodes: Nodes = ONE_MACHINE, *, environment: Mapping[str, str] = NOTHING_MORE,
    log: IO[bytes] | None = None,
) -> int:  # fmt: skip
    """Run a command as several ranks, and return when all of them have ended and no process of theirs is left.

    While it runs, SIGTERM, SIGINT and SIGUSR1 (as SIGTERM) go on to every rank, the second one too; a third ends them with
    SIGKILL. When a rank ends badly the others have 10 s to end by themselves, then SIGTERM, and 5 s later SIGKILL.

    Args:
        command: the program and its arguments, such as [sys.executable, "recipes/sft.py"].
        processes: ranks on this machine, the same number on each.
        nodes: the machines, where there are several; each starts its own ranks.
        environment: variables that every rank has in addition to this process's, such as those of an Accelerate config file.
        log: takes what the ranks print, in place of this process's standard output and error.

    Returns:
        0 when all ranks ended with 0; 75 when some ended with 75 and all others with 0 (stopped after a durable checkpoint:
        try again); else the code of the rank that ended badly first, 128 + n for a signal n.
    """
    received: list[int] = []
    with signals_collected(received), started_ranks(command, processes, nodes, environment=environment, log=log) as ranks:
        return _wait_for(ranks, received)


@contextlib.contextmanager
def started_ranks(
    command: Sequence[str], processes: int = 1, nodes: Nodes = ONE_MACHINE, *, environment: Mapping[str, str] = NOTHING_MORE,
    log: IO[bytes] | None = None,
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:  # fmt: skip
    """The running ranks by name; those that still run when the block ends are killed. Arguments as for `launch`.

    Each has a session of its own, so that a terminal's Ctrl-C reaches this process alone, which decides what signals they get.
    """
    ranks: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for place in rank_environments(processes, nodes, alone=not _GROUPS_OF_ONE & environment.keys()):
            name = f"rank {place['RANK']}" if place else "the process"
            ranks[name] = subprocess.Popen(
                command, env={**os.environ, **environment, **place}, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=death_with_this_process(),
            )  # fmt: skip
        yield ranks
    finally:
        for rank in ranks.values():
            if rank.returncode is None:
                kill_group(rank)
        for rank in ranks.values():
            rank.wait()


def rank_environments(processes: int, nodes: Nodes = ONE_MACHINE, *, alone: bool = True) -> list[dict[str, str]]:
    """The variables by which torch.distributed identifies a rank, one dictionary a rank.

    Empty for the only process there is, unless it is not to be `alone`, but the one rank of a group.
    """
    if processes * nodes.count == 1 and alone:
        return [{}]
    shared: dict[str, object] = {
        "WORLD_SIZE": processes * nodes.count,
        "LOCAL_WORLD_SIZE": processes,
        "GROUP_RANK": nodes.this,
        "MASTER_ADDR": nodes.main_address,
        "MASTER_PORT": nodes.main_port or (free_port() if nodes.count == 1 else MAIN_PORT),
        # Every rank would otherwise start a thread for each core of the machine.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or threads_of_a_rank(processes),
    }
    if nodes.count > 1 and not os.environ.get("GLOO_SOCKET_IFNAME"):
        interface = interface_toward(nodes.main_address, nodes.main_port or MAIN_PORT)
        shared |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    ranks = [{"RANK": nodes.this * processes + local, "LOCAL_RANK": local, **shared} for local in range(processes)]
    return [{name: str(value) for name, value in rank.items()} for rank in ranks]


def threads_of_a_rank(processes: int) -> int:
    """A process's share of the cores of this machine."""
    return max(1, usable_cores() // processes)


def _wait_for(ranks: Mapping[str, Process], received: list[int]) -> int:
    running, forwarded = dict(ranks), 0
    codes: list[int] = []
    first_bad, failed_at, patience = None, 0.0, list(PATIENCE)
    while True:
        ended = {name: code for name, rank in running.items() if (code := end_of(rank)) is not None}
        codes += ended.values()
        running = {name: rank for name, rank in running.items() if name not in ended}
        bad = {name: code for name, code in ended.items() if code not in (0, TRY_AGAIN)}
        if bad and first_bad is None:
            # Of several in one glance a signal is the cause, and the others' codes its consequence.
            name = min(bad, key=lambda each: bad[each])
            first_bad, failed_at = bad[name], time.monotonic()
            _say_how_it_ended(name, first_bad)
        if not running:
            break
        for signal_number in received[forwarded:]:
            # What the second one does is the recipe's affair, but a rank that is stuck outside Python handles neither.
            _send(running, signal_number if forwarded < 2 else signal.SIGKILL)
            forwarded += 1
        if first_bad is not None and patience and time.monotonic() - failed_at >= patience[0][0]:
            seconds, ending = patience.pop(0)
            say(f"{', '.join(running)} still running {seconds:.0f} s later: {ending.name}", error=True)
            _send(running, ending)
        time.sleep(POLL_SECONDS)
    if first_bad is not None:
        return first_bad if first_bad > 0 else 128 - first_bad
    return TRY_AGAIN if TRY_AGAIN in codes else 0


def end_of(rank: Process) -> int | None:
    """A rank's code once it has ended, with all that it left behind, such as the data workers of a killed rank."""
    code = rank.poll()
    if code is not None:
        kill_group(rank)
    return code


def _send(ranks: Mapping[str, Process], number: int) -> None:
    """A signal for the ranks alone: their data workers would die of a SIGTERM, and take the rank with them."""
    for rank in ranks.values():
        if number == signal.SIGKILL:
            kill_group(rank)
        else:
            rank.send_signal(number)


def kill_group(rank: Process) -> None:
    """End a rank with all that it has started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: no permission for a group of zombies
            os.killpg(rank.pid, signal.SIGKILL)
    else:
        rank.kill()


@contextlib.contextmanager
def signals_collected(received: list[int]) -> Iterator[None]:
    """Note each signal that is to be forwarded. Not forwarded at once: some ranks may not be started yet."""
    before: dict[int, Any] = {}
    # ValueError: not the main thread; a notebook or a server owns the signals
    with contextlib.suppress(ValueError):
        for name, forwarded in _FORWARDED.items():
            number = getattr(signal, name, None)
            if number is not None:  # Windows has no SIGUSR1

                def note(_: int, __: Any, forwarded: int = forwarded) -> None:
                    received.append(forwarded)

                before[number] = signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_how_it_ended(name: str, code: int) -> None:
    """One line. A refusal has printed its own, and so has the only process there is unless a signal ended it."""
    known = {each.value: each.name for each in signal.Signals}
    if code < 0:
        say(f"{name} was ended by {known.get(-code, f'signal {-code}')}", error=True)
    elif code != REFUSED and name.startswith("rank"):
        say(f"{name} ended with code {code}", error=True)
