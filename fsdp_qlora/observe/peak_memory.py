"""Peaks that nobody keeps for us, sampled: a process's own host memory, and the driver's figure.

The kernel's peak of a process counts pages of files that it has read, a checkpoint's among them.
Here count anonymous pages, which include those locked for the GPU (memory/pinned_memory.py), and what
torch's own allocator of pinned memory holds.
"""

from __future__ import annotations

import threading
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch

STATUS = Path("/proc/self/status")


class PeakMemory:
    """The highest values while it is open; `host` and `driver` in bytes, 0 where there is none."""

    def __init__(self, device: torch.device, seconds: float = 0.1):
        self.device, self.seconds = device, seconds
        self.host = self.driver = 0
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self.sample, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.closed.set()
        self.thread.join()

    def sample(self):
        """Look now and then until closed, and once more."""
        done = False
        while not done:
            done = self.closed.wait(self.seconds)
            self.look()

    def look(self):
        """Take the present values into the peaks."""
        host = _anonymous_bytes()
        if self.device.type == "cuda":
            host += torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
            free, total = torch.cuda.mem_get_info(self.device)
            self.driver = max(self.driver, total - free)
        self.host = max(self.host, host)


def _anonymous_bytes() -> int:
    """Anonymous memory of this process that is resident; 0 where /proc does not say."""
    return _status_bytes("RssAnon") or 0


def peak_resident_bytes() -> int:
    """The most memory that this process has had resident, pages of files too.

    getrusage's ru_maxrss would not do where there is /proc: a process inherits that of its parent.
    """
    peak = _status_bytes("VmHWM")
    return 1024 * getrusage(RUSAGE_SELF).ru_maxrss if peak is None else peak


def _status_bytes(name: str) -> int | None:
    """A line of the kernel's status of this process; None where there is none."""
    if not STATUS.is_file():
        return None
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return None
