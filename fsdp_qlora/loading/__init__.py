"""The streamed load: checkpoints read by rows into a model that is already sharded.

Modules, each importing only from those before it: content_hash, weight_files, model_folder,
generation_config, meta, stream, tokenizer, key_mapping, bnb_4bit, native_formats, prequantized,
quantized_cache, llama_pro, base_weights.
"""

from .meta import DTYPES, materialize, meta_model
from .model_folder import checkpoint_folder, looks_local, not_at_hand, pinned, read_config
from .stream import (
    LoadProgress,
    check_complete,
    expected_shapes,
    load_buffers,
    load_weights,
    rank_pieces,
)
from .weight_files import Checkpoint, first_line

__all__ = [
    "Checkpoint",
    "DTYPES",
    "LoadProgress",
    "check_complete",
    "checkpoint_folder",
    "expected_shapes",
    "first_line",
    "load_buffers",
    "load_weights",
    "looks_local",
    "materialize",
    "meta_model",
    "not_at_hand",
    "pinned",
    "rank_pieces",
    "read_config",
]
