"""Blocks of 64 values of a row, which every quantizer here works on, and their scales in fp32 or 8 bits.

8-bit scales take a quarter of the memory, and a row still stands for itself.
bitsandbytes' double quantization (arXiv:2305.14314) puts 256 scales of any rows into one block, so a
slice of rows would encode differently. Here each row has its own range. The codes are steps of the
float's bit pattern, which as an integer is nearly the logarithm: every scale has the same relative
error, an outlier costs its neighbours little, and all of it is integer arithmetic, equal everywhere.

Shapes: O out rows, K blocks of a row.
    absmax  (O, K) float32
    stored  (O, C/2) bfloat16 view of C = 4 + K bytes, rounded up to whole words of 4: one word
            `lowest | step` (the upper half of the lowest scale's bits, and the step in units of 16),
            then one code a block. Code 0 is zero, code c is lowest + (c - 1) step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BLOCKSIZE = 64
STORAGE_DTYPE = torch.bfloat16  # a carrier of bytes; no arithmetic is ever done in it
ABSMAX_DTYPES = ("fp32", "int8")
STEPS = 254  # steps between codes 1 and 255
_STEP_UNIT = 16  # so that a step has 16 bits
_OCTAVE = 2**23  # bit patterns from a float to its double
_RANGES = (6, 9, 12, 16)  # octaves below a row's largest scale that may be told from zero

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without
    triton = None


def padded(in_features: int) -> int:
    """`in_features` rounded up to whole quantization blocks, so that no block spans two rows."""
    return -(-in_features // BLOCKSIZE) * BLOCKSIZE


def blocks_of(in_features: int) -> int:
    """Quantization blocks of a row."""
    return padded(in_features) // BLOCKSIZE


def pad_rows(weight: Tensor) -> Tensor:
    """(O, I) with zeros up to whole blocks."""
    wide = padded(weight.shape[1])
    return (
        weight
        if wide == weight.shape[1]
        else nn.functional.pad(weight, (0, wide - weight.shape[1]))
    )


def in_blocks(weight: Tensor) -> Tensor:
    """(O, I) as (O, K, 64), padded with zeros; rows that lie in columns, as of a W^T, are copied."""
    return pad_rows(weight).contiguous().view(len(weight), blocks_of(weight.shape[1]), BLOCKSIZE)


# ---- scales -------------------------------------------------------------------------------------


def absmax_columns(blocks: int, absmax_dtype: str) -> int:
    """Columns of the tensor that stores a row's scales."""
    return blocks if absmax_dtype == "fp32" else 2 * -(-(4 + blocks) // 4)


def storage_of(absmax_dtype: str) -> torch.dtype:
    """The dtype of the tensor that stores scales."""
    return torch.float32 if absmax_dtype == "fp32" else STORAGE_DTYPE


def encode_absmax(absmax: Tensor) -> Tensor:
    """float32 scales (O, K) as bytes (O, C/2); the relative error is at most 2.3%, mostly 0.1%.

    Each row takes the range of octaves that leaves its largest error smallest.
    """
    bits, blocks = absmax.contiguous().view(torch.int32), absmax.shape[1]
    tried = [_encode_range(bits, octaves) for octaves in _RANGES]
    errors = [(_decode_in_torch(stored, blocks) - absmax).abs().amax(1) for stored in tried]
    best = torch.stack(errors).argmin(0)  # (O,)
    return torch.stack([stored.view(torch.int16) for stored in tried])[
        best, torch.arange(len(best), device=best.device)
    ].view(STORAGE_DTYPE)


def _encode_range(bits: Tensor, octaves: int) -> Tensor:
    """`encode_absmax` of bit patterns int32 (O, K), telling scales apart over so many octaves."""
    rows, blocks = bits.shape
    highest = bits.amax(1, keepdim=True)
    told_apart = bits > (highest - octaves * _OCTAVE).clamp(min=0)
    lowest = torch.where(told_apart, bits, highest).amin(1, keepdim=True) >> 16 << 16
    units = (highest - lowest + STEPS * _STEP_UNIT - 1) // (STEPS * _STEP_UNIT)
    step = (units * _STEP_UNIT).clamp(min=1)
    codes = ((bits - lowest + step // 2) // step + 1).clamp(1, STEPS + 1)
    codes = torch.where(bits < lowest - _OCTAVE, 0, codes)  # nearer to zero than to the lowest
    codes = torch.where(bits == 0, 0, codes)
    width = 2 * absmax_columns(blocks, "int8")
    stored = torch.zeros(rows, width, dtype=torch.uint8, device=bits.device)
    stored.view(torch.int32)[:, :1] = lowest | units
    stored[:, 4 : 4 + blocks] = codes
    return stored.view(STORAGE_DTYPE)


def decode_absmax(stored: Tensor, blocks: int) -> Tensor:
    """Scales as float32 (O, K), from either form that `storage_of` names."""
    if stored.dtype == torch.float32:
        return stored
    return (_decode_on_gpu if stored.is_cuda else _decode_in_torch)(stored, blocks)


def _decode_in_torch(stored: Tensor, blocks: int) -> Tensor:
    """`decode_absmax` of bytes."""
    word = stored.view(torch.int32)[:, :1]
    codes = stored.view(torch.uint8)[:, 4 : 4 + blocks].int()
    bits = (word >> 16 << 16) + (codes - 1) * ((word & 0xFFFF) * _STEP_UNIT)
    return torch.where(codes == 0, 0, bits).view(torch.float32)


if triton:

    @triton.jit
    def _decode(codes_ptr, words_ptr, out_ptr, count, K, width, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside, row, column = at < count, at // K, at % K
        word = tl.load(words_ptr + row * (width // 4), mask=inside, other=0)
        code = tl.load(codes_ptr + row * width + 4 + column, mask=inside, other=0).to(tl.int32)
        bits = ((word >> 16) << 16) + (code - 1) * ((word & 0xFFFF) * 16)
        bits = tl.where(code == 0, 0, bits)
        tl.store(out_ptr + at, bits.to(tl.float32, bitcast=True), mask=inside)


def _decode_on_gpu(stored: Tensor, blocks: int) -> Tensor:
    """`_decode_in_torch` in one pass."""
    if not triton:
        return _decode_in_torch(stored, blocks)
    rows, count = stored.shape[0], stored.shape[0] * blocks
    out = torch.empty(rows, blocks, dtype=torch.float32, device=stored.device)
    codes, words = stored.view(torch.uint8), stored.view(torch.int32)
    _decode[(triton.cdiv(count, 1024),)](codes, words, out, count, blocks, codes.shape[1], 1024)
    return out
