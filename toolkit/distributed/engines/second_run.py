"""A second run in one process: Accelerate (1.15) keeps one state for each process, which the first run has settled."""

import sys

from toolkit.config import Refusal
from toolkit.distributed.engines.choice import EngineChoice

_INSTEAD = "Start this run in a process of its own: toolkit train, or a restarted notebook kernel."


def check_no_sharded_run_before() -> None:
    """Refuse a run after one with ZeRO or FSDP2 in this process, before the variables that Accelerate left of it are read.

    Raises:
        Refusal: there was one.
    """
    known = sys.modules.get("accelerate.state")
    for state in (known.PartialState, known.AcceleratorState) if known else ():
        kind = getattr(state._shared_state.get("distributed_type"), "value", "NO")
        if kind in ("DEEPSPEED", "FSDP"):
            name = {"DEEPSPEED": "ZeRO", "FSDP": "FSDP2"}[kind]
            raise Refusal(f"an earlier run in this process was sharded by {name}, which can be set up only once. {_INSTEAD}")


def make_way(choice: EngineChoice, on_cpu: bool) -> None:
    """Reset Accelerate's state where an earlier run in this process has settled another precision, device or engine.

    Raises:
        Refusal: that run is one of several ranks, whose process group is there only once.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    process, state = PartialState._shared_state, AcceleratorState._shared_state
    if not process:
        return
    differs = {
        "device": (process["device"].type == "cpu") != on_cpu,
        "precision": bool(state) and state["_mixed_precision"] != choice.mixed_precision,
        "engine": choice.name != "none",
    }
    if not any(differs.values()):
        return
    if process["distributed_type"] != DistributedType.NO:
        what = " and another ".join(what for what, is_other in differs.items() if is_other)
        ranks = "which has several ranks"
        raise Refusal(f"this run needs another {what} than the one before it in this process, {ranks}. {_INSTEAD}")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
