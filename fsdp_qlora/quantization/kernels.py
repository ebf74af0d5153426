"""Triton kernels: 4-bit weights unpacked in one pass, also with an adapter added; tokens quantized.

What each computes is defined where it is used (`fp8.py`, `adapters/lora_ops.py`), in torch, for
other devices.

Shapes: N tokens, I inputs, O outputs, R rank.  W (O, I), A (R, I), B (O, R)
"""
from __future__ import annotations

from functools import cache

import torch
from bitsandbytes.functional import get_4bit_type
from torch import Tensor

from .fourbit import BLOCKSIZE, QUANT_TYPES, padded

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without
    triton = None

MOST_TENSORS = 3  # layers of one input that are joined: q, k and v
RANKS = (16, 32, 64, 128)  # of adapters that the kernels take

if triton:
    @triton.jit
    def _scaled_row(x_ptr, column_scale_ptr, factor, row, K, HAS_COLUMNS: tl.constexpr,
                    BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + columns, mask=columns < K, other=0.0).to(tl.float32) * factor
        if HAS_COLUMNS: x *= tl.load(column_scale_ptr + columns, mask=columns < K, other=0.0)
        return x

    @triton.jit
    def _store_row(out_ptr, x, K, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        tl.store(out_ptr + columns, x.to(tl.float8e4nv), mask=columns < K)

    @triton.jit
    def _quantize_tokens(x_ptr, y_ptr, z_ptr, u_ptr, xc_ptr, yc_ptr, zc_ptr, uc_ptr, fx, fy, fz, fu,
                         out_ptr, scale_ptr, KX, KY, KZ, KU, COUNT: tl.constexpr,
                         HAS_COLUMNS: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
                         BZ: tl.constexpr, BU: tl.constexpr):
        # COUNT rows side by side under one scale, each of which stays in registers meanwhile.
        row = tl.program_id(0).to(tl.int64)
        x = _scaled_row(x_ptr, xc_ptr, fx, row, KX, HAS_COLUMNS, BX)
        largest = tl.max(tl.abs(x), 0)
        if COUNT > 1:
            y = _scaled_row(y_ptr, yc_ptr, fy, row, KY, HAS_COLUMNS, BY)
            largest = tl.maximum(largest, tl.max(tl.abs(y), 0))
        if COUNT > 2:
            z = _scaled_row(z_ptr, zc_ptr, fz, row, KZ, HAS_COLUMNS, BZ)
            largest = tl.maximum(largest, tl.max(tl.abs(z), 0))
        if COUNT > 3:
            u = _scaled_row(u_ptr, uc_ptr, fu, row, KU, HAS_COLUMNS, BU)
            largest = tl.maximum(largest, tl.max(tl.abs(u), 0))
        scale = tl.maximum(largest / 448.0, 1e-12)
        tl.store(scale_ptr + row, scale)
        out_ptr += row * (KX + KY + KZ + KU)
        _store_row(out_ptr, x / scale, KX, BX)
        if COUNT > 1: _store_row(out_ptr + KX, y / scale, KY, BY)
        if COUNT > 2: _store_row(out_ptr + KX + KY, z / scale, KZ, BZ)
        if COUNT > 3: _store_row(out_ptr + KX + KY + KZ, u / scale, KU, BU)

    @triton.jit
    def _row_scales(absmax_ptr, b_ptr, scale_ptr, b8_ptr, STRIDE, O, BLOCKS, factor,
                    R: tl.constexpr, BO: tl.constexpr, BB: tl.constexpr):
        rows, blocks = tl.program_id(0) * BO + tl.arange(0, BO), tl.arange(0, BB)
        inside = rows < O
        absmax = tl.load(absmax_ptr + rows[:, None] * BLOCKS + blocks[None, :],
                         mask=inside[:, None] & (blocks < BLOCKS)[None, :], other=0.0)
        largest = tl.max(absmax, 1)
        if R:
            ranks = tl.arange(0, R)
            b = tl.load(b_ptr + rows[:, None] * R + ranks[None, :], mask=inside[:, None], other=0.0)
            b = b.to(tl.float32) * factor
            largest = tl.maximum(largest, tl.max(tl.abs(b), 1))
        scale = tl.maximum(largest / 448.0, 1e-12)
        tl.store(scale_ptr + rows, scale, mask=inside)
        if R:
            tl.store(b8_ptr + rows.to(tl.int64)[:, None] * STRIDE + ranks[None, :],
                     (b / scale[:, None]).to(tl.float8e4nv), mask=inside[:, None])

    @triton.jit
    def _lookup(index, code_ptr):
        """code[index] for 4-bit indices by halving: 15 selections are faster than loads."""
        odd, two, four, eight = index & 1, index & 2, index & 4, index & 8
        a = tl.where(odd == 1, tl.load(code_ptr + 1), tl.load(code_ptr))
        b = tl.where(odd == 1, tl.load(code_ptr + 3), tl.load(code_ptr + 2))
        c = tl.where(odd == 1, tl.load(code_ptr + 5), tl.load(code_ptr + 4))
        d = tl.where(odd == 1, tl.load(code_ptr + 7), tl.load(code_ptr + 6))
        low = tl.where(four == 0, tl.where(two == 0, a, b), tl.where(two == 0, c, d))
        a = tl.where(odd == 1, tl.load(code_ptr + 9), tl.load(code_ptr + 8))
        b = tl.where(odd == 1, tl.load(code_ptr + 11), tl.load(code_ptr + 10))
        c = tl.where(odd == 1, tl.load(code_ptr + 13), tl.load(code_ptr + 12))
        d = tl.where(odd == 1, tl.load(code_ptr + 15), tl.load(code_ptr + 14))
        high = tl.where(four == 0, tl.where(two == 0, a, b), tl.where(two == 0, c, d))
        return tl.where(eight == 0, low, high)

    @triton.jit
    def _nf4_to_fp8(packed_ptr, absmax_ptr, code_ptr, scale_ptr, out_ptr, STRIDE, O, I,
                    TRANSPOSED: tl.constexpr, BO: tl.constexpr):
        # One block of 64 inputs of BO rows: 32 bytes a row, one absmax a row.
        rows = tl.program_id(0) * BO + tl.arange(0, BO)
        block, inside = tl.program_id(1), rows < O
        half = block * 32 + tl.arange(0, 32)
        packed = tl.load(packed_ptr + rows[:, None] * (I // 2) + half[None, :],
                         mask=inside[:, None], other=0).to(tl.int32)
        absmax = tl.load(absmax_ptr + rows * (I // 64) + block, mask=inside, other=0.0)
        factor = (absmax / tl.load(scale_ptr + rows, mask=inside, other=1.0))[:, None]
        high = (_lookup(packed >> 4, code_ptr) * factor).to(tl.float8e4nv)
        low = (_lookup(packed & 15, code_ptr) * factor).to(tl.float8e4nv)
        out = tl.interleave(high, low)  # (BO, 64)
        columns, rows = (block * 64 + tl.arange(0, 64)).to(tl.int64), rows.to(tl.int64)
        if TRANSPOSED:
            tl.store(out_ptr + columns[:, None] * STRIDE + rows[None, :], tl.trans(out),
                     mask=inside[None, :])
        else:
            tl.store(out_ptr + rows[:, None] * STRIDE + columns[None, :], out, mask=inside[:, None])

    @triton.jit
    def _unpack_adapted(packed_ptr, absmax_ptr, code_ptr, a_ptr, b_ptr, out_ptr, O, I,
                        R: tl.constexpr, BO: tl.constexpr, BLOCKS: tl.constexpr):
        # BO rows and BLOCKS blocks of 64 inputs: B is read once for all of them.
        rows, ranks = tl.program_id(0) * BO + tl.arange(0, BO), tl.arange(0, R)
        inside = rows < O
        b = tl.load(b_ptr + rows[:, None] * R + ranks[None, :], mask=inside[:, None], other=0.0)
        rows = rows.to(tl.int64)
        for i in range(BLOCKS):
            block = tl.program_id(1) * BLOCKS + i
            columns = block * 64 + tl.arange(0, 64)
            there = inside[:, None] & (columns < I)[None, :]
            a = tl.load(a_ptr + ranks[:, None] * I + columns[None, :],
                        mask=(columns < I)[None, :], other=0.0)
            half = block * 32 + tl.arange(0, 32)
            packed = tl.load(packed_ptr + rows[:, None] * (I // 2) + half[None, :],
                             mask=inside[:, None] & (half < I // 2)[None, :], other=0).to(tl.int32)
            absmax = tl.load(absmax_ptr + rows * (I // 64) + block,
                             mask=inside & (block < I // 64), other=0.0)[:, None]
            weight = tl.interleave(_lookup(packed >> 4, code_ptr) * absmax,
                                   _lookup(packed & 15, code_ptr) * absmax)
            weight += tl.dot(b, a)
            tl.store(out_ptr + rows[:, None] * I + columns[None, :], weight.to(tl.bfloat16), mask=there)


def quantize_tokens_on_gpu(xs: list[Tensor], factors: list[float],
                           column_scales: list[Tensor] | None) -> tuple[Tensor, Tensor]:
    """`fp8.quantize_tokens` in one pass, of one to four tensors."""
    n, device, widths = xs[0].shape[0], xs[0].device, [x.shape[1] for x in xs]
    out = torch.empty(n, sum(widths), dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(n, dtype=torch.float32, device=device)
    more = MOST_TENSORS + 1 - len(xs)
    widths += [0] * more
    blocks = [triton.next_power_of_2(max(k, 1)) for k in widths]
    wide = sum(blocks)
    _quantize_tokens[(n,)](*xs, *[None] * more, *(column_scales or [None] * len(xs)), *[None] * more,
                           *factors, *[1.0] * more, out, scale, *widths, len(xs),
                           column_scales is not None, *blocks,
                           num_warps=4 if wide <= 6144 else 8 if wide <= 20000 else 16)
    return out, scale


def row_scales_on_gpu(absmax: Tensor, b: Tensor | None = None, factor: float = 1.0,
                      b8: Tensor | None = None) -> Tensor:
    """`fp8.row_scale` of a 4-bit weight and its B (O, R); B, scaled, goes into `b8` (O, R)."""
    rows, blocks = absmax.shape
    scale = torch.empty(rows, dtype=torch.float32, device=absmax.device)
    _row_scales[(triton.cdiv(rows, 16),)](absmax, b, scale, b8, 0 if b8 is None else b8.stride(0),
                                          rows, blocks, factor, 0 if b is None else b.shape[1], 16,
                                          triton.next_power_of_2(blocks), num_warps=4)
    return scale


@cache
def code_table(quant_type: str, device: torch.device) -> Tensor:
    """The 16 values of a 4-bit code, fp32; made once, since making it waits for the GPU."""
    return get_4bit_type(quant_type, device=device)


def nf4_to_fp8(weight: Tensor, absmax: Tensor, in_features: int, quant_type: str, scale: Tensor,
               transposed: bool, out: Tensor):
    """Packed 4-bit rows to fp8 in one pass, into `out`: (O, I), or (I, O) if `transposed`."""
    assert padded(in_features) == in_features and out.stride(1) == 1
    rows, block = weight.shape[0], 128
    grid = (triton.cdiv(rows, block), in_features // BLOCKSIZE)
    _nf4_to_fp8[grid](weight.view(torch.uint8), absmax, code_table(quant_type, weight.device), scale,
                      out, out.stride(0), rows, in_features, transposed, block, num_warps=4)


def can_unpack_adapted(weight: Tensor, in_features: int, quant_type: str, rank: int,
                       dtype: torch.dtype) -> bool:
    """Whether `unpack_adapted` takes such a layer."""
    return (weight.is_cuda and triton is not None and quant_type in QUANT_TYPES
            and dtype == torch.bfloat16 and in_features % BLOCKSIZE == 0
            and rank in RANKS)


def unpack_adapted(weight: Tensor, absmax: Tensor, in_features: int, quant_type: str, a: Tensor,
                   b: Tensor, scaling: float) -> Tensor:
    """W + scaling B A as bf16 (O, I): summed in fp32, rounded once. absmax is fp32 (O, I/64)."""
    rows = weight.shape[0]
    out = torch.empty(rows, in_features, dtype=torch.bfloat16, device=weight.device)
    a, b = a.to(torch.bfloat16).contiguous(), (b * scaling).to(torch.bfloat16)
    _unpack_adapted[(triton.cdiv(rows, 64), in_features // BLOCKSIZE)](
        weight.view(torch.uint8), absmax, code_table(quant_type, weight.device), a, b, out, rows,
        in_features, b.shape[1], 64, 1, num_warps=4)
    return out
