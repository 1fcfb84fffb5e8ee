"""A process that reward functions run in. `reward_processes` starts it, feeds it calls, and kills it when one hangs.

Messages are tuples. It gets ("load", source), ("call", source, call), for async functions ("calls", source, calls, timeout). It
answers ("loaded", problem) or ("done", place, outcome). When the process that started it is gone, it ends with all that its
functions have started.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from toolkit.config import Refusal
from toolkit.rollouts import users_code
from toolkit.rollouts.reward_calls import Call, RewardFunction, Source, carry_out, carry_out_async, load_function


def main(descriptor: int) -> None:
    users_code.IN_WORKER = True
    connection = Connection(descriptor)
    waiting: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, waiting), daemon=True).start()
    loaded: dict[Source, RewardFunction] = {}
    with asyncio.Runner() as runner:  # one loop for all calls: sessions and locks of a user's module belong to one
        while True:
            kind, source, *rest = waiting.get()
            if kind == "load":
                problem = None
                try:
                    loaded[source] = load_function(source)
                except Refusal as refusal:
                    problem = str(refusal)
                connection.send(("loaded", problem))
            elif kind == "call":
                connection.send(("done", 0, carry_out(loaded[source], rest[0])))
            else:
                runner.run(_all(connection, loaded[source], *rest))


async def _all(connection: Connection, function: RewardFunction, calls: list[Call], timeout: float) -> None:
    async def one(place: int) -> None:
        outcome = await carry_out_async(function, calls[place], timeout)
        connection.send(("done", place, outcome))

    await asyncio.gather(*(one(place) for place in range(len(calls))))


def _receive(connection: Connection, waiting: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    """In a thread, so that the end of the other process is seen while a function runs."""
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)
        waiting.put(message)


if __name__ == "__main__":
    main(int(sys.argv[1]))
