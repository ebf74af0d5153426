"""Peaks count what a process holds itself, and no pages of files."""

from __future__ import annotations

import mmap

import torch

from fsdp_qlora.observe.peak_memory import PeakMemory, anonymous_bytes

MIB = 2**20


def test_memory_that_came_and_went_is_in_the_peak_and_pages_of_files_are_not(tmp_path):
    path = tmp_path / "checkpoint"
    path.write_bytes(bytes(64 * MIB))
    before = anonymous_bytes()
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
