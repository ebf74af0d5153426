"""The store that all ranks of a run share: where it is, who keeps it, and until when.

torchrun and our own launcher keep it in a process of their own, through all starts of a run. Ranks that were
started by hand, by srun or mpirun, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, find it in rank 0:
it begins and ends with that process, so what lies in it was said in this start.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from .ranks import is_kept_by_launcher, ranks_from_env, store_address

# How long the first rank waits for one that still tokenizes, and for what another sends.
RENDEZVOUS_TIMEOUT = timedelta(hours=6)
START_TIMEOUT = timedelta(minutes=10)  # between the starts of two ranks, as torchrun allows
_UNTIL_SAID, _POLL_SECONDS = 20, 0.2  # seconds until a rank says whom it waits for

_stores: dict[tuple, dist.TCPStore] = {}  # of this process: rank 0's must live as long as it


def common_store(timeout: timedelta = START_TIMEOUT) -> dist.TCPStore:
    """This rank's connection to the store of all ranks; rank 0 opens it where no launcher keeps one.

    Raises ValueError naming the address if nothing answers there within `timeout`, or if it is taken.
    """
    ranks, (host, port) = ranks_from_env(), store_address()
    keeps = ranks.is_main and not is_kept_by_launcher()
    key = host, port, ranks
    if key not in _stores:
        try:
            store = _opened(host, port) if keeps else _connected(host, port, timeout)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            why = "rank 0 can't listen there" if keeps else f"nothing answers there for {timeout}"
            remedy = "free the port or give another" if keeps else "start rank 0, or open the port"
            raise ValueError(
                f"MASTER_ADDR={host} MASTER_PORT={port}: {why}; {remedy}, with the same two variables for "
                "every rank, or start the ranks with torchrun"
            ) from error
        store.set_timeout(RENDEZVOUS_TIMEOUT)
        _stores[key] = store
    return _stores[key]


def _opened(host: str, port: int) -> dist.TCPStore:
    """The store, kept by this process; a group that the script makes at this address shares it."""
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True)


def _connected(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A connection to the store that another process keeps, which may still have to start.

    torch's own attempts would each fill the log with a trace of C++.
    """
    started, said = time.monotonic(), False
    while not _answers(host, port):
        waited = time.monotonic() - started
        if waited > timeout.total_seconds():
            raise dist.DistNetworkError(f"no answer from {host}:{port}")
        if waited > _UNTIL_SAID and not said:
            line = f"waiting for rank 0 at {host}:{port} (MASTER_ADDR, MASTER_PORT)"
            print(line, file=sys.stderr, flush=True)
            said = True
        time.sleep(_POLL_SECONDS)
    return dist.TCPStore(host, port, is_master=False, timeout=timeout)


def _answers(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False
