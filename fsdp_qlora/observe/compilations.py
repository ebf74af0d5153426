"""How often torch compiled in this process: a run that goes on compiling is a slow one.

Each shape of a batch that compiled code was not made for costs a compilation, which is minutes for a
large model, and after so many of them torch gives up on a function and runs it uncompiled (`build.py`).
"""

from __future__ import annotations

import sys
from functools import cache

import torch

from ..dist import print_main

_GAVE_UP = "recompile limit exceeded"  # in what torch notes of a function that it compiles no more


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process, those read from its cache included."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # nothing was compiled where it is not imported
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def compile_seconds() -> float:
    """Seconds that torch.compile has taken in this process, with reading its cache."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.calculate_time_spent().get("total_wall_time", 0.0) if dynamo else 0.0


def say_what_runs_eager():
    """Print a warning, once, if torch.compile left code out: a block that breaks off runs eager as a whole.

    So do blocks for which it would have to make more graphs than it may. Nothing else tells: results are
    the same, only slower, and larger than the estimate.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return
    for reason in [*dynamo.counters["graph_break"]][:1]:
        _warn(f"can't compile all of the model ({' '.join(reason.splitlines()[0].split())})")
    if any(_GAVE_UP in reason for reason in dynamo.counters["unimplemented"]):
        most = torch._dynamo.config.recompile_limit
        _warn(
            f"made {most} graphs of one function and makes no more (TORCH_LOGS=recompiles tells why)"
        )


@cache
def _warn(what: str):
    print_main(
        f"warning: torch.compile {what}; the rest runs eager, which takes more time and memory than "
        "estimated"
    )
