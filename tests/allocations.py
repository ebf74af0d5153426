"""What torch allocates on the CPU while something runs, as the profiler is told, and what autograd saves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that are there at once of what `run` allocates."""
    return max(accumulate(_allocations(run), initial=0))


def left_bytes(run: Callable[[], object]) -> int:
    """The bytes of what `run` allocates that are there when it has ended, less what it frees."""
    return sum(_allocations(run))


def saved_bytes(of: nn.Module, run: Callable[[], object]) -> int:
    """The bytes that a forward of a module saves for its backward, but for its weights and buffers."""
    saved: dict[int, Tensor] = {}
    own = {x.untyped_storage().data_ptr() for x in (*of.parameters(), *of.buffers())}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x  # kept alive, so that no place is used twice
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        run()
    return sum(x.untyped_storage().nbytes() for at, x in saved.items() if at not in own)


def _allocations(run: Callable[[], object]) -> list[int]:
    """Bytes allocated, and less than 0 freed, one after the other."""
    gc.collect()  # or what earlier tests left in cycles might be freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = seen.profiler.kineto_results.events()
    return [e.nbytes() for e in events if e.name() == "[memory]"]
