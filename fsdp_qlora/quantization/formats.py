"""The formats of frozen weights, each as packed bytes and scales with one row per output feature.

Whatever the format, both are float tensors with a row for each row of the weight, and a slice of rows
is quantized to the slice of the whole: sharding, streaming, the cache and the ops know no more.

NF4 and FP4 are packed by bitsandbytes' registered ops (NF4 is defined in QLoRA, arXiv:2305.14314), a row
by itself. int8 has a scale per block rather than per row, as LLM.int8 has it (arXiv:2208.07339): an
outlier costs its block instead of its row, and the scales are those of the 4-bit formats. `hqq.py` has
the others.

Shapes: O out rows, I inputs, K = ceil(I / 64) blocks of a row, Ip = 64 K.
    packed  (O, Ip b/16) bfloat16 view of bytes, b bits a value: torch 2.11's FSDP refuses integers
    scales  (O, K) float32, the largest magnitude of each block; or 8-bit codes (absmax.py, hqq.py)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import NamedTuple

import bitsandbytes  # noqa: F401  registers torch.ops.bitsandbytes
import torch
from torch import Tensor, nn

from ..choices import FORMATS, Format
from . import hqq
from .absmax import (
    BLOCKSIZE,
    STORAGE_DTYPE,
    absmax_columns,
    blocks_of,
    decode_absmax,
    encode_absmax,
    in_blocks,
    pad_rows,
    padded,
    storage_of,
)

_INT8_LARGEST = 127


def _quantize_4bit(weight: Tensor, quant_type: str, absmax_dtype: str) -> tuple[Tensor, Tensor]:
    """Quantize a float (O, I) weight: packed (O, Ip/4) in bfloat16 storage, absmax (O, Ip/64).

    Works on any row slice: the result is that slice of the whole weight's result. With `absmax_dtype`
    "int8" the second is the bytes of `encode_absmax`.
    """
    rows, in_features = weight.shape
    wide, blocks = padded(in_features), blocks_of(in_features)
    packed, absmax = torch.ops.bitsandbytes.quantize_4bit(
        pad_rows(weight.to(_known(weight.dtype))).contiguous(), BLOCKSIZE, quant_type, torch.uint8
    )
    packed, absmax = packed.view(rows, wide // 2).view(STORAGE_DTYPE), absmax.view(rows, blocks)
    return packed, encode_absmax(absmax) if absmax_dtype == "int8" else absmax


def _dequantize_4bit(
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
        _known(dtype),
    ).to(dtype)
    return weight if wide == in_features else weight[:, :in_features]


def _known(dtype: torch.dtype) -> torch.dtype:
    """What bitsandbytes' ops take in its place: of float64 they give memory as it was, on a CPU."""
    return torch.float32 if dtype == torch.float64 else dtype


def _quantize_int8(weight: Tensor, absmax_dtype: str) -> tuple[Tensor, Tensor]:
    """A float (O, I) weight as packed (O, Ip/2) and absmax; a row slice gives the slice."""
    weight = in_blocks(weight.float())  # (O, K, 64)
    stored = absmax = weight.abs().amax(2)
    if absmax_dtype == "int8":
        stored = encode_absmax(absmax)
        absmax = decode_absmax(stored, absmax.shape[1])
    step = (absmax / _INT8_LARGEST)[..., None]
    values = torch.where(step > 0, weight / step, 0).round().clamp(-_INT8_LARGEST, _INT8_LARGEST)
    return values.to(torch.int8).view(len(weight), -1).view(STORAGE_DTYPE), stored


def _dequantize_int8(
    packed: Tensor, absmax: Tensor, in_features: int, dtype: torch.dtype
) -> Tensor:
    """The (O, I) weight that packed and absmax stand for, in `dtype`."""
    absmax = decode_absmax(absmax, blocks_of(in_features))
    values = packed.view(torch.int8).view(*absmax.shape, BLOCKSIZE)
    out = torch.empty(values.shape, dtype=dtype, device=packed.device)
    torch.mul(values, (absmax / _INT8_LARGEST)[..., None], out=out)  # in fp32, rounded once
    return out.view(len(packed), -1)[:, :in_features]


@dataclass(frozen=True)
class _Arithmetic:
    """How the weights of a format are made and read."""

    scale_columns: Callable  # (blocks, absmax_dtype) -> columns of the scales' tensor
    quantize: Callable  # (weight, absmax_dtype) -> packed, scales
    dequantize: Callable  # (packed, scales, in_features, dtype) -> weight


