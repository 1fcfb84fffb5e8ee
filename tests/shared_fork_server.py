"""One fork server for all pytest-xdist workers: its imports take 13 seconds of CPU and half a gigabyte, once and not for each worker.

The first worker that needs it starts it and writes down where it is. The server ends when the last write end of a pipe is closed;
each worker has one, opened through /proc of the worker that started it, so the workers may end in any order.
"""

import contextlib
import json
import os
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from filelock import FileLock


def use_shared_server(note: Path, start: Callable[[], None]) -> None:
    """Let this process fork from the server that is described in the file `note`; `start` starts one where none is yet."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    with FileLock(f"{note}.lock"):
        if note.exists():
            known = json.loads(note.read_text())
            with contextlib.suppress(OSError):  # the worker that started it has crashed
                server._forkserver_alive_fd = os.open(f"/proc/{known['pid']}/fd/{known['pipe']}", os.O_WRONLY)
                server._forkserver_address = known["address"]
                server._forkserver_authkey = bytes.fromhex(known["key"])
                server.ensure_running = resource_tracker.ensure_running  # it is no child of this process, which would start another
                return
        start()
        key = getattr(server, "_forkserver_authkey", b"")  # since Python 3.14
        known = {"pid": os.getpid(), "pipe": server._forkserver_alive_fd, "address": server._forkserver_address, "key": key.hex()}
        note.write_text(json.dumps(known))
