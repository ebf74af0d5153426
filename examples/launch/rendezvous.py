"""Keeps the store at which torchrun's agents meet, on a machine that trains nothing and is not lost.

    python examples/launch/rendezvous.py 29400

By default the first machine of --rdzv_endpoint keeps it, and the run ends with that machine. With
--rdzv_conf is_host=false on all others any of them may come and go (docs/nodes.md). Anyone who reaches the
port can read and change what the ranks tell each other: open it to the machines of the run alone.
"""

from __future__ import annotations

import signal
import sys

from torch.distributed import TCPStore

ENDS = {signal.SIGTERM, signal.SIGINT}
signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # for `sigwait`; the store's threads inherit it
store = TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print(f"torchrun's agents may meet at port {store.port}", flush=True)
signal.sigwait(ENDS)
