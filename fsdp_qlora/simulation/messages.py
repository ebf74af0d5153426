"""How many messages a rank sends to the run's store, where the process group is made and in a step.

The rendezvous is a run's own code, with the answers of ranks that do not exist; a rank that waits there
for others asks up to three things more at each look. Beside it each rank of gloo, which also serves
NCCL's runs, tells the store its address, and asks for each rank's twice: whether it is there, and what
it is. Collectives go from rank to rank, past the store.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import HashStore, Store

from ..dist.rank_store import ErrorKey, rendezvous

_SOON = timedelta(minutes=1)


class CountedStore(Store):
    """One rank's connection to a store, with the number of messages that it sent."""

    def __init__(self, shared: Store):
        super().__init__()
        self.shared, self.messages = shared, 0

    def _ask(self, name: str, *args):
        self.messages += 1
        return getattr(self.shared, name)(*args)

    def set(self, key, value):
        return self._ask("set", key, value)

    def get(self, key):
        return self._ask("get", key)

    def check(self, keys):
        return self._ask("check", keys)

    def multi_get(self, keys):
        return self._ask("multi_get", keys)

    def wait(self, keys, *timeout):
        return self._ask("wait", keys, *timeout)

    def add(self, key, number):
        return self._ask("add", key, number)

    def set_timeout(self, timeout):
        self.shared.set_timeout(timeout)


class _AmongReadyRanks(CountedStore):
    """That of `rank`, whose peers have come before it and answer at once."""

    def __init__(self, rank: int, world_size: int):
        super().__init__(HashStore())
        self.rank, self.world_size = rank, world_size
        if rank:
            self.shared.set("start", "first")

    def set(self, key, value):
        super().set(key, value)
        if self.rank:
            self.shared.set("first/all", json.dumps([value]))
        elif key == "start":
            for other in range(1, self.world_size):
                self.shared.set(f"{value}/{other}", str(other))


@dataclass(frozen=True)
class StoreMessages:
    """Of one rank, the one that sends most."""

    rendezvous: int  # if no other comes later
    group: int  # of gloo
    step: int = 0


def store_messages(world_size: int) -> StoreMessages:
    """What a rank of so many sends."""
    found = []
    for rank in range(min(2, world_size)):  # the first, and any other
        store = _AmongReadyRanks(rank, world_size)
        rendezvous(store, rank, world_size, _SOON, ErrorKey(HashStore()))
        found.append(store.messages)
    return StoreMessages(max(found), 2 * world_size + 1)
