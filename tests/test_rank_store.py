"""Ranks meet in a store that remembers earlier starts, as torchrun's does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from fsdp_qlora.dist.rank_store import (
    ErrorKey,
    ErrorOnAnotherRank,
    RankStore,
    broadcast_error,
    rendezvous,
)
from fsdp_qlora.simulation import CountedStore
from tests.patience import patience

SOON = timedelta(seconds=patience(20))


@pytest.fixture
def clients():
    """A function that gives each rank a client of one server."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return lambda count: [TCPStore("localhost", server.port, is_master=False) for _ in range(count)]


def together(function, stores, timeout: timedelta = SOON) -> list:
    """What each rank of a world gets, or the exception that it met with."""

    def one(rank):
        try:
            return function(stores[rank], rank, len(stores), timeout)
        except (ValueError, OSError) as error:
            return error

    with ThreadPoolExecutor(len(stores)) as threads:
        return list(threads.map(one, range(len(stores))))


def met(store, rank, world_size, timeout):
    return rendezvous(store, rank, world_size, timeout, ErrorKey(PrefixStore("common", store)))


def test_each_start_has_a_store_without_a_trace_of_the_one_before_whatever_the_world(clients):
    for world_size in (3, 2, 2, 3, 1):
        found = together(met, clients(world_size))
        assert not any(isinstance(store, Exception) for store in found), found
        assert not found[0].check(["mark"])
        found[0].set("mark", "")
        assert all(store.check(["mark"]) for store in found)


def test_ranks_that_are_alone_wait_for_their_time_and_say_so(clients):
    together(met, clients(2))  # its keys are still there
    for store, rank in zip(clients(2), (0, 1), strict=True):
        with pytest.raises(OSError, match="2 ranks"):
            met(store, rank, 2, timedelta(seconds=1))


def test_a_mistake_is_heard_by_ranks_that_wait_and_by_ranks_that_make_one(clients):
    def start(store, rank, world_size, timeout):
        common = PrefixStore("common", store)
        try:
            if rank:
                raise ValueError(f"--lr is wrong on {rank}")
            met(store, rank, world_size, timeout)
        except ValueError as error:
            broadcast_error(common, rank, world_size, str(error), patience_s=60)
            return error

    stores = clients(3)
    first, *others = together(start, stores)
    assert isinstance(first, ErrorOnAnotherRank) and str(first).startswith("rank ")
    assert [str(e) for e in others] == ["--lr is wrong on 1", "--lr is wrong on 2"]
    again = together(met, clients(3))  # what is left of it in the store frightens nobody
    assert not any(isinstance(store, Exception) for store in again), again


def test_a_rank_that_comes_later_hears_what_one_left_that_is_gone(clients):
    """Only in a store that began with this start: in torchrun's it may be of an earlier one."""
    first, second = clients(2)
    broadcast_error(first, 1, 2, "--lr is wrong", patience_s=0.1)
    with pytest.raises(OSError, match="not all 2 ranks"):
        rendezvous(second, 0, 2, timedelta(seconds=0.3), ErrorKey(second))
    with pytest.raises(ErrorOnAnotherRank, match="rank 1: --lr is wrong"):
        rendezvous(second, 0, 2, SOON, ErrorKey(second, is_new=True))


RANKS = 256


def test_a_rank_sends_a_few_messages_to_read_what_all_of_256_say():
    store = CountedStore(HashStore())
    ranks = [RankStore(store, rank, RANKS) for rank in range(RANKS)]
    for rank in ranks[1:]:
        rank.post("beat", f"{rank.rank}")
    store.messages = 0
    assert ranks[5].read_all("beat") == [None, *map(str, range(1, RANKS))]
    assert store.messages <= 3 * 8 + 1  # at each halving two questions, and one half read
    with pytest.raises(OSError, match="rank 0 sent nothing"):
        ranks[0].wait_for_all("beat", 0.0)
    ranks[0].post("beat", "0")
    store.messages = 0
    assert (
        ranks[0].wait_for_all("beat", 60) == ranks[1].read_all("beat") == [*map(str, range(RANKS))]
    )
    assert store.messages == 4


def test_at_a_rendezvous_of_256_ranks_each_sends_a_few_messages_beside_its_looks():
    shared, stores = HashStore(), [CountedStore(HashStore()) for _ in range(RANKS)]
    for store in stores:
        store.shared = shared
    looks = [0] * RANKS

    class Errors:
        """Nobody has one; each look of a rank asks once."""

        def __init__(self, rank):
            self.rank = rank

        def look(self):
            looks[self.rank] += 1

    def one(store, rank, world_size, timeout):
        return rendezvous(store, rank, world_size, timeout, Errors(rank))

    found = together(one, stores, timedelta(seconds=patience(60)))
    assert not any(isinstance(store, Exception) for store in found), found
    # A look asks for the start, and whether all are there; rank 0 asks for all answers at once.
    for store, own in zip(stores, looks, strict=True):
        assert store.messages <= 3 * (own + 1) + 3
