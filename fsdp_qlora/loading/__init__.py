"""The streamed load: checkpoints read by rows into a model that is already sharded."""
from .stream import (
    DTYPES,
    Checkpoint,
    LoadProgress,
    check_complete,
    checkpoint_folder,
    expected_shapes,
    first_line,
    load_buffers,
    load_weights,
    looks_local,
    materialize,
    meta_model,
    not_at_hand,
    pinned,
    rank_pieces,
    read_config,
)

__all__ = [
    "Checkpoint", "DTYPES", "LoadProgress", "check_complete", "checkpoint_folder",
    "expected_shapes", "first_line", "load_buffers", "load_weights", "looks_local", "materialize",
    "meta_model", "not_at_hand", "pinned", "rank_pieces", "read_config",
]
