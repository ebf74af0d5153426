"""What is split over the ranks, and when it is gathered. `fsdp.py` alone knows torch's FSDP.

Modules, each importing only from those before it: units, prefetch, ddp, stale_optimizers,
dropout_seeds, own_scripts, fsdp.
"""

from ..choices import STRATEGIES
from .fsdp import (
    OnHost,
    apply_sharding,
    free_gathered,
    is_placed,
    is_sharded,
    kept_between_forwards,
    make_mesh,
    parameter_device,
    reduce_gradients,
    set_gradient_sync,
    watch_gradients,
    without_gradient_sync,
)
from .stale_optimizers import refuse_to_train
from .units import describe_units

__all__ = [
    "OnHost",
    "STRATEGIES",
    "apply_sharding",
    "describe_units",
    "free_gathered",
    "is_placed",
    "is_sharded",
    "kept_between_forwards",
    "make_mesh",
    "parameter_device",
    "reduce_gradients",
    "refuse_to_train",
    "set_gradient_sync",
    "watch_gradients",
    "without_gradient_sync",
]
