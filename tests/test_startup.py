"""Where the seconds of a run's start go: counted from the start of the process itself."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

CODE = """
import time
time.sleep(1)
from fsdp_qlora.observe.startup import part_ended, startup_seconds
part_ended("sleep")
time.sleep(0.5)
part_ended("nap")
part_ended("sleep")
print(*startup_seconds(), *startup_seconds().values())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it counts from the import on")
def test_parts_count_from_the_process_start_and_each_once():
    began = time.monotonic()
    out = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    wall = time.monotonic() - began
    first, second, slept, napped = out.stdout.split()
    assert (first, second) == ("sleep", "nap")
    assert 1 <= float(slept) and 0.48 <= float(napped)  # the system counts hundredths
    assert float(slept) + float(napped) <= wall + 0.05
