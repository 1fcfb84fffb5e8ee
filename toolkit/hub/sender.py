"""The process that uploads a run's queue while the run trains: `python -m toolkit.hub.sender QUEUE PROCESS`.

A process of its own, so that a connection that hangs holds up neither the training nor its end. It ends with the process
that started it; what it had not finished then is in the queue.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from toolkit.hub.client import hub_api
from toolkit.hub.commit import CannotSend, send_job
from toolkit.hub.queue import list_jobs, only_sender
from toolkit.system.console import say

_POLL_SECONDS = 0.2


def start_sender(queue: Path) -> subprocess.Popen[bytes]:
    """Begin to upload what is in the queue, and what is going to be."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "toolkit.hub.sender", str(queue.absolute()), str(os.getpid())],
        stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # Ctrl-C is for the run
    )  # fmt: skip


def serve(queue: Path) -> None:
    """Upload commit by commit, in order, until one is refused: a later one must not go before it."""
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()
    disable_progress_bars()
    api = hub_api()
    with only_sender(queue, wait=-1):
        while True:
            for job in list_jobs(queue)[:1]:
                try:
                    send_job(api, job, sleep=time.sleep, say=say)
                except CannotSend as error:
                    say(f"WARNING: the Hub: {job.message} can't be uploaded: {error}. It is kept in {queue}.")
                    return
                break
            else:
                time.sleep(_POLL_SECONDS)



def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv[2]),), daemon=True).start()
    serve(Path(sys.argv[1]))
