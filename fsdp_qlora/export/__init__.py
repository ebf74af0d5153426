"""Trained weights on disk, and all that is made from them: merged models, cards, pushes.

Modules, each importing only from those before it: card, config_file, generation_config,
tokenizer_files, merged_files, stored_names, save, adapter_folder, quantized_base, merge_base, merge,
convert, serving, elsewhere, hub.
"""

from .save import (
    RUN_FILE,
    ShardWriter,
    save_peft_config,
    save_trained,
    trained_bytes,
    weights_folder,
)

__all__ = [
    "RUN_FILE",
    "ShardWriter",
    "save_peft_config",
    "save_trained",
    "trained_bytes",
    "weights_folder",
]
