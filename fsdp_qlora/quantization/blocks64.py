"""A row of a weight as whole blocks of 64, which is what every quantizer here works on."""

from __future__ import annotations

from torch import Tensor, nn

BLOCKSIZE = 64


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
    """(O, I) as (O, K, 64), padded with zeros."""
    return pad_rows(weight).reshape(len(weight), blocks_of(weight.shape[1]), BLOCKSIZE)
