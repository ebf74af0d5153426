"""The first values of adapters: PEFT's default, or PiSSA, OLoRA and LoftQ from the weights they adapt.

Modules, each importing only from those before it: default, from_weights, load, saved.
"""

from .default import init_adapters, init_magnitudes, initial_a
from .from_weights import LoraInit, Taken, low_rank_rows
from .load import SavedRows, check_init, init_from_weights
from .saved import for_original_base, saved_config, taken_out

__all__ = [
    "LoraInit",
    "SavedRows",
    "Taken",
    "check_init",
    "for_original_base",
    "init_adapters",
    "init_from_weights",
    "init_magnitudes",
    "initial_a",
    "low_rank_rows",
    "saved_config",
    "taken_out",
]
