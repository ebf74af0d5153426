"""The long form: `python -m tests.chaos kills 200`, `... signals 100`, `... hangs 40`, `... nodes 20`."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.harness import make_inputs
from tests.chaos.test_hangs import hung_runs
from tests.chaos.test_kills import killed_runs
from tests.chaos.test_lost_nodes import lost_nodes
from tests.chaos.test_signals import signalled_runs

FORMS = {
    "kills": killed_runs,
    "signals": signalled_runs,
    "hangs": hung_runs,
    "nodes": lost_nodes,
}


def main(form: str, count: str, seed: str = "0"):
    """Run one form and print its report."""
    started = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix=f"chaos-{form}-"))
    print(f"in {scratch}, which stays if this fails", flush=True)
    report = FORMS[form](make_inputs(scratch / "inputs"), scratch, int(count), int(seed))
    shutil.rmtree(scratch)
    print(form, report, f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
