"""Finds a flipped bit in the frozen weights: they must be the same for the whole of a run.

Memory errors on long runs are real (Meta's Llama 3 paper, arXiv:2407.21783, section 3.3.4, counts silent
data corruption among its interruptions), and a frozen base is where most of a run's bytes are. A thread
of each rank adds up its own shards every few minutes; any one changed bit changes the sum.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..dist import local_rows

_WORD = 8  # bytes


class FrozenWeights:
    """Sums over this rank's frozen shards, taken anew every `minutes`; 0 minutes never do."""

    def __init__(self, model: nn.Module, device: torch.device, minutes: float):
        self.shards = {
            name: local_rows(p.detach())[0]
            for name, p in model.named_parameters()
            if not p.requires_grad
        }
        self.device, self.minutes = device, minutes
        self.changed: str | None = None
        self.is_over = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compare for the life of the block."""
        if self.minutes:
            self.expected = self.sums()
            threading.Thread(target=self.watch, name="frozen weights", daemon=True).start()
        try:
            yield
        finally:
            self.is_over.set()

    def watch(self):
        """The thread: look again and again, until something has changed."""
        while not self.is_over.wait(60 * self.minutes) and not self.changed:
            self.compare()

    def compare(self):
        """Note the first weight whose sum is not what it was."""
        now = self.sums()
        self.changed = next(
            (name for name, total in now.items() if total != self.expected[name]), None
        )

    def sums(self) -> dict[str, int]:
        """One number a shard, of those that it came to before the run was over.

        Python would abort a process that ends while a thread is in a sum.
        """
        with aside(self.device):
            totals = {
                name: _bit_sum(shard)
                for name, shard in self.shards.items()
                if not self.is_over.is_set()
            }
            return {name: int(total) for name, total in totals.items()}

    def has_changed(self) -> bool:
        """Whether this rank has found a changed weight."""
        return self.changed is not None

    def explain(self, rank: int) -> str | None:
        """What this rank found."""
        if not self.changed:
            return None
        return (
            f"the frozen weight {self.changed} changed in the memory of rank {rank} (a bit flip); "
            "rerun the same command to resume from the last checkpoint, and check that machine's "
            "memory"
        )


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """On a GPU, a stream of its own: it waits for what was queued, and no step waits for it."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def _bit_sum(shard: Tensor) -> Tensor:
    """The sum of a tensor's words of 8 bytes, modulo 2**64; a changed bit changes it.

    Words are read as the numbers that they are summed as. `sum(dtype=torch.int64)` of shorter ones first
    makes all of them 8 bytes wide: of an embedding in 16 bits four times its size, beside the step.
    """
    flat = shard.contiguous().view(-1).view(torch.uint8)
    first = -flat.storage_offset() % _WORD
    if len(flat) < first + _WORD:
        return flat.sum(dtype=torch.int64)
    last = first + (len(flat) - first) // _WORD * _WORD
    few = torch.cat([flat[:first], flat[last:]])
    return flat[first:last].view(torch.int64).sum() + few.sum(dtype=torch.int64)
