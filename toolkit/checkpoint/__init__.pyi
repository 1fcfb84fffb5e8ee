# The public names, each with the file it is in, as in `toolkit/__init__.pyi`.

from .directory import (
    clean_leftovers as clean_leftovers,
    latest_checkpoint as latest_checkpoint,
    list_checkpoints as list_checkpoints,
    load_checkpoint as load_checkpoint,
    prune_checkpoints as prune_checkpoints,
    read_pointer as read_pointer,
    save_checkpoint as save_checkpoint,
    set_aside_later as set_aside_later,
    verify_checkpoint as verify_checkpoint,
    write_pointer as write_pointer,
)
from .random_state import capture_random_state as capture_random_state, restore_random_state as restore_random_state
from .sharded import (
    apply_sharded_state as apply_sharded_state,
    capture_sharded_state as capture_sharded_state,
    sharded_base_identity as sharded_base_identity,
)
from .state import (
    State as State,
    apply_state as apply_state,
    base_identity as base_identity,
    capture_state as capture_state,
    copy_state as copy_state,
    nonfinite_parameter as nonfinite_parameter,
    parameter_names as parameter_names,
)
from .trees import flatten as flatten, only_tensors as only_tensors, unflatten as unflatten
from .writer import CheckpointWriter as CheckpointWriter, Outcome as Outcome
