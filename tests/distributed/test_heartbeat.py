"""The heartbeat: a silent rank is named once, ranks that are slow together never.

Time is short here (a timeout of one second). Stopped ranks are processes of their own, the rest are threads that share
a store. Each test names the one-line change under which it fails.
"""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from toolkit.distributed.heartbeat import Heartbeat

pytestmark = pytest.mark.warm

ROOT = Path(__file__).resolve().parents[2]
# Two ranks as two processes, both at step 41, that write down what they hear. Rank 0 holds the store.
RANKS = """
import os, pathlib, sys, time
from datetime import timedelta
from torch.distributed import PrefixStore, TCPStore
from toolkit.distributed.heartbeat import Heartbeat
here = pathlib.Path(sys.argv[1])
rank = 0 if os.fork() else 1
port = here / "port"
while rank == 1 and not port.exists():
    time.sleep(0.02)
number = int(port.read_text()) if rank == 1 else 0
store = TCPStore("127.0.0.1", number, is_master=rank == 0, timeout=timedelta(seconds=30), wait_for_workers=False)
if rank == 0:
    (here / "port.new").write_text(str(store.port))
    os.rename(here / "port.new", port)
def heard(sentence, ends):
    with open(here / f"heard.{rank}", "a") as file:
        file.write(sentence + "\\n")
heartbeat = Heartbeat(rank, 2, PrefixStore("heartbeat", store), 1.0, heard)
heartbeat.beat(41)
(here / f"pid.{rank}").write_text(str(os.getpid()))
while not (here / "end").exists():
    time.sleep(0.02)
heartbeat.close()
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) if rank == 0 else 0)
"""


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@pytest.fixture
def both(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process of rank 0, which ends with rank 1's code if that is a bad one; their process ids are in files."""
    process = subprocess.Popen([sys.executable, "-c", RANKS, str(tmp_path)], cwd=ROOT, start_new_session=True)
    try:
        until(lambda: all((tmp_path / f"pid.{rank}").exists() for rank in (0, 1)), 60)
        time.sleep(0.5)  # each has read the other's first sign
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


@pytest.fixture
def open_ranks() -> Iterator[Callable[..., tuple[list[Heartbeat], list[list[str]]]]]:
    """So many ranks as threads of this process, and what each of them hears."""
    opened: list[Heartbeat] = []

    def open_some(number: int, timeout: float = 1.0, entered: Sequence[Iterator[int]] = ()) -> tuple[list[Heartbeat], list[list[str]]]:
        store, heard = dist.PrefixStore("heartbeat", dist.HashStore()), [[] for _ in range(number)]
        counts = [each.__next__ for each in entered or [itertools.repeat(0)] * number]
        opened.extend(Heartbeat(rank, number, store, timeout, lambda sentence, _, mine=heard[rank]: mine.append(sentence), counts[rank]) for rank in range(number))
        return opened, heard

    yield open_some
    for heartbeat in opened:
        heartbeat.close()


def test_a_stopped_process_is_named_with_its_step_even_if_it_holds_the_store(both, tmp_path: Path) -> None:
    """Fails when: an operation on the store of a stopped process keeps the only thread there is, or the count isn't watched."""
    for stopped in (1, 0):
        pid = int((tmp_path / f"pid.{stopped}").read_text())
        os.kill(pid, signal.SIGSTOP)
        heard = tmp_path / f"heard.{1 - stopped}"
        until(lambda heard=heard: heard.exists() and heard.read_text().endswith("\n"), 10)
        os.kill(pid, signal.SIGCONT)
        time.sleep(1.5)  # it has slept through everything, and must not blame the other for it
        assert stopped == 0 or not (tmp_path / "heard.1").exists()
    (tmp_path / "end").write_text("")
    assert both.wait(15) == 0
    for stopped in (1, 0):
        said = (tmp_path / f"heard.{1 - stopped}").read_text()
        assert re.fullmatch(rf"rank {stopped} .*step 41 \([12] s\)\n", said)


def test_a_rank_whose_step_stands_still_while_others_went_on_is_named_once_by_each(open_ranks) -> None:
    """Fails when: only the thread's life is watched, since the thread of a hanging rank lives; or it is said again and again."""
    heartbeats, heard = open_ranks(3)
    for step in (1, 2, 3):
        for rank, heartbeat in enumerate(heartbeats):
            if rank != 1 or step < 3:
                heartbeat.beat(step)
        time.sleep(0.15)
    until(lambda: bool(heard[0] and heard[2]), 5)
    time.sleep(1.2)
    (line,) = heard[0]
    assert re.match(r"rank 1 .*step 2 \(1 s\)", line)
    assert heard[1:] == [[], [line]]


def test_ranks_that_are_slow_together_are_not_reported(open_ranks) -> None:
    """A long evaluation. Fails when: a step that does not move is enough, with nobody ahead."""
    heartbeats, heard = open_ranks(2)
    for heartbeat in heartbeats:
        heartbeat.beat(7)
    time.sleep(1.6)
    assert heard == [[], []]


def test_a_rank_that_is_late_at_every_step_but_moves_is_not_reported(open_ranks) -> None:
    """Fails when: being behind is counted through the steps that are made meanwhile."""
    heartbeats, heard = open_ranks(2)
    for step in range(1, 9):
        heartbeats[0].beat(step + 1)
        heartbeats[1].beat(step)
        time.sleep(0.25)
    assert heard == [[], []]


def test_a_rank_that_others_wait_for_in_a_collective_is_named_later_unless_it_is_the_main_one(open_ranks) -> None:
    """The main process writes while the others wait. Fails when: collectives are not compared, rank 0 is held to them, or it is as
    soon as with a rank that is steps behind."""
    for late in (1, 0):
        at = [itertools.repeat(7), itertools.repeat(7)]
        at[late] = itertools.repeat(6)
        heartbeats, heard = open_ranks(2, entered=at)
        time.sleep(1.5)
        assert heard[-2:] == [[], []]
        until(lambda heard=heard, late=late: bool(heard[1 - late]) or late == 0, 5)
        time.sleep(1.5)
        assert [len(lines) for lines in heard] == [late, 0]
        assert all(re.match(r"rank 1 .*first step \(2 s\)", line) for line in heard[0])
        assert [each.lagging() for each in heartbeats[-2:]] == [[late] if rank != late else [] for rank in range(2)]


def test_a_rank_that_enters_collectives_late_but_enters_them_is_not_reported(open_ranks) -> None:
    """Fails when: being behind is counted through collectives that are entered meanwhile."""
    _, heard = open_ranks(2, entered=[itertools.count(5), itertools.count(3)])
    time.sleep(3.0)
    assert heard == [[], []]


def test_a_rank_that_has_closed_is_not_missed(open_ranks) -> None:
    """Fails when: closing leaves no farewell in the store."""
    heartbeats, heard = open_ranks(2)
    time.sleep(0.2)
    heartbeats[1].close()
    heartbeats[0].beat(5)
    time.sleep(1.6)
    assert heard == [[], []]


def test_a_rank_that_has_not_begun_is_waited_for() -> None:
    """Loading takes its time. Fails when: get is called before the key is there, so that nothing is published any more."""
    store, heard = dist.PrefixStore("heartbeat", dist.HashStore()), []
    first = Heartbeat(0, 2, store, 1.0, lambda sentence, _: heard.append(sentence))
    first.beat(3)
    time.sleep(1.3)
    published = [store.get("0")]
    time.sleep(0.3)
    published.append(store.get("0"))
    first.close()
    assert published[0] != published[1]
    assert heard == []


def test_a_rank_that_falls_silent_ends_the_run_only_where_it_and_this_one_have_begun_it() -> None:
    """One that was last heard of before its run has begun it too where this one has taken a step with it.

    Fails when: `_report` looks at the step of one of them alone, or at none.
    """
    for step, own, ends in ((-1, None, False), (-1, 0, False), (0, None, False), (0, 0, True), (-1, 2, True)):
        store, heard = dist.PrefixStore("heartbeat", dist.HashStore()), []
        store.set("1", f"1 {step} 0")
        waiting = Heartbeat(0, 2, store, 0.3, lambda *said, heard=heard: heard.append(said))
        if own is not None:
            waiting.begin_run(str)
            waiting.beat(own)
        until(lambda heard=heard: bool(heard), 5)
        store.set("1", "-1 0 0")
        waiting.close()
        assert [each[1] for each in heard] == [ends]
        assert heard[0][0].startswith("rank 1 ")


def test_a_rank_that_failed_is_told_from_one_that_ended_in_order() -> None:
    """Fails when: `close` says one farewell for both, or `who_is_lost` leaves out those that failed."""
    for failed in (False, True):
        store = dist.PrefixStore("heartbeat", dist.HashStore())
        first, second = (Heartbeat(rank, 2, store, 1.0, lambda *_: None) for rank in range(2))
        time.sleep(0.3)
        second.close(failed)
        time.sleep(0.3)
        assert (first.failed_ranks(), second.failed_ranks()) == (([1], [1]) if failed else ([], []))
        assert not failed or first.who_is_lost().startswith("rank 1 has ended")
        first.close()


def test_where_the_store_has_gone_with_rank_0_no_other_rank_is_named(open_ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where rank 0 is killed. Fails when: a rank whose signs can't be read counts as silent, or the launcher's store as rank 0's."""

    class Gone:
        def set(self, *_: object) -> None:
            raise dist.DistNetworkError("Broken pipe")

        check = get = set  # it may go in the middle of an exchange

    heartbeats, _ = open_ranks(3)
    time.sleep(0.3)
    for each in heartbeats:
        each._store = Gone()
    assert [each.missing(0.3) for each in heartbeats] == [[1, 2], [0], [0]]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert heartbeats[2].missing(0.3) == [0, 1]


def test_nothing_is_sent_to_a_store_that_ends_with_rank_0() -> None:
    """Torch prints a page for each attempt. Fails when: `_exchange` goes on after rank 0's farewell, or takes its end for silence."""
    store, heard = dist.PrefixStore("heartbeat", dist.HashStore()), []
    first, second = (Heartbeat(rank, 2, store, 0.5, lambda sentence, _: heard.append(sentence)) for rank in range(2))
    time.sleep(0.2)
    first.close()
    time.sleep(0.2)
    last = store.get("1")
    time.sleep(1.0)
    assert store.get("1") == last
    assert heard == []
    second.close()


def test_closing_joins_both_threads(open_ranks) -> None:
    """Fails when: a thread outlives the run and uses a store that is being destroyed."""
    heartbeats, _ = open_ranks(2)
    for heartbeat in heartbeats:
        heartbeat.close()
    assert not any(thread.is_alive() for heartbeat in heartbeats for thread in heartbeat._threads)
