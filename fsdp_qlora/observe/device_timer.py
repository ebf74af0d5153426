"""When the device comes to a place in its queue of work, without holding the host up.

Where the host is what a step waits for, it reads a step's loss late, and clocks of the host would give
one step's time to another.
"""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """Now, in the device's own order of work."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(before: Mark, after: Mark) -> float:
    """The time from one mark to another of the same device; waits until it is there."""
    if isinstance(after, float):
        return after - before
    after.synchronize()
    return before.elapsed_time(after) / 1000
