"""Peaks count what a process holds itself, and no pages of files."""

from __future__ import annotations

import mmap
import subprocess
import sys

import torch

from fsdp_qlora.observe.peak_memory import PeakMemory, _anonymous_bytes, peak_resident_bytes

MIB = 2**20


def test_memory_that_came_and_went_is_in_the_peak_and_pages_of_files_are_not(tmp_path):
    path = tmp_path / "checkpoint"
    path.write_bytes(bytes(64 * MIB))
    before = _anonymous_bytes()
    with PeakMemory(torch.device("cpu"), seconds=0.005) as peaks:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages,
        ):
            assert sum(pages[::4096]) == 0
        peaks.look()
        after_file = peaks.host
        held = torch.ones(96 * MIB, dtype=torch.uint8)
        peaks.look()
        del held
    assert before > 0 and after_file - before < 32 * MIB
    assert peaks.host - before > 64 * MIB and peaks.driver == 0


def test_a_process_s_peak_is_its_own_and_not_of_the_one_that_started_it():
    """The kernel hands ru_maxrss down; a limit that counts from it lets any child pass."""
    held = torch.ones(3 << 30, dtype=torch.uint8)
    shown = subprocess.run(
        [
            sys.executable,
            "-c",
            "from fsdp_qlora.observe.peak_memory import peak_resident_bytes as peak\n"
            "before = peak(); held = bytearray(64 << 20); print(before, peak())",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = map(int, shown.stdout.split())
    assert peak_resident_bytes() >= held.nbytes > after > before + (32 << 20)
