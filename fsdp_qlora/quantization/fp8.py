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

Row scales are W's alone, so these and W in fp8 are the same in every step and may be kept
(`fp8_weight_cache.py`): only the adapter's columns are written anew. Each column of B is moved into the
range of fp8 by a factor of its own, which xA is divided by.

Shapes: N tokens, I inputs, O outputs, R rank.  x (N, I), W (O, I), y (N, O)
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from .absmax import BLOCKSIZE
from .formats import FrozenWeight
from .fp8_kernels import (
    columns_to_fp8_on_gpu,
    dense_to_fp8,
    fourbit_to_fp8,
    quantize_tokens_on_gpu,
    row_scales_on_gpu,
)
from .fp8_weight_cache import Fp8Weight, cached_fp8_weight, cached_row_scales
from .kernels import triton

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_TINY = 1e-12  # keeps the scale of an all-zero row finite
_MULTIPLE = 16  # the tensor cores take operands in rows of 16 bytes
# A young adapter's B is far smaller than W and its A of W's size; fp8 has 15 octaves. The small factor
# is moved up and the large one down by so much that both are inside. As B grows it is moved up less.
_BOOST = 32.0
_A_LARGEST = 2.0
# A row of W that is smaller than the largest by more shares that one's scale over this number: B may be
# as large there as elsewhere, and would have to be moved down until nothing was left of it.
_SPREAD = 64.0


def fp8_problem(device: torch.device) -> str | None:
    """Why this device can't do fp8 products, or None. The CPU can, slowly, for tests."""
    if device.type == "cpu":
        return None
    if torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no fp8 arithmetic"
    return None if triton else "triton is not installed"


def fits_fp8(in_features: int, out_features: int) -> bool:
    """Whether a layer's shape suits the kernels; others stay in 16 bits."""
    return in_features % BLOCKSIZE == 0 and out_features % _MULTIPLE == 0


def forward_product(
    x: Tensor,
    w: FrozenWeight,
    xa: Tensor | None = None,
    b: Tensor | None = None,
    scaling: float = 1.0,
) -> Tensor:
    """x W^T in fp8, plus scaling xa B^T if given, with xa (N, R) and B (O, R); in x's dtype."""
    adapter = ([], [], []) if b is None else ([xa], [b], [scaling])
    return forward_products(x, [w], *adapter)[0]


def forward_products(
    x: Tensor,
    frozen: list[FrozenWeight],
    xas: list[Tensor],
    bs: list[Tensor],
    scalings: list[float],
) -> list[Tensor]:
    """The same for layers of one input, all with an adapter or none: x is quantized once for all.

    Each weight has the columns of all adapters, with zeros for those of others.
    """
    rank, inverses = rank_columns(sum(b.shape[1] for b in bs)), []
    forms = [
        cached_fp8_weight("forward", [w.weight], rank, partial(forward_form, w, rank))
        for w in frozen
    ]
    for (w8, (scale,)), b, scaling in zip(forms, bs, scalings, strict=False):
        inverses.append(write_b(b, scale, scaling, w8[:, :rank], sum(map(len, inverses))))
    if bs:
        x8, x_scale = quantize_tokens(
            [_beside(xas), x], [1.0, 1.0], [_beside(inverses, 0), None], rank
        )
    else:
        x8, x_scale = quantize_tokens([x], [1.0])
    return [scaled_product(x8, x_scale, w8, scale, x.dtype) for w8, (scale,) in forms]


def _beside(parts: list[Tensor], dim: int = 1) -> Tensor:
    """Tensors side by side; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def forward_form(w: FrozenWeight, rank: int) -> Fp8Weight:
    """W in fp8 behind `rank` columns that are still to be written, and its rows' scales."""
    w = w.with_float_absmax()
    w8 = torch.empty(len(w.weight), rank + w.in_features, dtype=FP8, device=w.weight.device)
    scale = row_scale(w, adapted=rank > 0)
    weight_to_fp8(w, scale, transposed=False, out=w8[:, rank:])
    return w8, [scale]


def backward_product(
    dys: list[Tensor],
    frozen: list[FrozenWeight],
    dxa: Tensor | None = None,
    a: Tensor | None = None,
) -> Tensor:
    """The sum of dY W over layers of one input, in fp8, plus dxa A if given, in dY's dtype.

    dxa (N, R) and A (R, I) of all the layers side by side. One product: the dY stand side by side
    under one scale per token, the W one below the other.
    """
    rank = 0 if a is None else rank_columns(len(a))
    wt8, scales = cached_fp8_weight(
        "backward", [w.weight for w in frozen], rank, partial(_backward_form, frozen, rank)
    )
    if rank:
        inverse = write_a(a.t(), wt8[:, :rank])
        dys, scales = [dxa, *dys], [inverse, *scales]
    dy8, dy_scale = quantize_tokens(dys, [1.0] * len(dys), scales, rank)
    return scaled_product(dy8, dy_scale, wt8, ones(len(wt8), dy8.device), dys[-1].dtype)


def _backward_form(frozen: list[FrozenWeight], rank: int) -> Fp8Weight:
    """Each W^T in fp8, side by side behind `rank` columns still to be written, and its rows' scales."""
    columns = [rank, *(len(w.weight) for w in frozen)]
    wt8 = torch.empty(
        frozen[0].in_features, sum(columns), dtype=FP8, device=frozen[0].weight.device
    )
    scales = []
    for w, part in zip(frozen, wt8.split(columns, dim=1)[1:], strict=True):
        w = w.with_float_absmax()
        scales.append(row_scale(w))
        weight_to_fp8(w, scales[-1], transposed=True, out=part)
    return wt8, scales


