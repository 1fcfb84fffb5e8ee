"""Checkpoints: a run's state as a value, and directories that hold a complete one or none.

Each name loads the file that it is in: what only looks at directories does without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.checkpoint.directory import (
        clean_leftovers,
        latest_checkpoint,
        list_checkpoints,
        load_checkpoint,
        prune_checkpoints,
        read_pointer,
        save_checkpoint,
        set_aside_later,
        verify_checkpoint,
        write_pointer,
    )
    from toolkit.checkpoint.random_state import capture_random_state, restore_random_state
    from toolkit.checkpoint.sharded import apply_sharded_state, capture_sharded_state, sharded_base_identity
    from toolkit.checkpoint.state import (
        State,
        apply_state,
        base_identity,
        capture_state,
        copy_state,
        nonfinite_parameter,
        parameter_names,
    )
    from toolkit.checkpoint.trees import flatten, only_tensors, unflatten
    from toolkit.checkpoint.writer import CheckpointWriter, Outcome

__all__ = [
    "CheckpointWriter", "Outcome", "State", "apply_sharded_state", "apply_state", "base_identity", "capture_random_state",
    "capture_sharded_state", "capture_state",
    "clean_leftovers", "copy_state", "flatten", "latest_checkpoint", "list_checkpoints", "load_checkpoint",
    "nonfinite_parameter", "only_tensors", "parameter_names", "prune_checkpoints", "read_pointer", "restore_random_state",
    "save_checkpoint",
    "set_aside_later", "sharded_base_identity", "unflatten", "verify_checkpoint", "write_pointer",
]  # fmt: skip
_FILES = {
    "random_state": ("capture_random_state", "restore_random_state"),
    "sharded": ("apply_sharded_state", "capture_sharded_state", "sharded_base_identity"),
    "state": ("State", "apply_state", "base_identity", "capture_state", "copy_state", "nonfinite_parameter", "parameter_names"),
    "trees": ("flatten", "only_tensors", "unflatten"),
    "writer": ("CheckpointWriter", "Outcome"),
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILE_OF.get(name, 'directory')}"), name)
