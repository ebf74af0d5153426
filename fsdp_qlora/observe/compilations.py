"""How often torch compiled in this process: a run that goes on compiling is a slow one.

Each shape of a batch that compiled code was not made for costs a compilation, which is minutes for a
large model, and after eight of them torch gives up on a function and runs it uncompiled.
"""

from __future__ import annotations

import sys
from functools import cache

from ..dist import print_main


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process, those read from its cache included."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # nothing was compiled where it is not imported
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def say_graph_breaks():
    """Print a warning, once, if torch.compile left code out: a block that breaks off runs eager as a whole.

    Nothing else tells: results are the same, only slower, and larger than the estimate.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    for reason in [*dynamo.counters["graph_break"]][:1] if dynamo else ():
        _warn(" ".join(reason.split("\n")[0].split()))


@cache
def _warn(reason: str):
    print_main(
        f"warning: torch.compile can't compile all of the model ({reason}); the rest runs eager, which "
        "takes more time and memory than estimated"
    )
