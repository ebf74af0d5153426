"""What is split over the ranks, and when it is gathered. `fsdp.py` alone knows torch's FSDP.

Modules, each importing only from those before it: units, prefetch, ddp, fsdp.
"""
from .fsdp import (
    STRATEGIES,
    OnHost,
    apply_sharding,
    is_sharded,
    make_mesh,
    parameter_device,
    reduce_gradients,
    set_gradient_sync,
    without_gradient_sync,
)
from .units import describe_units

__all__ = [
    "OnHost", "STRATEGIES", "apply_sharding", "describe_units", "is_sharded", "make_mesh",
    "parameter_device", "reduce_gradients", "set_gradient_sync", "without_gradient_sync",
]
