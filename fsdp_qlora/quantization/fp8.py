"""Products of frozen weights in 8-bit floats, for GPUs that multiply them twice as fast (Hopper on).

Scales are dynamic: one per token, one per weight row (arXiv:2209.05433 describes the formats). A
weight row's scale follows from its blocks' absmax, so 4-bit weights become fp8 in one pass, without a
16-bit copy between.

In the backward, dX = dY W sums over W's rows, where the row scales would have to be inside the sum:
they are multiplied into dY before dY is quantized.

An adapter rides along: (xA | x) (B | W)^T is one product, with its rank filled up with zeros. Added
to the rounded product, what a young adapter gives would be lost: it is smaller than half a step of
16 bits. It comes first, because tensor cores cut each fp8 product to some 14 bits of the sum so far
(arXiv:2412.19437, section 3.3.2): last, a fifth of it was lost. xA and B are themselves made and
trained in 16 and 32 bits.

Shapes: N tokens, I inputs, O outputs, R rank.  x (N, I), W (O, I), y (N, O)
"""
from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .absmax import decode_absmax
from .blocks64 import BLOCKSIZE, blocks_of
from .formats import dense_weight
from .kernels import (
    RANKS,
    dense_to_fp8,
    fourbit_to_fp8,
    quantize_tokens_on_gpu,
    rank_columns,
    row_scales_on_gpu,
    triton,
    with_columns,
    with_rows,
)

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
TINY = 1e-12  # keeps the scale of an all-zero row finite
MULTIPLE = 16  # the tensor cores take operands in rows of 16 bytes
# A young adapter's B is far smaller than W and its A of W's size; fp8 has 15 octaves. The small factor
# is moved up and the large one down by so much that both are inside, now and when B has grown.
BOOST = 32.0
A_LARGEST = 2.0


def fp8_problem(device: torch.device) -> str | None:
    """Why this device can't do fp8 products, or None. The CPU can, slowly, for tests."""
    if device.type == "cpu": return None
    if torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no fp8 arithmetic"
    return None if triton else "triton is not installed"


def fits_fp8(in_features: int, out_features: int) -> bool:
    """Whether a layer's shape suits the kernels; others stay in 16 bits."""
    return in_features % BLOCKSIZE == 0 and out_features % MULTIPLE == 0


def forward_product(x: Tensor, weight: Tensor, absmax: Tensor | None, quant_type: str,
                    xa: Tensor | None = None, b: Tensor | None = None, scaling: float = 1.0) -> Tensor:
    """x W^T in fp8, plus scaling xa B^T if given, with xa (N, R) and B (O, R); in x's dtype."""
    n_in, absmax = x.shape[1], float_scales(absmax, x.shape[1])
    rank = 0 if b is None else rank_columns(b.shape[1])
    w8 = torch.empty(len(weight), rank + n_in, dtype=FP8, device=x.device)
    if rank:
        scale = row_scale(weight, absmax, with_columns(b, rank), BOOST * scaling, w8[:, :rank])
        x8, x_scale = quantize_tokens([with_columns(xa, rank), x], [1 / BOOST, 1.0])
    else:
        scale = row_scale(weight, absmax)
        x8, x_scale = quantize_tokens([x], [1.0])
    weight_to_fp8(weight, absmax, n_in, quant_type, scale, transposed=False, out=w8[:, rank:])
    return scaled_product(x8, x_scale, w8, scale, x.dtype)


