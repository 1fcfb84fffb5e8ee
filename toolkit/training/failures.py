"""What ends a run from outside its code, in words that help: memory that is full, a rank that is gone."""

from typing import Any

from toolkit.distributed.heartbeat import RankLost
from toolkit.system.interruptions import Interrupted
from toolkit.training.memory import WHAT_HELPS, OutOfMemory, is_out_of_memory
from toolkit.training.stopping import how_to_continue

_OF_COLLECTIVES = ("gloo", "nccl", "connection closed by peer", "connection reset", "watchdog", "socket", "collective")


def explained(error: RuntimeError, run: Any) -> BaseException | None:
    """The exception to raise in place of an error in the loop, with a message and an exit code; None: the cause is unknown."""
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    if is_out_of_memory(error):
        return OutOfMemory(
            f"out of memory in step {run.step}: {first_line}\nLower --per-device-train-batch-size (the result stays with the "
            f"same --global-batch-size) or --per-device-eval-batch-size. {WHAT_HELPS} {how_to_continue(run)}"
        )
    if run.heartbeat and any(word in str(error).lower() for word in _OF_COLLECTIVES):
        missing = run.heartbeat.missing()
        if run.heartbeat.departed() and not missing:
            return Interrupted(f"stopped after step {run.step}, since another rank has left. {how_to_continue(run)}")
        who = f"rank {', '.join(map(str, missing))} gives no sign of life" if missing else "another rank has ended"
        return RankLost(f"{who}: a collective failed in step {run.step} ({first_line[:200]}). {how_to_continue(run)}")
    return None
