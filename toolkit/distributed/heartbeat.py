"""Which rank has fallen silent: every rank sends the others once a second that it lives and how far it is.

A collective that waits for a dead or stuck rank says only that it waited. Here each rank publishes three numbers in the store
that torch.distributed has anyway: a count that a thread drives, which stops when the process does, the training's step, and
how many collectives it has entered, in which a rank that lives but hangs falls behind those that wait for it. That begins with
the accelerator: a rank that is lost before its run is named too. Nobody is ended for it, as preparing data may take long.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.system.console import first_line

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed import Store

EXIT_HUNG = 1
_PATIENCE = 2.0  # times the timeout, with a rank that lives and others wait for in a step
_PREPARING = -1  # the step of a rank whose run has not begun
_FAREWELL, _FAILED = -1, -2  # the counts of a rank that has closed its heartbeat and owes no further sign; it failed, or not
_OF_COLLECTIVES = ("gloo", "nccl", "connection closed by peer", "connection reset", "watchdog", "socket", "collective")


class RankLost(Exception):
    """Another rank is gone; the message names it, the step and the newest checkpoint."""

    exit_code = EXIT_HUNG
    on_every_rank = True  # it may be the only one that knows


@dataclass
class _Seen:
    """What is known of another rank, and for how many seconds it has been silent in each way."""

    count: int = 0
    step: int = _PREPARING
    entered: int = 0
    unchanged: float = 0.0
    behind: float = 0.0
    reported: bool = False


class Heartbeat:
    """Publishes this rank's life and step, and reports once, by `on_silence(sentence, ends)`, each other rank that

    - has not published for longer than `timeout` seconds: its process is dead or stopped;
    - has stayed at its step for that long while some rank was ahead: its training hangs;
    - has entered no collective for twice as long while some rank waits in a later one: it hangs inside its step. Not rank 0,
      which writes and uploads while the others wait; where it hangs, their collective ends in an error one day (`lagging`).

    Ranks that are slow together (an evaluation, a save) are behind nobody. A rank counts from its first sign on, and until
    it closes; time in which this process itself stood still does not count. `on_silence` runs in a thread; `ends` is false
    while this rank or the other has not begun its run (`beat`), where one may lawfully work alone for an hour.

    Args:
        rank: of this process.
        world_size: the number of ranks.
        store: a torch.distributed store that all ranks share, such as a PrefixStore over the default one.
        timeout: seconds; longer than one rank may well work alone, writing a checkpoint for instance.
        on_silence: called with a message such as "rank 1 has been silent since step 41 (32 s)", and whether the run is to end.
        entered: the number of collectives that this process has entered so far; called in a thread.
    """

    def __init__(
        self, rank: int, world_size: int, store: Store, timeout: float, on_silence: Callable[[str, bool], None],
        entered: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        self.rank, self.timeout, self.on_silence, self._count_entered = rank, timeout, on_silence, entered
        self.interval = min(1.0, timeout / 10)
        # A connection of our own: the main thread may hold the shared one in a long wait.
        self._store, self._closing = store.clone(), threading.Event()  # type: ignore[attr-defined]
        self._step, self._entered, self._farewell = _PREPARING, 0, 0
        self.how_to_continue: Callable[[], str] = str
        self._others = {other: _Seen() for other in range(world_size) if other != rank}
        self._store_answered, self._store_reported, self._store_has_gone = time.monotonic(), False, False
        # Two threads: an operation on a store whose process is stopped never returns, and that must be reported too.
        exchange, watch = functools.partial(self._exchange, store), self._watch
        self._threads = [threading.Thread(target=each, daemon=True) for each in (exchange, watch)]
        for thread in self._threads:
            thread.start()

    @property
    def is_closed(self) -> bool:
        return self._farewell != 0

    def begin_run(self, how_to_continue: Callable[[], str]) -> None:
        """The run begins: from now on a silent rank ends it. `how_to_continue`: the newest checkpoint, and what to type."""
        self.how_to_continue = how_to_continue
        self.beat(0)

    def beat(self, step: int) -> None:
        """Note that the training has come to this step; costs nothing. Call it as each step begins."""
        self._step = step

    def missing(self, seconds: float = 3.0) -> list[int]:
        """The ranks that send no heartbeat for this many seconds from now on; not those that have said farewell."""
        time.sleep(2 * self.interval)  # a last sign may still be on its way
        before = {other: seen.count for other, seen in self._others.items()}
        time.sleep(seconds)
        if self._store_has_gone and not _store_is_in_launcher() and 0 in self._others and self._others[0].count > _FAREWELL:
            return [0]  # which held the store: without it no rank hears of any other
        ended = self._closing.is_set()  # with the store: nothing is known of the others any more
        return [rank for rank, seen in self._others.items() if seen.count == before[rank] > _FAREWELL and not ended]

    def lagging(self) -> list[int]:
        """The ranks that live, and have not come to the step and the collective at which another one is."""
        foremost = self._foremost()
        return [
            rank for rank, seen in self._others.items() if seen.count > _FAREWELL and (seen.step, seen.entered) < foremost
        ]

    def who_is_lost(self) -> str:
        """Where a collective has failed: the ranks that are gone or late; empty where they have left in order."""
        missing = self.missing()
        if failed := self.failed_ranks():
            return f"rank {_listed(failed)} has ended with an error or a refusal of its own"
        if missing:
            return f"rank {_listed(missing)} gives no sign of life"
        if any(seen.count == _FAREWELL for seen in self._others.values()):
            return ""
        lagging = self.lagging()
        return f"rank {_listed(lagging)} is late and may hang" if lagging else "another rank has ended"

    def failed_ranks(self) -> list[int]:
        """The ranks that have closed as failed."""
        own = [self.rank] if self._farewell == _FAILED else []
        return own + [rank for rank, seen in self._others.items() if seen.count == _FAILED]

    def close(self, failed: bool = False) -> None:
        """Say farewell, so that nobody takes the end for silence, and end the threads; not held up by a store that is gone.

        Rank 0, whose process may hold the store, and one that failed wait until the others have said theirs or could read it.
        """
        if not self.is_closed:
            self._farewell = _FAILED if failed else _FAREWELL
            self._closing.set()
        for thread in self._threads:
            thread.join(3 * self.interval + 1.0)

    def _exchange(self, held: Store) -> None:
        """Publish and read, once an interval, until closed; the shared store is held that long, by rank 0 for all."""
        count = 0
        while not self._closing.is_set():
            count += 1
            if not self._publish(count):
                self._store_has_gone = True
                return  # for good: torch prints a page for each attempt to reach a store that has gone
            if 0 in self._others and self._others[0].count < 0 and not _store_is_in_launcher():
                self._closing.set()  # the store ends with rank 0
                return
            self._closing.wait(self.interval)
        waits = self.rank == 0 or self._farewell == _FAILED
        for _ in range(9):
            if not self._publish(self._farewell) or not waits or all(seen.count < 0 for seen in self._others.values()):
                break
            time.sleep(self.interval / 4)
        if self.rank == 0 and self._farewell == _FAILED:
            time.sleep(self.interval / 2)  # one that waits as well reads once more

    def _publish(self, count: int) -> bool:
        """This rank's numbers written and the others' read; false where the store does not answer, and will not any more."""
        try:
            self._entered = self._count_entered()
        except ValueError:  # the process group was destroyed, as accelerator.end_training does
            self._farewell = self._farewell or _FAREWELL
            self._closing.set()
        try:
            self._store.set(str(self.rank), f"{count} {self._step} {self._entered}")
            self._read_others()
        except RuntimeError:  # as torch's DistStoreError and DistNetworkError are: its process has gone
            return False
        self._store_answered = time.monotonic()
        return True

    def _read_others(self) -> None:
        for other, seen in self._others.items():
            if self._store.check([str(other)]):  # get alone would wait for a rank that has not published yet
                count, step, entered = (int(number) for number in self._store.get(str(other)).split())
                if count != seen.count:
                    seen.count, seen.unchanged = count, 0.0
                if (step, entered) != (seen.step, seen.entered):
                    seen.step, seen.entered, seen.behind, seen.reported = step, entered, 0.0, False

    def _watch(self) -> None:
        """Add up silence, an interval at a time: after this process was stopped itself, nobody else is late for that."""
        looked, unanswered, unjudged = time.monotonic(), 0.0, 0.0
        while not self._closing.wait(self.interval):
            now = time.monotonic()
            passed, before, looked = min(now - looked, 2 * self.interval), looked, now
            unanswered = 0.0 if self._store_answered >= before else unanswered + passed
            if unanswered > self.timeout and not self._store_reported:
                self._store_reported = True
                in_launcher = _store_is_in_launcher()
                step = self._step if in_launcher or 0 not in self._others else self._others[0].step
                self._report("the launcher" if in_launcher else "rank 0", step, unanswered)
            unjudged = min(unjudged + passed, 3 * self.interval)
            if unanswered == 0.0:
                self._judge(unjudged)
                unjudged = 0.0

    def _foremost(self) -> tuple[int, int]:
        """The step and the collective of the rank that is farthest."""
        return max([(self._step, self._entered), *((seen.step, seen.entered) for seen in self._others.values())])

    def _judge(self, passed: float) -> None:
        foremost = self._foremost()
        for other, seen in self._others.items():
            if seen.count <= 0 or seen.reported:
                continue
            seen.unchanged += passed
            late_for_step = _PREPARING < seen.step < foremost[0]
            is_behind = late_for_step or (other != 0 and (seen.step, seen.entered) < foremost)
            seen.behind = seen.behind + passed if is_behind else 0.0
            patience = self.timeout if late_for_step else _PATIENCE * self.timeout
            if seen.unchanged > self.timeout or seen.behind > patience:
                seen.reported = True
                self._report(f"rank {other}", seen.step, max(seen.unchanged, seen.behind))

    def _report(self, who: str, step: int, seconds: float) -> None:
        if self._step > 0:  # no step is taken without all ranks, whatever was read of the other last
            step = max(step, 0)
        where = f"since step {step}" if step > _PREPARING else "before its first step"
        self.on_silence(f"{who} has been silent {where} ({seconds:.0f} s)", _PREPARING not in (step, self._step))


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _store_is_in_launcher() -> bool:
    """Where torchrun runs, the store is in its agent; else in rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


