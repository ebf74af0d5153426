"""Trained weights on disk, and all that is made from them: merged models, cards, pushes."""
from .save import (
    RUN_FILE,
    ShardWriter,
    save_peft_config,
    save_trained,
    trained_bytes,
)

__all__ = [
    "RUN_FILE", "ShardWriter", "save_peft_config", "save_trained", "trained_bytes",
]
