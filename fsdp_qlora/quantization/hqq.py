"""HQQ: weights in 8, 4, 3 or 2 bits as (q - zero) scale, with the zero of each group optimized.

Half-quadratic quantization (https://mobiusml.github.io/hqq_blog/) needs no data: it looks for the
zero that makes the p-norm of the error small, p = 0.7, so that few large errors cost little. The
steps are those of the `hqq` package on a tensor of one group. There, all groups of a tensor stop
together; here each stops by itself, so that a slice of rows gives the slice of the whole.

Shapes: O out rows, I inputs, K groups of 64 in a row.
    packed  (O, K b/2) bfloat16 view of bytes, b = 8 n_bits of a group: planes of bits (`PLANES`)
    scales  (O, 2K) float32, scales then zeros; or bytes of both in 8 bits (`encode`)
"""

from __future__ import annotations

import torch
from torch import Tensor

from .absmax import (
    BLOCKSIZE,
    STORAGE_DTYPE,
    absmax_columns,
    blocks_of,
    decode_absmax,
    encode_absmax,
    in_blocks,
)

PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}  # n_bits: widths of the planes, lowest bits first
P, _BETA, STEPS = 0.7, 10.0, 20  # norm, weight of the quadratic term, most steps
_SMALLEST_RANGE, _LARGEST_INVERSE = 1e-4, 2e4  # the package's bounds: a scale is 5e-5 at least


def quantize_rows(weight: Tensor, n_bits: int, absmax_dtype: str = "fp32") -> tuple[Tensor, Tensor]:
    """A float (O, I) weight as packed bytes and scales; a row slice gives the slice."""
    groups = in_blocks(weight.float())  # (O, K, 64)
    inverse, zero = _optimize(groups, 2**n_bits - 1)
    stored = torch.cat([1 / inverse, zero], 1)
    if absmax_dtype == "int8":
        stored = encode(1 / inverse, zero)
        scale, zero = decode(stored, groups.shape[1])
        inverse = 1 / scale
    values = quantized(groups, inverse, zero, 2**n_bits - 1)
    return pack(values.to(torch.uint8), n_bits).view(STORAGE_DTYPE), stored


def quantized(groups: Tensor, inverse: Tensor, zero: Tensor, largest: int) -> Tensor:
    """q (O, K, 64) as float, for inverse scales and zeros (O, K)."""
    return (groups * inverse[..., None] + zero[..., None]).round_().clamp_(0, largest)


def _optimize(groups: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Inverse scales and zeros (O, K): from each group's range, then the zero by proximal steps.

    A group stops at the first step that does not lower its mean error.
    """
    low, high = groups.amin(2), groups.amax(2)
    spread = high - low
    inverse = torch.where(spread <= _SMALLEST_RANGE, 1.0, largest / spread).clamp(
        max=_LARGEST_INVERSE
    )
    zero, best = -low * inverse, torch.full_like(low, torch.inf)
    going = torch.ones_like(low, dtype=torch.bool)
    for _ in range(STEPS):
        q = quantized(groups, inverse, zero, largest)
        error = groups - (q - zero[..., None]) / inverse[..., None]
        new = _group_mean(q - (groups - shrink(error)) * inverse[..., None])
        zero = torch.where(going, new, zero)
        mean = _group_mean(error.abs())
        going = going & (mean < best)
        best = torch.where(going, mean, best)
    return inverse, zero


def shrink(error: Tensor) -> Tensor:
    """The proximal operator of the p-norm: sign(e) max(0, |e| - |e|^(p-1) / beta)."""
    size = error.abs()
    return (size - size.pow(P - 1) / _BETA).clamp_min_(0) * error.sign()


def _group_mean(values: Tensor) -> Tensor:
    """Mean over the last dim of 64, always added up in the same order."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0] / BLOCKSIZE


# ---- bytes -------------------------------------------------------------------------------------


def row_bytes(blocks: int, n_bits: int) -> int:
    """Bytes of a row of packed values."""
    return blocks * BLOCKSIZE * n_bits // 8


def scale_columns(blocks: int, absmax_dtype: str) -> int:
    """Columns of the tensor that stores a row's scales and zeros."""
    return 2 * blocks if absmax_dtype == "fp32" else 2 * absmax_columns(blocks, "int8") + 2


def pack(values: Tensor, n_bits: int) -> Tensor:
    """uint8 (O, K, 64) of n_bits each as bytes (O, K 8 n_bits)."""
    planes, shift = [], 0
    for width in PLANES[n_bits]:
        part = ((values >> shift) & (2**width - 1)).view(*values.shape[:2], 8 // width, -1)
        plane = part[:, :, 0]
        for i in range(1, 8 // width):
            plane = plane | (part[:, :, i] << (i * width))
        planes.append(plane)
        shift += width
    return torch.cat(planes, 2).flatten(1)


def unpack(packed: Tensor, n_bits: int) -> Tensor:
    """`pack` undone: uint8 (O, K, 64)."""
    groups = packed.view(len(packed), -1, 8 * n_bits)
    values, shift, start = None, 0, 0
    for width in PLANES[n_bits]:
        count = BLOCKSIZE * width // 8
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)[:, None]
        part = (groups[..., None, start : start + count] >> shifts) & (2**width - 1)
        part = part.flatten(2)
        values = part if values is None else values | (part << shift)
        shift, start = shift + width, start + count
    return values


def encode(scale: Tensor, zero: Tensor) -> Tensor:
    """Scales and zeros (O, K) in 8 bits: as `encode_absmax`, and in 255 even steps of a row's range."""
    rows, blocks = zero.shape
    low = zero.amin(1, keepdim=True)
    step = ((zero.amax(1, keepdim=True) - low) / 255).clamp(min=1e-12)
    codes = ((zero - low) / step).round_().clamp_(0, 255).to(torch.uint8)
    zeros = torch.zeros(
        rows, 2 * absmax_columns(blocks, "int8") + 4, dtype=torch.uint8, device=zero.device
    )
    zeros[:, :8] = torch.cat([low, step], 1).view(torch.uint8)
    zeros[:, 8 : 8 + blocks] = codes
    return torch.cat([encode_absmax(scale), zeros.view(STORAGE_DTYPE)], 1)


def decode(stored: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Scales and zeros as float32 (O, K), from either form."""
    if stored.dtype == torch.float32:
        return stored[:, :blocks], stored[:, blocks:]
    first = absmax_columns(blocks, "int8")
    zeros = stored[:, first:].contiguous().view(torch.uint8)
    low, step = zeros[:, :8].contiguous().view(torch.float32).unbind(1)
    zero = low[:, None] + zeros[:, 8 : 8 + blocks] * step[:, None]
    return decode_absmax(stored[:, :first].contiguous(), blocks), zero


def dequantize_rows(
    packed: Tensor, stored: Tensor, in_features: int, n_bits: int, dtype: torch.dtype
) -> Tensor:
    """The (O, I) weight that packed bytes and scales stand for, in `dtype`."""
    scale, zero = decode(stored, blocks_of(in_features))
    values = unpack(packed.view(torch.uint8), n_bits)
    out = torch.empty(values.shape, dtype=dtype, device=packed.device)
    torch.mul(values - zero[..., None], scale[..., None], out=out)
    return out.view(len(packed), -1)[:, :in_features]
