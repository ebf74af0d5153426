"""Rows of a table in page-locked host memory, which the GPU reads by itself: only those that it needs.

Page-locked memory has an address on the GPU too, so a kernel can load from it, over PCIe. A table of
128k rows of 8 KB is 1 GB, and 16,384 tokens need 134 MB of it at most; copied in whole it takes 20 ms.

Shapes: N ids, V rows of the table, D features.
"""

from __future__ import annotations

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without
    triton = None

if triton:

    @triton.jit
    def _read_rows(ids_ptr, table_ptr, out_ptr, first, V, D, BLOCK: tl.constexpr):
        place = tl.program_id(0).to(tl.int64)
        row = tl.load(ids_ptr + place) - first
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = (row >= 0) & (row < V) & (columns < D)
        found = tl.load(table_ptr + row * D + columns, mask=there, other=0.0)
        tl.store(out_ptr + place * D + columns, found, mask=columns < D)


def can_read_rows(ids: Tensor, table: Tensor) -> bool:
    """Whether `read_rows` takes a table for ids on this device."""
    return triton is not None and ids.is_cuda and table.is_contiguous() and table.is_pinned()


def read_rows(ids: Tensor, table: Tensor, first: int) -> Tensor:
    """Rows (N, D) of `table` (V, D) for ids (N,) of a vocabulary in which it begins at `first`.

    Zeros for ids that are not among its rows.
    """
    out = table.new_empty(len(ids), table.shape[1], device=ids.device)
    block = min(4096, triton.next_power_of_2(table.shape[1]))
    _read_rows[(len(ids), triton.cdiv(table.shape[1], block))](
        ids, table, out, first, *table.shape, block, num_warps=4
    )
    return out
