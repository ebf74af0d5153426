"""Rows that the GPU reads from page-locked host memory are those that the host would have sent."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(
    "features, dtype", [(96, torch.bfloat16), (5000, torch.float32), (8192, torch.bfloat16)]
)
def test_rows_in_and_outside_of_the_table(features, dtype):
    from fsdp_qlora.memory.pinned_memory import host_tensors
    from fsdp_qlora.memory.vocab_parallel import _can_read_rows, read_rows

    like = torch.empty(50, features, dtype=dtype)
    _, table = host_tensors([like, like], pinned=True)  # the second of a region: not at its start
    table.copy_(torch.randn(50, features))
    ids = torch.randint(0, 100, (37,), device="cuda")
    assert _can_read_rows(ids, table) and not _can_read_rows(ids, like)
    here = ids.cpu() - 20
    expected = torch.where(((here >= 0) & (here < 50))[:, None], table[here.clamp(0, 49)], 0)
    assert torch.equal(read_rows(ids, table, 20).cpu(), expected)
