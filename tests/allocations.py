"""What torch allocates on the CPU while something runs: the profiler is told of every allocation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that are there at once of what `run` allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = seen.profiler.kineto_results.events()
    return max(accumulate((e.nbytes() for e in events if e.name() == "[memory]"), initial=0))
