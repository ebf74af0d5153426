"""What torch allocates on the CPU while something runs: the profiler is told of every allocation."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that are there at once of what `run` allocates."""
    return max(accumulate(_allocations(run), initial=0))


def left_bytes(run: Callable[[], object]) -> int:
    """The bytes of what `run` allocates that are there when it has ended, less what it frees."""
    return sum(_allocations(run))


def _allocations(run: Callable[[], object]) -> list[int]:
    """Bytes allocated, and less than 0 freed, one after the other."""
    gc.collect()  # or what earlier tests left in cycles might be freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = seen.profiler.kineto_results.events()
    return [e.nbytes() for e in events if e.name() == "[memory]"]
