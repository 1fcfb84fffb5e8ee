"""Checkpoints: a run's state as a value, and directories that hold one whole or not at all."""

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
from toolkit.checkpoint.state import State, apply_state, base_identity, capture_state, copy_state, nonfinite_parameter
from toolkit.checkpoint.trees import flatten, unflatten
from toolkit.checkpoint.writer import CheckpointWriter, Outcome

__all__ = [
    "CheckpointWriter", "Outcome", "State", "apply_sharded_state", "apply_state", "base_identity", "capture_random_state",
    "capture_sharded_state", "capture_state",
    "clean_leftovers", "copy_state", "flatten", "latest_checkpoint", "list_checkpoints", "load_checkpoint",
    "nonfinite_parameter", "prune_checkpoints", "read_pointer", "restore_random_state", "save_checkpoint",
    "set_aside_later", "sharded_base_identity", "unflatten", "verify_checkpoint", "write_pointer",
]
