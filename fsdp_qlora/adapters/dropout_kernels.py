"""Triton kernels of dropout: its mask from a seed, alone and inside of an adapter's two products.

The mask of eight neighbours in a row comes from one call of Philox, whose counter is their place and
whose four numbers of 32 bits make eight of 16: no mask is ever read or written, and forward and
backward make the same one. Seven rounds pass the tests of randomness that torch's ten do (Salmon et
al., Parallel random numbers: as easy as 1, 2, 3, SC 2011, table 2). `dropout.py` does the same in torch.

Shapes: N tokens, I inputs, R rank.  x (N, I), A (R, I)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantization.kernels import rank_columns

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without
    triton = None

COLUMNS = 64  # of a tile; as rows of one, the fastest of those tried (docs/LOG.md)
_LEVELS = 1 << 16  # steps that a share of dropped elements is rounded to
_MOST_RANKS = 128  # of adapters whose products the kernels take

if triton:

    @triton.jit
    def kept(seed, rows, start, threshold, C: tl.constexpr):
        """Which of the C columns from `start` on are kept in `rows`, (M, C)."""
        column, row = tl.broadcast((start // 8 + tl.arange(0, C // 8))[None, :], rows[:, None])
        a, b, c, d = tl.philox(seed, column, row, column * 0, column * 0, n_rounds=7)
        numbers = tl.join(tl.join(a, b), tl.join(c, d))
        numbers = tl.join(numbers & 0xFFFF, numbers >> 16)  # (M, C / 8, 2, 2, 2)
        return tl.reshape(numbers, (rows.shape[0], C)).to(tl.int32) >= threshold

    @triton.jit
    def _dropped(
        x_ptr, seed_ptr, out_ptr, n, width, threshold, scale, M: tl.constexpr, C: tl.constexpr
    ):
        start, rows = tl.program_id(0) * C, tl.program_id(1) * M + tl.arange(0, M)
        columns = start + tl.arange(0, C)
        places = rows.to(tl.int64)[:, None] * width + columns[None, :]
        inside = (rows < n)[:, None] & (columns < width)[None, :]
        x = tl.load(x_ptr + places, mask=inside, other=0.0)
        keep = kept(tl.load(seed_ptr), rows, start, threshold, C)
        out = tl.where(keep, x.to(tl.float32) * scale, 0.0).to(x.dtype)
        tl.store(out_ptr + places, out, mask=inside)

    @triton.jit
    def _product_of_dropped(
        x_ptr,
        a_ptr,
        seed_ptr,
        out_ptr,
        n,
        rank,
        width: tl.constexpr,
        threshold,
        scale,
        R: tl.constexpr,
        M: tl.constexpr,
        C: tl.constexpr,
    ):
        rows, ranks = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, R)
        seed, total = tl.load(seed_ptr), tl.zeros((M, R), tl.float32)
        for start in range(0, width, C):
            columns = start + tl.arange(0, C)
            there = (columns < width)[None, :]
            x = tl.load(
                x_ptr + rows.to(tl.int64)[:, None] * width + columns[None, :],
                mask=(rows < n)[:, None] & there,
                other=0.0,
            )
            a = tl.load(
                a_ptr + ranks[:, None] * width + columns[None, :],
                mask=(ranks < rank)[:, None] & there,
                other=0.0,
            )
            x = tl.where(kept(seed, rows, start, threshold, C), x, 0.0)
            total = tl.dot(x, tl.trans(a), total)
        tl.store(
            out_ptr + rows.to(tl.int64)[:, None] * rank + ranks[None, :],
            (total * scale).to(x_ptr.dtype.element_ty),
            mask=(rows < n)[:, None] & (ranks < rank)[None, :],
        )

    @triton.jit
    def _dropped_product(
        y_ptr,
        a_ptr,
        seed_ptr,
        out_ptr,
        n,
        rank,
        width,
        threshold,
        scale,
        R: tl.constexpr,
        M: tl.constexpr,
        C: tl.constexpr,
    ):
        start, rows = tl.program_id(0) * C, tl.program_id(1) * M + tl.arange(0, M)
        columns, ranks = start + tl.arange(0, C), tl.arange(0, R)
        there = ranks < rank
        y = tl.load(
            y_ptr + rows.to(tl.int64)[:, None] * rank + ranks[None, :],
            mask=(rows < n)[:, None] & there[None, :],
            other=0.0,
        )
        a = tl.load(
            a_ptr + ranks[:, None] * width + columns[None, :],
            mask=there[:, None] & (columns < width)[None, :],
            other=0.0,
        )
        keep = kept(tl.load(seed_ptr), rows, start, threshold, C)
        out = tl.where(keep, tl.dot(y, a) * scale, 0.0).to(out_ptr.dtype.element_ty)
        tl.store(
            out_ptr + rows.to(tl.int64)[:, None] * width + columns[None, :],
            out,
            mask=(rows < n)[:, None] & (columns < width)[None, :],
        )


def can_drop(x: Tensor) -> bool:
    """Whether the kernels take x."""
    return bool(triton) and x.is_cuda


def can_multiply(x: Tensor, a: Tensor) -> bool:
    """Whether the kernels take x in an adapter's products: cards without bf16 are left to torch."""
    return can_drop(x) and x.dtype == torch.bfloat16 and len(a) <= _MOST_RANKS


def dropped(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """x (N, I) with a share p of its elements set to zero and the rest times 1 / (1 - p)."""
    n, width = x.shape
    x, out = x.contiguous(), x.new_empty(n, width)
    grid = triton.cdiv(width, COLUMNS), triton.cdiv(n, 32)
    _dropped[grid](x, seed, out, n, width, *_levels(p), 32, COLUMNS)
    return out


def product_of_dropped(x: Tensor, a: Tensor, seed: Tensor, p: float) -> Tensor:
    """dropped(x) A^T (N, R), in one pass over x."""
    n, width = x.shape
    x, a, out = x.contiguous(), a.to(x.dtype).contiguous(), x.new_empty(n, len(a))
    _product_of_dropped[(triton.cdiv(n, 64),)](
        x,
        a,
        seed,
        out,
        n,
        len(a),
        width,
        *_levels(p),
        rank_columns(len(a)),
        64,
        COLUMNS,
        num_stages=4,
    )
    return out


def dropped_product(y: Tensor, a: Tensor, seed: Tensor, p: float) -> Tensor:
    """dropped(y A) (N, I) of y (N, R), written once."""
    n, width = len(y), a.shape[1]
    y, a, out = y.contiguous(), a.to(y.dtype).contiguous(), y.new_empty(n, width)
    grid = triton.cdiv(width, COLUMNS), triton.cdiv(n, 64)
    _dropped_product[grid](
        y, a, seed, out, n, len(a), width, *_levels(p), rank_columns(len(a)), 64, COLUMNS
    )
    return out


def _levels(p: float) -> tuple[int, float]:
    """The number of 16 bits below which an element is dropped, and what the others are multiplied by."""
    return round(p * _LEVELS), 1 / (1 - p)
