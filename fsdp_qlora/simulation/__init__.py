"""A run on ranks that do not exist: one process builds, shards and takes a step, and counts.

The model, the sharding and the step are a run's own. Tensors are fake: they have shapes and no
memory. The process group is torch's fake one.

Modules, each importing only from those before it: counting, files, messages, ranks, report.
"""

from .counting import Collectives, memory_by_part
from .messages import CountedStore, StoreMessages, store_messages
from .ranks import Simulated, simulate
from .report import as_json, report

__all__ = [
    "Collectives",
    "CountedStore",
    "Simulated",
    "StoreMessages",
    "as_json",
    "memory_by_part",
    "report",
    "simulate",
    "store_messages",
]