def backward_product(dys: list[Tensor], weights: list[Tensor], absmaxes: list[Tensor | None],
                     in_features: int, quant_type: str, dxa: Tensor | None = None,
                     a: Tensor | None = None) -> Tensor:
    """The sum of dY W over layers of one input, in fp8, plus dxa A if given, in dY's dtype.

    dxa (N, R) and A (R, I) of all the layers side by side. One product: the dY stand side by side
    under one scale per token, the W one below the other.
    """
    absmaxes = [float_scales(absmax, in_features) for absmax in absmaxes]
    scales = [row_scale(*each) for each in zip(weights, absmaxes, strict=True)]
    rank = 0 if a is None else -(-len(a) // MULTIPLE) * MULTIPLE
    wt8 = torch.empty(in_features, rank + sum(map(len, weights)), dtype=FP8, device=dys[0].device)
    a_part, *parts = wt8.split([rank, *map(len, weights)], dim=1)
    for weight, absmax, scale, part in zip(weights, absmaxes, scales, parts, strict=True):
        weight_to_fp8(weight, absmax, in_features, quant_type, scale, transposed=True, out=part)
    if rank:
        a, dxa = with_rows(a, rank), with_columns(dxa, rank)
        a_scale = (a.abs().amax(1).float() / A_LARGEST).clamp(min=TINY)
        a_part.copy_((a / a_scale[:, None]).t())
        dys, scales = [dxa, *dys], [a_scale, *scales]
    dy8, dy_scale = quantize_tokens(dys, [1.0] * len(dys), scales)
    return scaled_product(dy8, dy_scale, wt8, ones(in_features, dy8.device), dys[-1].dtype)


@cache
def ones(length: int, device: torch.device) -> Tensor:
    """Scales of columns that have none; made once."""
    return torch.ones(length, device=device)


def float_scales(absmax: Tensor | None, in_features: int) -> Tensor | None:
    """fp32 scales (O, I/64) from either form that stores them."""
    return None if absmax is None else decode_absmax(absmax, blocks_of(in_features))


def row_scale(weight: Tensor, absmax: Tensor | None, b: Tensor | None = None, factor: float = 1.0,
              b8: Tensor | None = None) -> Tensor:
    """fp32 (O,): the factor that takes each row's largest value to 448, the largest of fp8.

    If B (O, R) is given, times `factor`, it counts as part of the row and goes into `b8`, scaled.
    """
    if weight.is_cuda and (b is None or b.shape[1] in RANKS):
        return row_scales_on_gpu(weight if absmax is None else absmax,
                                 None if b is None else b.contiguous(), factor, b8)
    largest = weight.abs().amax(1).float() if absmax is None else absmax.amax(1)
    if b is not None: largest = largest.maximum(b.abs().amax(1).float() * factor)
    scale = (largest / FP8_MAX).clamp(min=TINY)
    if b is not None: b8.copy_(b.float() * factor / scale[:, None])
    return scale


def weight_to_fp8(weight: Tensor, absmax: Tensor | None, in_features: int, quant_type: str,
                  scale: Tensor, transposed: bool, out: Tensor | None = None) -> Tensor:
    """W / scale in fp8, (O, I), or (I, O) if `transposed`; into `out` if given."""
    shape = (in_features, len(weight)) if transposed else (len(weight), in_features)
    if out is None: out = torch.empty(shape, dtype=FP8, device=weight.device)
    if weight.is_cuda:
        if absmax is None: dense_to_fp8(weight, scale, transposed, out)
        else: fourbit_to_fp8(weight, absmax, in_features, quant_type, scale, transposed, out)
        return out
    dense = dense_weight(weight, absmax, in_features, quant_type, torch.float32) / scale[:, None]
    return out.copy_(dense.t() if transposed else dense)


def quantize_tokens(xs: list[Tensor], factors: list[float],
                    column_scales: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """x (N, K) side by side, times `factors` and `column_scales` (K,), in fp8, and scales (N,)."""
    if xs[0].is_cuda: return quantize_tokens_on_gpu(xs, factors[:len(xs)], column_scales)
    x = torch.cat([x.float() * factor for x, factor in zip(xs, factors, strict=False)], 1)
    if column_scales is not None: x = x * torch.cat(column_scales)
    scale = (x.abs().amax(1) / FP8_MAX).clamp(min=TINY)
    return (x / scale[:, None]).to(FP8), scale


def scaled_product(a8: Tensor, a_scale: Tensor, b8: Tensor, b_scale: Tensor, dtype: torch.dtype
                   ) -> Tensor:
    """(a8 * a_scale) (b8 * b_scale)^T in `dtype`: a8 (M, K), a_scale (M,), b8 (N, K), b_scale (N,)."""
    if a8.is_cuda:
        return torch._scaled_mm(a8, b8.t(), scale_a=a_scale[:, None], scale_b=b_scale[None],
                                out_dtype=dtype, use_fast_accum=True)
    return ((a8.float() * a_scale[:, None]) @ (b8.float() * b_scale[:, None]).t()).to(dtype)