def rank_columns(rank: int) -> int:
    """The columns that adapters of this rank together take in a joined product."""
    return -(-rank // _MULTIPLE) * _MULTIPLE


@cache
def ones(length: int, device: torch.device) -> Tensor:
    """Scales of columns that have none; made once."""
    return torch.ones(length, device=device)


def row_scale(w: FrozenWeight, adapted: bool = False) -> Tensor:
    """fp32 (O,): the factor that takes each row's largest value to 448, the largest of fp8.

    adapted: with an adapter's columns beside them, where no row's may be far below the largest.
    Here and in `weight_to_fp8`, absmax is fp32.
    """
    use = "adapted rows" if adapted else "rows"
    return cached_row_scales(w.weight, use, partial(_new_row_scale, w, adapted))


def _new_row_scale(w: FrozenWeight, adapted: bool) -> Tensor:
    if w.weight.is_cuda:
        scale = row_scales_on_gpu(w.weight if w.absmax is None else w.absmax)
    else:
        largest = w.weight.abs().amax(1).float() if w.absmax is None else w.absmax.amax(1)
        scale = (largest / FP8_MAX).clamp(min=_TINY)
    return scale.maximum(scale.amax() / _SPREAD) if adapted else scale


def write_b(b: Tensor, row_scale: Tensor, scaling: float, out: Tensor, first: int = 0) -> Tensor:
    """scaling B (O, R) into a form's columns of its own, from `first` on; what xA is multiplied with (R,)."""
    most = _BOOST * max(scaling, _TINY)
    return columns_to_fp8(b, row_scale, most, FP8_MAX, out, first, scaling)


def write_a(a: Tensor, out: Tensor) -> Tensor:
    """A^T (I, R) into a form of W^T; what dxA is multiplied with (R,)."""
    return columns_to_fp8(a, None, _A_LARGEST / _TINY, _A_LARGEST, out)


def columns_to_fp8(
    x: Tensor,
    row_scale: Tensor | None,
    most: float,
    end: float,
    out: Tensor,
    first: int = 0,
    times: float = 1.0,
) -> Tensor:
    """x (N, R) over its rows' scales, each column times a factor, in fp8; `times` / factors (R,).

    A factor is the largest, up to `most`, under which no value of the column passes `end`. They go
    into `out` from column `first` on; its others are filled with zeros.
    """
    if x.is_cuda:
        return columns_to_fp8_on_gpu(x, row_scale, most, end, out, first, times)
    scaled = x.float() if row_scale is None else x.float() / row_scale[:, None]
    factor = (end / scaled.abs().amax(0).clamp(min=1e-30)).clamp(max=most)
    out.zero_()
    out[:, first : first + x.shape[1]].copy_(scaled * factor)
    return times / factor


def weight_to_fp8(
    w: FrozenWeight, scale: Tensor, transposed: bool, out: Tensor | None = None
) -> Tensor:
    """W / scale in fp8, (O, I), or (I, O) if `transposed`; into `out` if given.

    `out` of W^T may be (E, I, O / E): of as many experts, whose rows are below each other.
    """
    weight, shape = w.weight, (len(w.weight), w.in_features)
    if out is None:
        out = torch.empty(shape[::-1] if transposed else shape, dtype=FP8, device=weight.device)
    if not weight.is_cuda:
        dense = w.dense(torch.float32) / scale[:, None]
        if transposed:
            dense = dense.unflatten(0, (-1, out.shape[-1])).mT.reshape(out.shape)
        out.copy_(dense)
    elif w.absmax is None:
        dense_to_fp8(weight, scale, transposed, out)
    else:
        fourbit_to_fp8(w, scale, transposed, out)
    return out


def quantize_tokens(
    xs: list[Tensor],
    factors: list[float],
    column_scales: list[Tensor | None] | None = None,
    wide: int = 0,
) -> tuple[Tensor, Tensor]:
    """x (N, K) side by side, times `factors` and `column_scales` (K,), in fp8, and scales (N,).

    The first is filled up with zeros to `wide` columns.
    """
    wide = max(wide, xs[0].shape[1])
    if xs[0].is_cuda:
        return quantize_tokens_on_gpu(xs, factors, column_scales, wide)
    scaled = [
        x.float() * factor * (1 if columns is None else columns)
        for x, factor, columns in zip(xs, factors, column_scales or [None] * len(xs), strict=True)
    ]
    filling = scaled[0].new_zeros(len(scaled[0]), wide - xs[0].shape[1])
    x = torch.cat([scaled[0], filling, *scaled[1:]], 1)
    scale = (x.abs().amax(1) / FP8_MAX).clamp(min=_TINY)
    return (x / scale[:, None]).to(FP8), scale


def scaled_product(
    a8: Tensor, a_scale: Tensor, b8: Tensor, b_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """(a8 * a_scale) (b8 * b_scale)^T in `dtype`: a8 (M, K), a_scale (M,), b8 (N, K), b_scale (N,)."""
    if a8.is_cuda:
        return torch._scaled_mm(
            a8,
            b8.t(),
            scale_a=a_scale[:, None],
            scale_b=b_scale[None],
            out_dtype=dtype,
            use_fast_accum=True,
        )
    return ((a8.float() * a_scale[:, None]) @ (b8.float() * b_scale[:, None]).t()).to(dtype)
