"""Time limits of tests: how long to wait for what should not take long."""

from __future__ import annotations

import os


def patience(seconds: float) -> float:
    """`seconds` of an idle machine: longer the more processes share its cores.

    TEST_PATIENCE is the factor on a machine that is slow for another reason.
    """
    waiting = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return seconds * float(os.environ.get("TEST_PATIENCE") or max(1.0, 2 * waiting))
