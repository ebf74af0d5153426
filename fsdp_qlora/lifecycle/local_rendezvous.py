"""Where ranks that were started here meet: a store that listens on this machine's own address alone.

torch's rendezvous backends listen on every interface, and who reaches such a store can read and change
what the ranks tell each other.
"""

from __future__ import annotations

import socket

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

ONE_MACHINE = "one_machine"  # the name of this backend


class _OneMachine(RendezvousHandler):
    """All ranks of a run on one machine; the launcher keeps their store, at MASTER_ADDR."""

    use_agent_store = True

    def __init__(self, host: str, port: int, run_id: str):
        self.run_id, listener = run_id, socket.socket()
        listener.bind((host, port))
        listener.listen(1024)
        address, port = listener.getsockname()
        self.place = RendezvousStoreInfo(address, port)
        self.store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(PrefixStore(self.run_id, self.store), 0, 1, self.place)

    def get_backend(self) -> str:
        return ONE_MACHINE

    def get_run_id(self) -> str:
        return self.run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self):
        """There is no other agent to tell."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def _one_machine(parameters: RendezvousParameters) -> _OneMachine:
    """As torch's launcher makes it, from host:port."""
    host, _, port = parameters.endpoint.rpartition(":")
    return _OneMachine(host, int(port), parameters.run_id)


def register():
    """Make the backend known to torch's launcher."""
    rendezvous_handler_registry.register(ONE_MACHINE, _one_machine)
