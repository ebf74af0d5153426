"""Rounding to bfloat16 that is right on average.

A bfloat16 weight has 8 bits of mantissa: an update below 1/512 of it rounds to nothing, and a small
learning rate then trains nothing. Stochastic rounding goes up or down with a chance in proportion to
what is cut off, so that small updates add up (arXiv:2010.06192).

The chance comes from a hash of (salt, place in the whole tensor), not from a random generator: replicas
stay equal, and every sharding rounds as one process does.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_16 = 0xFFFF


def hashed(places: Tensor, salt: Tensor) -> Tensor:
    """32 well-mixed bits per place, all int32.

    The mixer is lowbias32, https://nullprogram.com/blog/2018/07/31.
    """
    x = places * -1640531535 + salt  # 2654435761, the golden ratio of 2**32, as int32
    x = (x ^ (x >> 16 & _LOW_16)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * -2073254261  # 0x846CA68B as int32
    return x ^ (x >> 16 & _LOW_16)


def _to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """float32 rounded to bfloat16, up with the chance of what is cut off; `bits` is int32.

    A value that bfloat16 has is left as it is, whatever the bits.
    """
    raised = x.view(torch.int32) + (bits & _LOW_16)
    return (raised & ~_LOW_16).view(torch.float32).to(torch.bfloat16)


def store(target: Tensor, value: Tensor, bits: Tensor):
    """Write float32 values into `target`, rounded stochastically if it is bfloat16."""
    target.copy_(_to_bf16(value, bits) if target.dtype == torch.bfloat16 else value)


def element_bits(count: int, places: Tensor) -> Tensor:
    """Bits (count,) for the values from place `places[0]` on, with the salt `places[1]`.

    Both may differ from value to value: then `places` is (2, count), and the first is what a value's
    place exceeds its index by.
    """
    index = torch.arange(count, device=places.device, dtype=torch.int32)
    return hashed(index + places[0], places[1])
