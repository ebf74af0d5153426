"""How often torch compiled in this process: a run that goes on compiling is a slow one.

Each shape of a batch that compiled code was not made for costs a compilation, which is minutes for a
large model, and after eight of them torch gives up on a function and runs it uncompiled.
"""

from __future__ import annotations

import sys


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process, those read from its cache included."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # nothing was compiled where it is not imported
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0
