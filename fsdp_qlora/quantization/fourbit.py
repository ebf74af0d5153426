"""Four-bit numbers: how a weight is packed, and back. bitsandbytes' registered ops do the arithmetic.

Every row of a weight is packed by itself, so a slice of rows packs to the slice of the packed rows,
which is what lets a rank quantize only what it holds. NF4 is defined in QLoRA, arXiv:2305.14314.

Shapes: O out rows, I inputs, Ip = I rounded up to whole blocks of 64.
    packed  (O, Ip/4)  bfloat16 view of the (O, Ip/2) bytes: torch 2.11's FSDP refuses integers
    absmax  (O, Ip/64) float32, the largest magnitude of each block; or 8-bit codes (absmax.py)
"""

from __future__ import annotations

import bitsandbytes  # noqa: F401  registers torch.ops.bitsandbytes
import torch
from torch import Tensor

from .absmax import STORAGE_DTYPE, decode_absmax, encode_absmax
from .blocks64 import BLOCKSIZE, blocks_of, pad_rows, padded

QUANT_TYPES = ("nf4", "fp4")


def quantize_rows(
    weight: Tensor, quant_type: str = "nf4", absmax_dtype: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Quantize a float (O, I) weight: packed (O, Ip/4) in bfloat16 storage, absmax (O, Ip/64).

    Works on any row slice: the result is that slice of the whole weight's result. With `absmax_dtype`
    "int8" the second is the bytes of `encode_absmax`.
    """
    rows, in_features = weight.shape
    wide, blocks = padded(in_features), blocks_of(in_features)
    packed, absmax = torch.ops.bitsandbytes.quantize_4bit(
        pad_rows(weight).contiguous(), BLOCKSIZE, quant_type, torch.uint8
    )
    packed, absmax = packed.view(rows, wide // 2).view(STORAGE_DTYPE), absmax.view(rows, blocks)
    return packed, encode_absmax(absmax) if absmax_dtype == "int8" else absmax


def dequantize_rows(
    packed: Tensor, absmax: Tensor, in_features: int, quant_type: str, dtype: torch.dtype
) -> Tensor:
    """The (O, I) weight that packed (O, Ip/4) and absmax, in either form, stand for, in `dtype`."""
    rows, wide = packed.shape[0], padded(in_features)
    absmax = decode_absmax(absmax, blocks_of(in_features))
    weight = torch.ops.bitsandbytes.dequantize_4bit(
        packed.view(torch.uint8).view(-1, 1),
        absmax.view(-1),
        BLOCKSIZE,
        quant_type,
        (rows, wide),
        dtype,
    )
    return weight if wide == in_features else weight[:, :in_features]
