"""Sums of the rows that belong to a token: what experts made of it, or the gradients of each.

A kernel that reads every row once and writes every token once; other devices do the same in torch.

Shapes: N tokens, K experts of each, S = N K rows, D columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..quantization.kernels import triton

_MOST_COLUMNS = 1024  # that a program sums

if triton:
    import triton.language as tl

    @triton.jit
    def _sum_rows(values_ptr, rows_ptr, out_ptr, STRIDE, D, K: tl.constexpr, COLUMNS: tl.constexpr):
        # COLUMNS columns of one token, whose rows are all on their way at once.
        token = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < D
        total = tl.zeros((COLUMNS,), tl.float32)
        for k in tl.static_range(K):
            row = tl.load(rows_ptr + token * K + k)
            values = tl.load(values_ptr + row * STRIDE + columns, mask=inside, other=0.0)
            total += values.to(tl.float32)
        tl.store(out_ptr + token * D + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_rows(values: Tensor, rows: Tensor) -> Tensor:
    """values (S, D), and the rows (N, K) of each token -> (N, D): summed in fp32, rounded once."""
    if values.is_cuda and triton:
        return sum_rows_by_kernel(values, rows)
    return nn.functional.embedding_bag(rows, values, mode="sum")


def sum_rows_by_kernel(values: Tensor, rows: Tensor) -> Tensor:
    """The same in one pass, in place of torch's, which takes four times as long."""
    (tokens, each), width = rows.shape, values.shape[1]
    assert values.stride(1) == 1 and rows.is_contiguous()
    out = torch.empty(tokens, width, dtype=values.dtype, device=values.device)
    columns = min(_MOST_COLUMNS, triton.next_power_of_2(width))
    _sum_rows[(tokens, triton.cdiv(width, columns))](
        values, rows, out, values.stride(0), width, each, columns, num_warps=4
    )
    return out