def bitsandbytes_4bit(row: Format) -> _Arithmetic:
    """NF4 and FP4."""

    def quantize(weight, absmax_dtype):
        return _quantize_4bit(weight, row.name, absmax_dtype)

    def dequantize(packed, scales, in_features, dtype):
        return _dequantize_4bit(packed, scales, in_features, row.name, dtype)

    return _Arithmetic(absmax_columns, quantize, dequantize)


def blockwise_int8(row: Format) -> _Arithmetic:
    """Whole numbers with a scale per block."""
    return _Arithmetic(absmax_columns, _quantize_int8, _dequantize_int8)


def half_quadratic(row: Format) -> _Arithmetic:
    """HQQ."""

    def quantize(weight, absmax_dtype):
        return hqq.quantize_rows(weight, row.bits, absmax_dtype)

    def dequantize(packed, scales, in_features, dtype):
        return hqq.dequantize_rows(packed, scales, in_features, row.bits, dtype)

    return _Arithmetic(hqq.scale_columns, quantize, dequantize)


_MADE: dict[str, _Arithmetic] = {}  # by format; not functools.cache, which torch.compile warns of


def _arithmetic(quant_type: str) -> _Arithmetic:
    """What the row of a format makes."""
    if quant_type not in _MADE:
        row = FORMATS[quant_type]
        _MADE[quant_type] = resolve_name(row.factory)(row)
    return _MADE[quant_type]


def quantize_rows(
    weight: Tensor, quant_type: str = "nf4", absmax_dtype: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Quantize a float (O, I) weight, or any of its rows: packed bytes and scales."""
    if not len(weight):
        return empty_rows(0, weight.shape[1], quant_type, absmax_dtype, weight.device)
    return _arithmetic(quant_type).quantize(weight, absmax_dtype)


def empty_rows(
    rows: int, in_features: int, quant_type: str, absmax_dtype: str, device
) -> tuple[Tensor, Tensor]:
    """Uninitialised storage of packed bytes and scales."""
    blocks = blocks_of(in_features)
    packed = blocks * BLOCKSIZE * FORMATS[quant_type].bits // 16  # of 2 bytes each
    columns = _arithmetic(quant_type).scale_columns(blocks, absmax_dtype)
    return (
        torch.empty(rows, packed, dtype=STORAGE_DTYPE, device=device),
        torch.empty(rows, columns, dtype=storage_of(absmax_dtype), device=device),
    )


def dequantize_rows(
    packed: Tensor, scales: Tensor, in_features: int, quant_type: str, dtype: torch.dtype
) -> Tensor:
    """The (O, I) weight that packed bytes and scales stand for, in `dtype`."""
    return _arithmetic(quant_type).dequantize(packed, scales, in_features, dtype)


class FrozenWeight(NamedTuple):
    """A frozen weight W (O, I) as it is stored, and how, for ops: these take flat arguments."""

    weight: Tensor  # packed bytes, or W's numbers
    absmax: Tensor | None  # their scales, if packed
    in_features: int
    quant_type: str  # "" for numbers

    @classmethod
    def of(cls, layer: nn.Module) -> FrozenWeight:
        """That of a linear layer, quantized or plain."""
        absmax, quant_type = getattr(layer, "absmax", None), getattr(layer, "quant_type", "")
        return cls(layer.weight, absmax, layer.in_features, quant_type)

    @property
    def form(self) -> tuple[int, str]:
        """How W is stored: the last arguments of ops, before the dtype of their products."""
        return self.in_features, self.quant_type

    def rows(self, part: slice) -> FrozenWeight:
        """Some rows of W."""
        absmax = None if self.absmax is None else self.absmax[part]
        return self._replace(weight=self.weight[part], absmax=absmax)

    def with_float_absmax(self) -> FrozenWeight:
        """The same with absmax in fp32 (O, I/64), from either form that stores it."""
        if self.absmax is None:
            return self
        return self._replace(absmax=decode_absmax(self.absmax, blocks_of(self.in_features)))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """W in `dtype`: dequantized if it has scales, else as it is."""
        if self.absmax is None:
            return self.weight.to(dtype)
        return dequantize_rows(*self, dtype)