_of_this_process: list[Heartbeat] = []  # the last one that was started


def start_heartbeat(accelerator: Accelerator, timeout: float) -> Heartbeat | None:
    """Begin this rank's heartbeat; None for a single process. It lasts until it's closed, another begins, or the process ends.

    A rank that falls silent in its run ends this process, with one message for all; one that does before is named.
    """
    if accelerator.num_processes == 1:
        return None
    from torch.distributed import PrefixStore

    from toolkit.distributed.compat import collectives_entered, default_store

    rank = accelerator.process_index

    def tell(sentence: str, ends: bool) -> None:
        if rank == (1 if sentence.startswith("rank 0 ") else 0):
            what = f"it hangs or is gone, and this run ends. {heartbeat.how_to_continue()}" if ends else (
                "it works alone, hangs or is gone. The other ranks wait for it."
            )  # fmt: skip
            os.write(2, f"{sentence}: {what}\n".encode())
        if ends:
            os._exit(EXIT_HUNG)  # the main thread waits inside a collective, which no exception leaves

    for earlier in _of_this_process:
        earlier.close()
    store = PrefixStore("toolkit-heartbeat", default_store())
    heartbeat = Heartbeat(rank, accelerator.num_processes, store, timeout, tell, collectives_entered)
    _of_this_process[:] = [heartbeat]
    atexit.register(heartbeat.close)  # a thread that comes back from the store while Python ends would abort the process
    return heartbeat


def heartbeat_of_process() -> Heartbeat | None:
    """The heartbeat of this rank, perhaps a closed one; None in a single process."""
    return _of_this_process[0] if _of_this_process else None


def failed_alone() -> bool:
    """Close the heartbeat as that of a rank that failed; whether the first rank of its machine has not failed as well."""
    if (heartbeat := heartbeat_of_process()) is None:
        return False
    heartbeat.close(failed=True)
    failed, first = heartbeat.failed_ranks(), heartbeat.rank - int(os.environ.get("LOCAL_RANK", "0"))
    return heartbeat.rank in failed and first not in failed


def is_of_collective(error: BaseException) -> bool:
    """Whether a collective has failed, as it does when another rank is gone."""
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OF_COLLECTIVES)


def explained_by_ranks(error: BaseException) -> BaseException:
    """A `RankLost` that names who is gone, where a collective has failed outside of a run; else the error itself."""
    heartbeat = heartbeat_of_process()
    if heartbeat is None or heartbeat.is_closed or not is_of_collective(error):
        return error
    return RankLost(f"{heartbeat.who_is_lost() or 'another rank has ended'}: a collective failed ({first_line(error)})")
