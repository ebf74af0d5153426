"""Triton kernels: how 4-bit codes are unpacked, and a weight with its adapter added on the way.

Those for fp8 are in `fp8_kernels.py`. Other devices do the same in torch (`adapters/lora_ops.py`).

Shapes: I inputs, O outputs, R rank.  W (O, I), A (R, I), B (O, R); those of E experts below each other
"""

from __future__ import annotations

import torch
from bitsandbytes.functional import get_4bit_type
from torch import Tensor

from ..choices import FORMATS
from .absmax import BLOCKSIZE
from .formats import FrozenWeight

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without
    triton = None

_RANKS = (16, 32, 64, 128)  # of adapters that the kernels take
_TILE_ROWS = 64  # of W that a program unpacks


def _decoding(quant_type: str, high: bool) -> str:
    """PTX that turns the high or low halves of 4 bytes into their 4 codes in fp16.

    Byte permutes read a table of 8 bytes in two registers, so four of them hold the first bytes of 16
    codes, and four the second ones. A selector of 3 bits looks into either half of a table; the 4th
    bit chooses between them. fp16 rounds a code by 2^-12, far below what it is then rounded to.
    """
    codes = get_4bit_type(quant_type, device="cpu").half().view(torch.int16).tolist()

    def look_up(shift: int, out: str) -> str:
        places = [[code >> shift & 255 for code in codes[i : i + 4]] for i in (0, 4, 8, 12)]
        words = [sum(byte << 8 * i for i, byte in enumerate(four)) for four in places]
        return (
            "".join(f"mov.b32 t{i}, {word};" for i, word in enumerate(words))
            + f"prmt.b32 p, t0, t1, s; prmt.b32 q, t2, t3, s; lop3.b32 {out}, q, p, m, 0xE4;"
        )

    halves = "shr.u32 v, $2, 4; and.b32 v, v" if high else "and.b32 v, $2"
    return (
        "{.reg .b32 v, x, s, m, p, q, first, second, t0, t1, t2, t3;" + halves + ", 0x0F0F0F0F;"
        "shr.u32 x, v, 4; or.b32 x, x, v;"  # two halves in a byte
        "prmt.b32 s, x, 0, 0x4420; and.b32 s, s, 0x7777;"  # 4 selectors of 3 bits
        "shl.b32 m, v, 4; prmt.b32 m, m, 0, 0xBA98;"  # the 4th bits, as masks
        + look_up(0, "first")
        + look_up(8, "second")
        + "prmt.b32 $0, first, second, 0x5140; prmt.b32 $1, first, second, 0x7362;}"
    )


