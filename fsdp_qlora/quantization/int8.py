"""Weights in 8-bit whole numbers, with a scale per block of 64: nearly lossless, half of 16 bits.

A scale per block rather than per row, as LLM.int8 has it (arXiv:2208.07339): an outlier then costs
its block instead of its row, and the scales are those of the 4-bit formats, 8-bit ones included.

Shapes: O out rows, I inputs, Ip = I rounded up to whole blocks of 64.
    packed  (O, Ip/2) bfloat16 view of the (O, Ip) int8 values
    absmax  (O, Ip/64) float32, or 8-bit codes (absmax.py)
"""

from __future__ import annotations

import torch
from torch import Tensor

from .absmax import STORAGE_DTYPE, decode_absmax, encode_absmax
from .blocks64 import BLOCKSIZE, blocks_of, in_blocks

LARGEST = 127


def quantize_rows(weight: Tensor, absmax_dtype: str = "fp32") -> tuple[Tensor, Tensor]:
    """A float (O, I) weight as packed (O, Ip/2) and absmax; a row slice gives the slice."""
    weight = in_blocks(weight.float())  # (O, K, 64)
    stored = absmax = weight.abs().amax(2)
    if absmax_dtype == "int8":
        stored = encode_absmax(absmax)
        absmax = decode_absmax(stored, absmax.shape[1])
    step = (absmax / LARGEST)[..., None]
    values = torch.where(step > 0, weight / step, 0).round().clamp(-LARGEST, LARGEST)
    return values.to(torch.int8).view(len(weight), -1).view(STORAGE_DTYPE), stored


def dequantize_rows(packed: Tensor, absmax: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """The (O, I) weight that packed and absmax stand for, in `dtype`."""
    absmax = decode_absmax(absmax, blocks_of(in_features))
    values = packed.view(torch.int8).view(*absmax.shape, BLOCKSIZE)
    out = torch.empty(values.shape, dtype=dtype, device=packed.device)
    torch.mul(values, (absmax / LARGEST)[..., None], out=out)  # in fp32, rounded once
    return out.view(len(packed), -1)[:, :in_features]
