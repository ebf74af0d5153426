"""Triton kernels that make fp8 of tokens, of frozen weights, and of an adapter's factors.

What each computes is defined in `fp8.py`, in torch, for other devices.

Shapes: N tokens, I inputs, O outputs, R rank.  W (O, I), A (R, I), B (O, R)
"""

from __future__ import annotations

import torch
from torch import Tensor

from .absmax import BLOCKSIZE, padded
from .formats import FrozenWeight
from .kernels import blocks_of_a_tile, triton

MOST_TENSORS = 3  # layers of one input that are joined: q, k and v

if triton:
    import triton.language as tl

    from .kernels import decoded

    @triton.jit
    def _scaled_row(x_ptr, column_scale_ptr, factor, row, K, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + columns, mask=columns < K, other=0.0).to(tl.float32) * factor
        if column_scale_ptr is not None:
            x *= tl.load(column_scale_ptr + columns, mask=columns < K, other=0.0)
        return x

    @triton.jit
    def _store_row(out_ptr, x, K, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        tl.store(out_ptr + columns, x.to(tl.float8e4nv), mask=columns < K)

    @triton.jit
    def _quantize_tokens(
        x_ptr,
        y_ptr,
        z_ptr,
        u_ptr,
        xc_ptr,
        yc_ptr,
        zc_ptr,
        uc_ptr,
        fx,
        fy,
        fz,
        fu,
        out_ptr,
        scale_ptr,
        WIDE,
        KX,
        KY,
        KZ,
        KU,
        COUNT: tl.constexpr,
        BX: tl.constexpr,
        BY: tl.constexpr,
        BZ: tl.constexpr,
        BU: tl.constexpr,
    ):
        # COUNT rows side by side under one scale, each of which stays in registers meanwhile; the
        # first is filled up with zeros to WIDE columns.
        row = tl.program_id(0).to(tl.int64)
        x = _scaled_row(x_ptr, xc_ptr, fx, row, KX, BX)
        largest = tl.max(tl.abs(x), 0)
        if COUNT > 1:
            y = _scaled_row(y_ptr, yc_ptr, fy, row, KY, BY)
            largest = tl.maximum(largest, tl.max(tl.abs(y), 0))
        if COUNT > 2:
            z = _scaled_row(z_ptr, zc_ptr, fz, row, KZ, BZ)
            largest = tl.maximum(largest, tl.max(tl.abs(z), 0))
        if COUNT > 3:
            u = _scaled_row(u_ptr, uc_ptr, fu, row, KU, BU)
            largest = tl.maximum(largest, tl.max(tl.abs(u), 0))
        scale = tl.maximum(largest / 448.0, 1e-12)
        tl.store(scale_ptr + row, scale)
        out_ptr += row * (WIDE + KY + KZ + KU)
        _store_row(out_ptr, x / scale, WIDE, BX)
        if COUNT > 1:
            _store_row(out_ptr + WIDE, y / scale, KY, BY)
        if COUNT > 2:
            _store_row(out_ptr + WIDE + KY, z / scale, KZ, BZ)
        if COUNT > 3:
            _store_row(out_ptr + WIDE + KY + KZ, u / scale, KU, BU)

    @triton.jit
    def _row_scales(w_ptr, scale_ptr, O, K, BO: tl.constexpr, BK: tl.constexpr):
        # The largest of each row of w (O, K), a weight or the absmax of its blocks.
        rows = (tl.program_id(0) * BO + tl.arange(0, BO)).to(tl.int64)
        inside = rows < O
        largest = tl.zeros((BO, BK), tl.float32)
        for start in range(0, K, BK):
            columns = start + tl.arange(0, BK)
            w = tl.load(
                w_ptr + rows[:, None] * K + columns[None, :],
                mask=inside[:, None] & (columns < K)[None, :],
                other=0.0,
            )
            largest = tl.maximum(largest, tl.abs(w.to(tl.float32)))
        scale = tl.maximum(tl.max(largest, 1) / 448.0, 1e-12)
        tl.store(scale_ptr + rows, scale, mask=inside)

    @triton.jit
    def _scaled_tile(x_ptr, scale_ptr, rows, columns, N, R, ROW_STRIDE, COLUMN_STRIDE):
        # A tile of x (N, R), any strides, over its rows' scales if there are some.
        inside = (rows < N)[:, None] & ((columns >= 0) & (columns < R))[None, :]
        x = tl.load(
            x_ptr + rows[:, None] * ROW_STRIDE + columns[None, :] * COLUMN_STRIDE,
            mask=inside,
            other=0.0,
        ).to(tl.float32)
        if scale_ptr is not None:
            x /= tl.load(scale_ptr + rows, mask=rows < N, other=1.0)[:, None]
        return x

    @triton.jit
    def _largest_of_columns(
        x_ptr,
        scale_ptr,
        part_ptr,
        N,
        R,
        ROW_STRIDE,
        COLUMN_STRIDE,
        BN: tl.constexpr,
        BR: tl.constexpr,
    ):
        # Of BN rows: what is the largest of all of them is for the next kernel to find.
        rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
        columns = tl.program_id(1) * BR + tl.arange(0, BR)
        x = _scaled_tile(x_ptr, scale_ptr, rows, columns, N, R, ROW_STRIDE, COLUMN_STRIDE)
        tl.store(part_ptr + tl.program_id(0) * R + columns, tl.max(tl.abs(x), 0), mask=columns < R)

    @triton.jit
    def _columns_to_fp8(
        x_ptr,
        scale_ptr,
        part_ptr,
        inverse_ptr,
        out_ptr,
        STRIDE,
        N,
        R,
        WIDE,
        FIRST,
        PARTS,
        ROW_STRIDE,
        COLUMN_STRIDE,
        most,
        end,
        times,
        BN: tl.constexpr,
        BR: tl.constexpr,
        BP: tl.constexpr,
    ):
        # x's columns go to those of `out` from FIRST on; WIDE columns are written in all.
        rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
        there = tl.program_id(1) * BR + tl.arange(0, BR)
        columns = there - FIRST
        inside = (columns >= 0) & (columns < R)
        largest = tl.zeros((BP, BR), tl.float32)
        for start in range(0, PARTS, BP):
            parts = start + tl.arange(0, BP)
            largest = tl.maximum(
                largest,
                tl.load(
                    part_ptr + parts[:, None] * R + columns[None, :],
                    mask=(parts < PARTS)[:, None] & inside[None, :],
                    other=0.0,
                ),
            )
        factor = tl.minimum(end / tl.maximum(tl.max(largest, 0), 1e-30), most)
        if tl.program_id(0) == 0:
            tl.store(inverse_ptr + columns, times / factor, mask=inside)
        x = _scaled_tile(x_ptr, scale_ptr, rows, columns, N, R, ROW_STRIDE, COLUMN_STRIDE)
        tl.store(
            out_ptr + rows[:, None] * STRIDE + there[None, :],
            (x * factor[None, :]).to(tl.float8e4nv),
            mask=(rows < N)[:, None] & (there < WIDE)[None, :],
        )

    @triton.jit
    def _store_tile(
        out_ptr,
        out,
        rows,
        columns,
        inside,
        STRIDE,
        EXPERT_ROWS,
        EXPERT_STRIDE,
        TRANSPOSED: tl.constexpr,
    ):
        # All rows of a tile are one expert's, whose output begins at a place of its own.
        expert = tl.min(rows, 0) // EXPERT_ROWS
        out_ptr += expert.to(tl.int64) * EXPERT_STRIDE
        rows, columns = (rows - expert * EXPERT_ROWS).to(tl.int64), columns.to(tl.int64)
        if TRANSPOSED:
            tl.store(
                out_ptr + columns[:, None] * STRIDE + rows[None, :],
                tl.trans(out),
                mask=tl.trans(inside),
            )
        else:
            tl.store(out_ptr + rows[:, None] * STRIDE + columns[None, :], out, mask=inside)

    @triton.jit
    def _fourbit_to_fp8(
        packed_ptr,
        absmax_ptr,
        scale_ptr,
        out_ptr,
        STRIDE,
        EXPERT_ROWS,
        EXPERT_STRIDE,
        O,
        I,
        FP4: tl.constexpr,
        TRANSPOSED: tl.constexpr,
        BO: tl.constexpr,
        BLOCKS: tl.constexpr,
    ):
        # BLOCKS blocks of 64 inputs of BO rows: 32 bytes and one absmax a block.
        HALF: tl.constexpr = BLOCKS * 32
        rows = tl.program_id(0) * BO + tl.arange(0, BO)
        inside = rows < O
        half = tl.program_id(1) * HALF + tl.arange(0, HALF)
        packed = tl.load(
            packed_ptr + rows.to(tl.int64)[:, None] * (I // 2) + half[None, :],
            mask=inside[:, None],
            other=0,
        )
        high, low = decoded(packed, FP4)
        blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        absmax = tl.load(
            absmax_ptr + rows[:, None] * (I // 64) + blocks[None, :],
            mask=inside[:, None],
            other=0.0,
        )
        scale = tl.load(scale_ptr + rows, mask=inside, other=1.0)
        factor = (absmax / scale[:, None]).to(tl.float16)[:, :, None]
        high = tl.reshape(tl.reshape(high, (BO, BLOCKS, 32)) * factor, (BO, HALF))
        low = tl.reshape(tl.reshape(low, (BO, BLOCKS, 32)) * factor, (BO, HALF))
        out = tl.interleave(high.to(tl.float8e4nv), low.to(tl.float8e4nv))
        columns = tl.program_id(1) * BLOCKS * 64 + tl.arange(0, BLOCKS * 64)
        _store_tile(
            out_ptr,
            out,
            rows,
            columns,
            inside[:, None] & (columns >= 0)[None, :],
            STRIDE,
            EXPERT_ROWS,
            EXPERT_STRIDE,
            TRANSPOSED,
        )

    @triton.jit
    def _dense_to_fp8(
        w_ptr,
        scale_ptr,
        out_ptr,
        STRIDE,
        EXPERT_ROWS,
        EXPERT_STRIDE,
        O,
        I,
        TRANSPOSED: tl.constexpr,
        BO: tl.constexpr,
        BI: tl.constexpr,
    ):
        rows = tl.program_id(0) * BO + tl.arange(0, BO)
        columns = tl.program_id(1) * BI + tl.arange(0, BI)
        inside = (rows < O)[:, None] & (columns < I)[None, :]
        w = tl.load(
            w_ptr + rows.to(tl.int64)[:, None] * I + columns[None, :], mask=inside, other=0.0
        )
        scale = tl.load(scale_ptr + rows, mask=rows < O, other=1.0)
        out = (w.to(tl.float32) / scale[:, None]).to(tl.float8e4nv)
        _store_tile(
            out_ptr, out, rows, columns, inside, STRIDE, EXPERT_ROWS, EXPERT_STRIDE, TRANSPOSED
        )


def quantize_tokens_on_gpu(
    xs: list[Tensor], factors: list[float], column_scales: list[Tensor | None] | None, wide: int
) -> tuple[Tensor, Tensor]:
    """`fp8.quantize_tokens` in one pass, of one to four tensors."""
    n, device, widths = xs[0].shape[0], xs[0].device, [x.shape[1] for x in xs]
    out = torch.empty(n, wide + sum(widths[1:]), dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(n, dtype=torch.float32, device=device)
    more = MOST_TENSORS + 1 - len(xs)
    widths += [0] * more
    blocks = [triton.next_power_of_2(max(k, 1)) for k in (wide, *widths[1:])]
    together = sum(blocks)
    _quantize_tokens[(n,)](
        *xs,
        *[None] * more,
        *(column_scales or [None] * len(xs)),
        *[None] * more,
        *factors,
        *[1.0] * more,
        out,
        scale,
        wide,
        *widths,
        len(xs),
        *blocks,
        num_warps=4 if together <= 6144 else 8 if together <= 20000 else 16,
    )
    return out, scale


def row_scales_on_gpu(weight: Tensor) -> Tensor:
    """`fp8.row_scale` of a weight (O, I), or of its absmax (O, I/64)."""
    rows, columns = weight.shape
    scale = torch.empty(rows, dtype=torch.float32, device=weight.device)
    _row_scales[(triton.cdiv(rows, 16),)](
        weight, scale, rows, columns, 16, min(256, triton.next_power_of_2(columns)), num_warps=4
    )
    return scale


def columns_to_fp8_on_gpu(
    x: Tensor,
    row_scale: Tensor | None,
    most: float,
    end: float,
    out: Tensor,
    first: int = 0,
    times: float = 1.0,
) -> Tensor:
    """`fp8.columns_to_fp8`: one pass for the largest of each column, one that writes."""
    (rows, rank), wide = x.shape, out.shape[1]
    tall, broad = 128, min(64, triton.next_power_of_2(wide))
    parts = triton.cdiv(rows, tall)
    part = torch.empty(parts, rank, dtype=torch.float32, device=x.device)
    inverse = torch.empty(rank, dtype=torch.float32, device=x.device)
    grid, strides = (parts, triton.cdiv(wide, broad)), x.stride()
    _largest_of_columns[grid](x, row_scale, part, rows, rank, *strides, tall, broad, num_warps=4)
    _columns_to_fp8[grid](
        x,
        row_scale,
        part,
        inverse,
        out,
        out.stride(0),
        rows,
        rank,
        wide,
        first,
        parts,
        *strides,
        most,
        end,
        times,
        tall,
        broad,
        16,
        num_warps=4,
    )
    return inverse


def fourbit_to_fp8(w: FrozenWeight, scale: Tensor, transposed: bool, out: Tensor):
    """`fp8.weight_to_fp8` of packed 4-bit rows in one pass, into `out`."""
    assert padded(w.in_features) == w.in_features and out.stride(-1) == 1
    rows, tall = w.weight.shape[0], 64 if transposed else 32
    blocks = blocks_of_a_tile(w.in_features, 4)
    grid = (triton.cdiv(rows, tall), w.in_features // BLOCKSIZE // blocks)
    _fourbit_to_fp8[grid](
        w.weight.view(torch.uint8),
        w.absmax,
        scale,
        out,
        out.stride(-2),
        *_experts_of(out, rows),
        rows,
        w.in_features,
        w.quant_type == "fp4",
        transposed,
        tall,
        blocks,
        num_warps=8 if transposed else 4,
    )


def dense_to_fp8(weight: Tensor, scale: Tensor, transposed: bool, out: Tensor):
    """`fp8.weight_to_fp8` of a weight (O, I) in one pass, into `out`."""
    rows, columns = weight.shape
    assert weight.is_contiguous() and out.stride(-1) == 1
    grid = (triton.cdiv(rows, 64), triton.cdiv(columns, 128))
    _dense_to_fp8[grid](
        weight,
        scale,
        out,
        out.stride(-2),
        *_experts_of(out, rows),
        rows,
        columns,
        transposed,
        64,
        128,
        num_warps=8,
    )


def _experts_of(out: Tensor, rows: int) -> tuple[int, int]:
    """Rows of an expert, and values between where the outputs of two begin; without experts, all rows."""
    return (out.shape[2], out.stride(0)) if out.dim() == 3 else (rows, 0)
