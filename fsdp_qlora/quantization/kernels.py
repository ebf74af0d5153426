"""Triton kernels: 4-bit weights unpacked in one pass, also with an adapter added; tokens quantized.

What each computes is defined where it is used (`fp8.py`, `adapters/lora_ops.py`), in torch, for
other devices.

Shapes: N tokens, I inputs, O outputs, R rank.  W (O, I), A (R, I), B (O, R)
"""
from __future__ import annotations

import torch
from bitsandbytes.functional import get_4bit_type
from torch import Tensor, nn

from .fourbit import BLOCKSIZE, QUANT_TYPES, padded

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without
    triton = None

MOST_TENSORS = 3  # layers of one input that are joined: q, k and v
RANKS = (16, 32, 64, 128)  # of adapters that the kernels take


def decoding(quant_type: str, high: bool) -> str:
    """PTX that turns the high or low halves of 4 bytes into their 4 codes in fp16.

    Byte permutes read a table of 8 bytes in two registers, so four of them hold the first bytes of 16
    codes, and four the second ones. A selector of 3 bits looks into either half of a table; the 4th
    bit chooses between them. fp16 rounds a code by 2^-12, far below what it is then rounded to.
    """
    codes = get_4bit_type(quant_type, device="cpu").half().view(torch.int16).tolist()

    def look_up(shift: int, out: str) -> str:
        places = [[code >> shift & 255 for code in codes[i:i + 4]] for i in (0, 4, 8, 12)]
        words = [sum(byte << 8 * i for i, byte in enumerate(four)) for four in places]
        return ("".join(f"mov.b32 t{i}, {word};" for i, word in enumerate(words))
                + f"prmt.b32 p, t0, t1, s; prmt.b32 q, t2, t3, s; lop3.b32 {out}, q, p, m, 0xE4;")

    halves = "shr.u32 v, $2, 4; and.b32 v, v" if high else "and.b32 v, $2"
    return ("{.reg .b32 v, x, s, m, p, q, first, second, t0, t1, t2, t3;"
            + halves + ", 0x0F0F0F0F;"
            "shr.u32 x, v, 4; or.b32 x, x, v;"                                # two halves in a byte
            "prmt.b32 s, x, 0, 0x4420; and.b32 s, s, 0x7777;"                 # 4 selectors of 3 bits
            "shl.b32 m, v, 4; prmt.b32 m, m, 0, 0xBA98;"                      # the 4th bits, as masks
            + look_up(0, "first") + look_up(8, "second")
            + "prmt.b32 $0, first, second, 0x5140; prmt.b32 $1, first, second, 0x7362;}")


