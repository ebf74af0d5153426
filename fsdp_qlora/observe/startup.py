"""Where the seconds before a run's first step go, from the start of its process on.

Pure: no torch. Importing it is timed, too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_IMPORTED = time.monotonic()
_ended: dict[str, float] = {}  # seconds of the process at which each part of its start was over


def part_ended(name: str):
    """Note that a part of the start is over; the first time counts."""
    _ended.setdefault(name, process_seconds())


def startup_seconds() -> dict[str, float]:
    """Seconds of each part so far, in order; their sum is the process's age at the last."""
    ends = list(_ended.values())
    return {
        name: end - before
        for (name, end), before in zip(_ended.items(), [0.0, *ends], strict=False)
    }


def process_seconds() -> float:
    """Seconds since this process began; without /proc, since this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), since boot
        return float(Path("/proc/uptime").read_text().split()[0]) - began
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED
