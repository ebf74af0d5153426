"""The formats of frozen weights, each as packed bytes and scales with one row per output feature.

Whatever the format, both are float tensors with a row for each row of the weight, and a slice of rows
is quantized to the slice of the whole: sharding, streaming, the cache and the ops know no more.

Shapes: O out rows, I inputs, K = ceil(I / 64) blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import fourbit, hqq, int8
from .absmax import STORAGE_DTYPE, absmax_columns, storage_of
from .blocks64 import BLOCKSIZE, blocks_of


@dataclass(frozen=True)
class _Format:
    """How a weight is stored."""

    bits: int  # of a value, without its share of the scales
    scale_columns: Callable  # (blocks, absmax_dtype) -> columns of the scales' tensor
    quantize: Callable  # (weight, absmax_dtype) -> packed, scales
    dequantize: Callable  # (packed, scales, in_features, dtype) -> weight

    def packed_columns(self, in_features: int) -> int:
        """Columns of the packed bytes' tensor, 2 bytes each."""
        return blocks_of(in_features) * BLOCKSIZE * self.bits // 16


def _fourbit(quant_type: str) -> _Format:
    def quantize(weight, absmax_dtype):
        return fourbit.quantize_rows(weight, quant_type, absmax_dtype)

    def dequantize(packed, scales, in_features, dtype):
        return fourbit.dequantize_rows(packed, scales, in_features, quant_type, dtype)

    return _Format(4, absmax_columns, quantize, dequantize)


def _hqq(n_bits: int) -> _Format:
    def dequantize(packed, scales, in_features, dtype):
        return hqq.dequantize_rows(packed, scales, in_features, n_bits, dtype)

    return _Format(
        n_bits, hqq.scale_columns, lambda w, d: hqq.quantize_rows(w, n_bits, d), dequantize
    )


FORMATS = {
    "nf4": _fourbit("nf4"),
    "fp4": _fourbit("fp4"),
    "int8": _Format(8, absmax_columns, int8.quantize_rows, int8.dequantize_rows),
    **{f"hqq{n_bits}": _hqq(n_bits) for n_bits in hqq.PLANES},
}


def quantize_rows(
    weight: Tensor, quant_type: str = "nf4", absmax_dtype: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Quantize a float (O, I) weight, or any of its rows: packed bytes and scales."""
    if not len(weight):
        return empty_rows(0, weight.shape[1], quant_type, absmax_dtype, weight.device)
    return FORMATS[quant_type].quantize(weight, absmax_dtype)


def empty_rows(
    rows: int, in_features: int, quant_type: str, absmax_dtype: str, device
) -> tuple[Tensor, Tensor]:
    """Uninitialised storage of packed bytes and scales."""
    form = FORMATS[quant_type]
    columns = form.scale_columns(blocks_of(in_features), absmax_dtype)
    return (
        torch.empty(rows, form.packed_columns(in_features), dtype=STORAGE_DTYPE, device=device),
        torch.empty(rows, columns, dtype=storage_of(absmax_dtype), device=device),
    )


def dequantize_rows(
    packed: Tensor, scales: Tensor, in_features: int, quant_type: str, dtype: torch.dtype
) -> Tensor:
    """The (O, I) weight that packed bytes and scales stand for, in `dtype`."""
    return FORMATS[quant_type].dequantize(packed, scales, in_features, dtype)


def dense_weight(
    weight: Tensor, absmax: Tensor | None, in_features: int, quant_type: str, dtype: torch.dtype
) -> Tensor:
    """A frozen weight as (O, I) in `dtype`: dequantized if it has scales, else as it is."""
    if absmax is None:
        return weight.to(dtype)
    return dequantize_rows(weight, absmax, in_features, quant_type, dtype)
