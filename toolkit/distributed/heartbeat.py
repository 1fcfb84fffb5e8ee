"""Which rank has fallen silent: every rank sends the others once a second that it lives and how far it is.

A collective that waits for a dead or stuck rank says only that it waited. Here each rank publishes three numbers in the store
that torch.distributed has anyway: a count that a thread drives, which stops when the process does, the training's step, and
how many collectives it has entered, in which a rank that lives but hangs falls behind those that wait for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed import Store

EXIT_HUNG = 1
_PATIENCE = 2.0  # times the timeout, with a rank that lives and others wait for in a step
_FAREWELL = -1  # the count of a rank that has closed its heartbeat and owes no further sign


class RankLost(Exception):
    """Another rank is gone; the message names it, the step and the newest checkpoint."""

    exit_code = EXIT_HUNG
    on_every_rank = True  # it may be the only one that knows


@dataclass
class _Seen:
    """What is known of another rank, and for how many seconds it has been silent in each way."""

    count: int = 0
    step: int = 0
    entered: int = 0
    unchanged: float = 0.0
    behind: float = 0.0
    reported: bool = False


class Heartbeat:
    """Publishes this rank's life and step, and reports once, by `on_silence(sentence)`, each other rank that

    - has not published for longer than `timeout` seconds: its process is dead or stopped;
    - has stayed at its step for that long while some rank was ahead: its training hangs;
    - has entered no collective for twice as long while some rank waits in a later one: it hangs inside its step. Not rank 0,
      which writes and uploads while the others wait; where it hangs, their collective ends in an error one day (`lagging`).

    Ranks that are slow together (an evaluation, a save) are behind nobody. A rank counts from its first sign on, and until
    it closes; time in which this process itself stood still does not count. `on_silence` runs in a thread.

    Args:
        rank: of this process.
        world_size: the number of ranks.
        store: a torch.distributed store that all ranks share, such as a PrefixStore over the default one.
        timeout: seconds; longer than one rank may well work alone, writing a checkpoint for instance.
        on_silence: called with a message such as "rank 1 has been silent since step 41 (32 s)".
        entered: the number of collectives that this process has entered so far; called in a thread.
    """

    def __init__(
        self, rank: int, world_size: int, store: Store, timeout: float, on_silence: Callable[[str], None],
        entered: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        self.rank, self.timeout, self.on_silence, self._count_entered = rank, timeout, on_silence, entered
        self.interval = min(1.0, timeout / 10)
        # A connection of our own: the main thread may hold the shared one in a long wait.
        self._store, self._closing = store.clone(), threading.Event()  # type: ignore[attr-defined]
        self._step = self._entered = 0
        self._others = {other: _Seen() for other in range(world_size) if other != rank}
        self._store_answered, self._store_reported = time.monotonic(), False
        # Two threads: an operation on a store whose process is stopped never returns, and that must be reported too.
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._exchange, self._watch)]
        for thread in self._threads:
            thread.start()

    def beat(self, step: int) -> None:
        """Note that the training has come to this step; costs nothing. Call it as each step begins."""
        self._step = step

    def missing(self, seconds: float = 3.0) -> list[int]:
        """The ranks that send no heartbeat for this many seconds from now on; not those that have ended in order."""
        time.sleep(2 * self.interval)  # a last sign may still be on its way
        before = {other: seen.count for other, seen in self._others.items()}
        time.sleep(seconds)
        return [rank for rank, seen in self._others.items() if seen.count == before[rank] != _FAREWELL]

    def lagging(self) -> list[int]:
        """The ranks that live, and have not come to the step and the collective at which another one is."""
        foremost = self._foremost()
        return [
            rank for rank, seen in self._others.items() if seen.count != _FAREWELL and (seen.step, seen.entered) < foremost
        ]

    def departed(self) -> bool:
        """Whether another rank has said farewell."""
        return any(seen.count == _FAREWELL for seen in self._others.values())

    def close(self) -> None:
        """Say farewell, so that nobody takes the end for silence, and end the threads; not held up by a store that is gone."""
        self._closing.set()
        for thread in self._threads:
            thread.join(2 * self.interval + 1.0)

    def _exchange(self) -> None:
        """Publish and read, once an interval, until closed."""
        count = 0
        while True:
            closing = self._closing.is_set()
            count = _FAREWELL if closing else count + 1
            # RuntimeError: the store's process has gone; torch's DistStoreError and DistNetworkError are of that kind
            with contextlib.suppress(RuntimeError):
                self._entered = self._count_entered()
                self._store.set(str(self.rank), f"{count} {self._step} {self._entered}")
                self._read_others()
                self._store_answered = time.monotonic()
            if closing:
                return
            self._closing.wait(self.interval)

    def _read_others(self) -> None:
        for other, seen in self._others.items():
            if self._store.check([str(other)]):  # get alone would wait for a rank that has not published yet
                count, step, entered = (int(number) for number in self._store.get(str(other)).split())
                if count != seen.count:
                    seen.count, seen.unchanged = count, 0.0
                if (step, entered) != (seen.step, seen.entered):
                    seen.step, seen.entered, seen.behind = step, entered, 0.0

    def _watch(self) -> None:
        """Add up silence, an interval at a time: after this process was stopped itself, nobody else is late for that."""
        looked, unanswered, unjudged = time.monotonic(), 0.0, 0.0
        while not self._closing.wait(self.interval):
            now = time.monotonic()
            passed, before, looked = min(now - looked, 2 * self.interval), looked, now
            unanswered = 0.0 if self._store_answered >= before else unanswered + passed
            if unanswered > self.timeout and not self._store_reported:
                self._store_reported = True
                # Where torchrun runs, the store is in its agent; else in rank 0.
                in_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
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
            if seen.count in (0, _FAREWELL) or seen.reported:
                continue
            seen.unchanged += passed
            is_behind = (seen.step, seen.entered if other else foremost[1]) < foremost
            seen.behind = seen.behind + passed if is_behind else 0.0
            patience = self.timeout if seen.step < foremost[0] else _PATIENCE * self.timeout
            if seen.unchanged > self.timeout or seen.behind > patience:
                seen.reported = True
                self._report(f"rank {other}", seen.step, max(seen.unchanged, seen.behind))

    def _report(self, who: str, step: int, seconds: float) -> None:
        self.on_silence(f"{who} has been silent since step {step} ({seconds:.0f} s)")


def start_heartbeat(accelerator: Accelerator, timeout: float, newest_checkpoint: Callable[[], str]) -> Heartbeat | None:
    """The heartbeat of this rank, None for a single process. A silent rank ends this process, with one message for all."""
    if accelerator.num_processes == 1:
        return None
    from torch.distributed import PrefixStore

    from toolkit.distributed.compat import collectives_entered, default_store

    rank = accelerator.process_index

    def end(sentence: str) -> None:
        speaker = 1 if sentence.startswith("rank 0 ") else 0
        if rank == speaker:
            message = f"{sentence}: it hangs or is gone, and this run ends. {newest_checkpoint()}\n"
            os.write(2, message.encode())
        os._exit(EXIT_HUNG)  # the main thread waits inside a collective, which no exception leaves

    store = PrefixStore("toolkit-heartbeat", default_store())
    return Heartbeat(rank, accelerator.num_processes, store, timeout, end, collectives_entered)