if triton:
    HIGH_NF4, LOW_NF4 = (tl.constexpr(_decoding("nf4", high)) for high in (True, False))
    HIGH_FP4, LOW_FP4 = (tl.constexpr(_decoding("fp4", high)) for high in (True, False))

    @triton.jit
    def decoded(packed, FP4: tl.constexpr):
        """The codes of bytes' high and low halves, fp16 of the shape of `packed`."""
        high: tl.constexpr = HIGH_FP4 if FP4 else HIGH_NF4
        low: tl.constexpr = LOW_FP4 if FP4 else LOW_NF4
        return (
            tl.inline_asm_elementwise(
                high, "=r,=r,r", [packed], dtype=tl.float16, is_pure=True, pack=4
            ),
            tl.inline_asm_elementwise(
                low, "=r,=r,r", [packed], dtype=tl.float16, is_pure=True, pack=4
            ),
        )

    @triton.jit
    def _unpack_adapted(
        packed_ptr,
        absmax_ptr,
        a_ptr,
        b_ptr,
        out_ptr,
        O,
        I,
        EXPERT_ROWS,
        RANK,
        scaling,
        FP4: tl.constexpr,
        R: tl.constexpr,
        BO: tl.constexpr,
        BLOCKS: tl.constexpr,
    ):
        # BLOCKS blocks of 64 inputs of BO rows, all of one expert; R is 0 without an adapter, else RANK
        # filled up. A and B are cast here, where that takes no launches of its own.
        WIDE: tl.constexpr = BLOCKS * 64
        rows = tl.program_id(0) * BO + tl.arange(0, BO)
        inside, far = rows < O, rows.to(tl.int64)
        half = tl.program_id(1) * (WIDE // 2) + tl.arange(0, WIDE // 2)
        packed = tl.load(
            packed_ptr + far[:, None] * (I // 2) + half[None, :], mask=inside[:, None], other=0
        )
        high, low = decoded(packed, FP4)
        blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        absmax = tl.load(
            absmax_ptr + rows[:, None] * (I // 64) + blocks[None, :],
            mask=inside[:, None],
            other=0.0,
        )
        weight = tl.reshape(tl.interleave(high, low).to(tl.float32), (BO, BLOCKS, 64))
        weight = tl.reshape(weight * absmax[:, :, None], (BO, WIDE))
        columns = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        if R > 0:
            ranks, expert = tl.arange(0, R), tl.program_id(0) * BO // EXPERT_ROWS
            there = ranks < RANK
            b = tl.load(
                b_ptr + rows[:, None] * RANK + ranks[None, :],
                mask=inside[:, None] & there[None, :],
                other=0.0,
            )
            a = tl.load(
                a_ptr + (expert * RANK + ranks[:, None]) * I + columns[None, :],
                mask=there[:, None],
                other=0.0,
            )
            b = (b.to(tl.float32) * scaling).to(tl.bfloat16)
            weight = tl.dot(b, a.to(tl.bfloat16), weight)
        tl.store(
            out_ptr + far[:, None] * I + columns[None, :],
            weight.to(tl.bfloat16),
            mask=inside[:, None],
        )


def blocks_of_a_tile(in_features: int, most: int) -> int:
    """The largest power of two, up to `most`, of blocks that divides a row."""
    blocks = in_features // BLOCKSIZE
    return min(most, blocks & -blocks)


def can_unpack_experts(w: FrozenWeight, experts: int, rank: int, dtype: torch.dtype) -> bool:
    """Whether `unpack_experts` takes such weights: those of each expert begin at a tile."""
    return can_unpack_adapted(w, rank, dtype) and not len(w.weight) // experts % _TILE_ROWS


def can_unpack_adapted(w: FrozenWeight, rank: int, dtype: torch.dtype) -> bool:
    """Whether `unpack_adapted` takes such a layer."""
    return (
        w.weight.is_cuda
        and triton is not None
        and w.quant_type in FORMATS
        and FORMATS[w.quant_type].has_kernels
        and dtype == torch.bfloat16
        and w.in_features % BLOCKSIZE == 0
        and rank <= _RANKS[-1]
    )


def unpack_adapted(w: FrozenWeight, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """W + scaling B A as bf16 (O, I), of factors in any dtype: summed in fp32, rounded once."""
    return _unpacked(w, 1, a, b, scaling)


def unpack_experts(
    w: FrozenWeight,
    experts: int,
    a: Tensor | None = None,
    b: Tensor | None = None,
    scaling: float = 1.0,
) -> Tensor:
    """W of all experts (E, O, I) in bf16, plus B A of each, of A (E, R, I) and B (E, O, R) if given."""
    return _unpacked(w, experts, a, b, scaling).unflatten(0, (experts, -1))


def _unpacked(
    w: FrozenWeight, experts: int, a: Tensor | None, b: Tensor | None, scaling: float
) -> Tensor:
    """W (O, I) in bf16, with the adapters of experts whose rows are below each other."""
    w = w.with_float_absmax()
    rows, in_features = w.weight.shape[0], w.in_features
    rank = 0 if b is None else b.shape[-1]
    out = torch.empty(rows, in_features, dtype=torch.bfloat16, device=w.weight.device)
    blocks = blocks_of_a_tile(in_features, 2)
    grid = (triton.cdiv(rows, _TILE_ROWS), in_features // BLOCKSIZE // blocks)
    _unpack_adapted[grid](
        w.weight.view(torch.uint8),
        w.absmax,
        out if a is None else a.contiguous(),
        out if b is None else b.contiguous(),
        out,
        rows,
        in_features,
        rows // experts,
        rank,
        scaling,
        w.quant_type == "fp4",
        rank and rank_columns(rank),
        _TILE_ROWS,
        blocks,
        num_warps=8,
    )
    return out


def rank_columns(rank: int) -> int:
    """What an adapter's rank is filled up to with zeros: a power of two, from 16 on."""
    return max(_RANKS[0], 1 << (rank - 1).bit_length())
