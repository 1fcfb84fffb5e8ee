"""Child processes that don't outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def death_with_this_process() -> Callable[[], None] | None:
    """What a child does before anything else, so that it's killed when this process dies, of SIGKILL too."""
    if sys.platform != "linux":
        return None
    prctl, launcher = ctypes.CDLL(None).prctl, os.getpid()

    def die_with_the_launcher() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != launcher:  # it died before it could be watched
            os._exit(1)

    return die_with_the_launcher