if triton:
    HIGH_NF4, LOW_NF4 = (tl.constexpr(decoding("nf4", high)) for high in (True, False))
    HIGH_FP4, LOW_FP4 = (tl.constexpr(decoding("fp4", high)) for high in (True, False))

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
    def _row_scales(w_ptr, b_ptr, scale_ptr, b8_ptr, STRIDE, O, K, factor, R: tl.constexpr,
                    BO: tl.constexpr, BK: tl.constexpr):
        # The largest of each row of w (O, K), a weight or the absmax of its blocks, and of B.
        rows = (tl.program_id(0) * BO + tl.arange(0, BO)).to(tl.int64)
        inside = rows < O
        largest = tl.zeros((BO, BK), tl.float32)
        for start in range(0, K, BK):
            columns = start + tl.arange(0, BK)
            w = tl.load(w_ptr + rows[:, None] * K + columns[None, :],
                        mask=inside[:, None] & (columns < K)[None, :], other=0.0)
            largest = tl.maximum(largest, tl.abs(w.to(tl.float32)))
        largest = tl.max(largest, 1)
        if R:
            ranks = tl.arange(0, R)
            b = tl.load(b_ptr + rows[:, None] * R + ranks[None, :], mask=inside[:, None], other=0.0)
            b = b.to(tl.float32) * factor
            largest = tl.maximum(largest, tl.max(tl.abs(b), 1))
        scale = tl.maximum(largest / 448.0, 1e-12)
        tl.store(scale_ptr + rows, scale, mask=inside)
        if R:
            tl.store(b8_ptr + rows[:, None] * STRIDE + ranks[None, :],
                     (b / scale[:, None]).to(tl.float8e4nv), mask=inside[:, None])

    @triton.jit
    def _decoded(packed, FP4: tl.constexpr):
        """The codes of bytes' high and low halves, fp16 of the shape of `packed`."""
        high: tl.constexpr = HIGH_FP4 if FP4 else HIGH_NF4
        low: tl.constexpr = LOW_FP4 if FP4 else LOW_NF4
        return (tl.inline_asm_elementwise(high, "=r,=r,r", [packed], dtype=tl.float16, is_pure=True,
                                          pack=4),
                tl.inline_asm_elementwise(low, "=r,=r,r", [packed], dtype=tl.float16, is_pure=True,
                                          pack=4))

    @triton.jit
    def _store_tile(out_ptr, out, rows, columns, inside, STRIDE, TRANSPOSED: tl.constexpr):
        rows, columns = rows.to(tl.int64), columns.to(tl.int64)
        if TRANSPOSED:
            tl.store(out_ptr + columns[:, None] * STRIDE + rows[None, :], tl.trans(out),
                     mask=tl.trans(inside))
        else:
            tl.store(out_ptr + rows[:, None] * STRIDE + columns[None, :], out, mask=inside)

    @triton.jit
    def _fourbit_to_fp8(packed_ptr, absmax_ptr, scale_ptr, out_ptr, STRIDE, O, I, FP4: tl.constexpr,
                        TRANSPOSED: tl.constexpr, BO: tl.constexpr, BLOCKS: tl.constexpr):
        # BLOCKS blocks of 64 inputs of BO rows: 32 bytes and one absmax a block.
        HALF: tl.constexpr = BLOCKS * 32
        rows = tl.program_id(0) * BO + tl.arange(0, BO)
        inside = rows < O
        half = tl.program_id(1) * HALF + tl.arange(0, HALF)
        packed = tl.load(packed_ptr + rows.to(tl.int64)[:, None] * (I // 2) + half[None, :],
                         mask=inside[:, None], other=0)
        high, low = _decoded(packed, FP4)
        blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        absmax = tl.load(absmax_ptr + rows[:, None] * (I // 64) + blocks[None, :],
                         mask=inside[:, None], other=0.0)
        scale = tl.load(scale_ptr + rows, mask=inside, other=1.0)
        factor = (absmax / scale[:, None]).to(tl.float16)[:, :, None]
        high = tl.reshape(tl.reshape(high, (BO, BLOCKS, 32)) * factor, (BO, HALF))
        low = tl.reshape(tl.reshape(low, (BO, BLOCKS, 32)) * factor, (BO, HALF))
        out = tl.interleave(high.to(tl.float8e4nv), low.to(tl.float8e4nv))
        columns = tl.program_id(1) * BLOCKS * 64 + tl.arange(0, BLOCKS * 64)
        _store_tile(out_ptr, out, rows, columns, inside[:, None] & (columns >= 0)[None, :], STRIDE,
                    TRANSPOSED)

    @triton.jit
    def _dense_to_fp8(w_ptr, scale_ptr, out_ptr, STRIDE, O, I, TRANSPOSED: tl.constexpr,
                      BO: tl.constexpr, BI: tl.constexpr):
        rows = tl.program_id(0) * BO + tl.arange(0, BO)
        columns = tl.program_id(1) * BI + tl.arange(0, BI)
        inside = (rows < O)[:, None] & (columns < I)[None, :]
        w = tl.load(w_ptr + rows.to(tl.int64)[:, None] * I + columns[None, :], mask=inside, other=0.0)
        scale = tl.load(scale_ptr + rows, mask=rows < O, other=1.0)
        out = (w.to(tl.float32) / scale[:, None]).to(tl.float8e4nv)
        _store_tile(out_ptr, out, rows, columns, inside, STRIDE, TRANSPOSED)

    @triton.jit
    def _unpack_adapted(packed_ptr, absmax_ptr, a_ptr, b_ptr, out_ptr, O, I, FP4: tl.constexpr,
                        R: tl.constexpr, BO: tl.constexpr, BLOCKS: tl.constexpr):
        # BLOCKS blocks of 64 inputs of BO rows.
        WIDE: tl.constexpr = BLOCKS * 64
        rows, ranks = tl.program_id(0) * BO + tl.arange(0, BO), tl.arange(0, R)
        inside, far = rows < O, rows.to(tl.int64)
        half = tl.program_id(1) * (WIDE // 2) + tl.arange(0, WIDE // 2)
        packed = tl.load(packed_ptr + far[:, None] * (I // 2) + half[None, :], mask=inside[:, None],
                         other=0)
        high, low = _decoded(packed, FP4)
        blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        absmax = tl.load(absmax_ptr + rows[:, None] * (I // 64) + blocks[None, :],
                         mask=inside[:, None], other=0.0)
        weight = tl.reshape(tl.interleave(high, low).to(tl.float32), (BO, BLOCKS, 64))
        weight = tl.reshape(weight * absmax[:, :, None], (BO, WIDE))
        columns = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        b = tl.load(b_ptr + rows[:, None] * R + ranks[None, :], mask=inside[:, None], other=0.0)
        a = tl.load(a_ptr + ranks[:, None] * I + columns[None, :])
        weight = tl.dot(b, a, weight)
        tl.store(out_ptr + far[:, None] * I + columns[None, :], weight.to(tl.bfloat16),
                 mask=inside[:, None])


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


def row_scales_on_gpu(weight: Tensor, b: Tensor | None = None, factor: float = 1.0,
                      b8: Tensor | None = None) -> Tensor:
    """`fp8.row_scale` of a weight (O, I), or of its absmax (O, I/64), and its B (O, R).

    B, scaled, goes into `b8` (O, R).
    """
    rows, columns = weight.shape
    scale = torch.empty(rows, dtype=torch.float32, device=weight.device)
    _row_scales[(triton.cdiv(rows, 16),)](
        weight, b, scale, b8, 0 if b8 is None else b8.stride(0), rows, columns, factor,
        0 if b is None else b.shape[1], 16, min(256, triton.next_power_of_2(columns)), num_warps=4)
    return scale


def fourbit_to_fp8(weight: Tensor, absmax: Tensor, in_features: int, quant_type: str, scale: Tensor,
                   transposed: bool, out: Tensor):
    """Packed 4-bit rows to fp8 in one pass, into `out`: (O, I), or (I, O) if `transposed`."""
    assert padded(in_features) == in_features and out.stride(1) == 1
    rows, tall = weight.shape[0], 64 if transposed else 32
    blocks = blocks_of_a_tile(in_features, 4)
    grid = (triton.cdiv(rows, tall), in_features // BLOCKSIZE // blocks)
    _fourbit_to_fp8[grid](weight.view(torch.uint8), absmax, scale, out, out.stride(0), rows,
                          in_features, quant_type == "fp4", transposed, tall, blocks,
                          num_warps=8 if transposed else 4)


def dense_to_fp8(weight: Tensor, scale: Tensor, transposed: bool, out: Tensor):
    """A weight (O, I) over its rows' scales to fp8 in one pass: (O, I), or (I, O) if `transposed`."""
    rows, columns = weight.shape
    assert weight.is_contiguous() and out.stride(1) == 1
    grid = (triton.cdiv(rows, 64), triton.cdiv(columns, 128))
    _dense_to_fp8[grid](weight, scale, out, out.stride(0), rows, columns, transposed, 64, 128,
                        num_warps=8)


def blocks_of_a_tile(in_features: int, most: int) -> int:
    """The largest power of two, up to `most`, of blocks that divides a row."""
    blocks = in_features // BLOCKSIZE
    return min(most, blocks & -blocks)


def can_unpack_adapted(weight: Tensor, in_features: int, quant_type: str, rank: int,
                       dtype: torch.dtype) -> bool:
    """Whether `unpack_adapted` takes such a layer."""
    return (weight.is_cuda and triton is not None and quant_type in QUANT_TYPES
            and dtype == torch.bfloat16 and in_features % BLOCKSIZE == 0 and rank <= RANKS[-1])


def unpack_adapted(weight: Tensor, absmax: Tensor, in_features: int, quant_type: str, a: Tensor,
                   b: Tensor, scaling: float) -> Tensor:
    """W + scaling B A as bf16 (O, I): summed in fp32, rounded once. absmax is fp32 (O, I/64)."""
    rows, rank = weight.shape[0], rank_columns(b.shape[1])
    out = torch.empty(rows, in_features, dtype=torch.bfloat16, device=weight.device)
    a = with_rows(a.to(torch.bfloat16), rank).contiguous()
    b = with_columns((b * scaling).to(torch.bfloat16), rank)
    blocks = blocks_of_a_tile(in_features, 2)
    grid = (triton.cdiv(rows, 64), in_features // BLOCKSIZE // blocks)
    _unpack_adapted[grid](weight.view(torch.uint8), absmax, a, b, out, rows, in_features,
                          quant_type == "fp4", rank, 64, blocks, num_warps=8)
    return out


def rank_columns(rank: int) -> int:
    """The columns that an adapter of this rank takes in a joined product: a power of two, from 16 on."""
    return max(RANKS[0], 1 << (rank - 1).bit_length())


def with_columns(x: Tensor, columns: int) -> Tensor:
    """x (N, R) with columns of zeros behind it."""
    return x if x.shape[1] == columns else nn.functional.pad(x, (0, columns - x.shape[1]))


def with_rows(x: Tensor, rows: int) -> Tensor:
    """x (R, N) with rows of zeros below it."""
    return x if len(x) == rows else nn.functional.pad(x, (0, 0, 0, rows - len(x)))
