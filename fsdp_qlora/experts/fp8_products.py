"""Grouped products in fp8: `quantization/fp8.py`, for rows of tokens that lie in groups of an expert each.

Scales are one per row of tokens and one per row of a weight, as there; an adapter rides along in columns
before the weight's. In the backward each expert's W^T stands alone, as the kernel takes it, and a row of
dY is multiplied with the row scales of its own expert. Tokens become rows while they are quantized.
torch has the kernel for Hopper: https://github.com/pytorch/pytorch/pull/148531

Shapes: those of grouped_matmul.py; R rank.  xA (S, R), A (E, R, I), B (E, O, R)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..quantization import fp8
from ..quantization.formats import FrozenWeight
from ..quantization.kernels import triton

_TILE_ROWS = 64  # of one expert, that the kernel transposes
_HOPPER = (9, 0)

if triton:
    import triton.language as tl

    @triton.jit
    def _quantize_rows(
        x_ptr,
        tokens_ptr,
        ends_ptr,
        column_scale_ptr,
        beside_ptr,
        inverse_ptr,
        out_ptr,
        scale_ptr,
        STRIDE,
        K,
        R,
        WIDE,
        E,
        BK: tl.constexpr,
        BR: tl.constexpr,
        BE: tl.constexpr,
    ):
        # One row behind WIDE columns of what stands beside it, which R of are filled.
        row = tl.program_id(0).to(tl.int64)
        token = row
        if tokens_ptr is not None:
            token = tl.load(tokens_ptr + row)
        columns = tl.arange(0, BK)
        x = tl.load(x_ptr + token * STRIDE + columns, mask=columns < K, other=0.0).to(tl.float32)
        if column_scale_ptr is not None:
            experts = tl.arange(0, BE)
            ends = tl.load(ends_ptr + experts, mask=experts < E, other=2147483647)
            expert = tl.sum((ends <= row).to(tl.int32), 0)
            x *= tl.load(column_scale_ptr + expert * K + columns, mask=columns < K, other=0.0)
        largest = tl.max(tl.abs(x), 0)
        ranks = tl.arange(0, BR)
        if beside_ptr is not None:
            beside = tl.load(beside_ptr + row * R + ranks, mask=ranks < R, other=0.0).to(tl.float32)
            beside *= tl.load(inverse_ptr + ranks, mask=ranks < R, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(beside), 0))
        scale = tl.maximum(largest / 448.0, 1e-12)
        tl.store(scale_ptr + row, scale)
        out_ptr += row * (WIDE + K)
        if beside_ptr is not None:
            tl.store(out_ptr + ranks, (beside / scale).to(tl.float8e4nv), mask=ranks < WIDE)
        tl.store(out_ptr + WIDE + columns, (x / scale).to(tl.float8e4nv), mask=columns < K)


def grouped_fp8_problem(device: torch.device) -> str | None:
    """Why this device can't multiply experts in fp8, or None. The CPU can, slowly, for tests."""
    if device.type == "cpu" or torch.cuda.get_device_capability(device) == _HOPPER:
        return None
    name = torch.cuda.get_device_name(device)
    return f"torch multiplies experts in fp8 on Hopper alone, and this is a {name}"


def fits_grouped_fp8(in_features: int, expert_rows: int) -> bool:
    """Whether experts' shape suits the kernels; others stay in 16 bits."""
    return fp8.fits_fp8(in_features, expert_rows) and not expert_rows % _TILE_ROWS


def forward_product(
    x: Tensor,
    ends: Tensor,
    tokens: Tensor | None,
    w: FrozenWeight,
    b: Tensor | None = None,
    xa: Tensor | None = None,
) -> Tensor:
    """y (S, O) in x's dtype, of W + B A of each expert if given; x are tokens if `tokens` of rows are."""
    experts, rank, inverse = len(ends), 0 if b is None else fp8.rank_columns(b.shape[2]), None
    w8, (scale,) = fp8.forward_form(w, rank)
    if b is not None:
        inverse = fp8.write_b(b.flatten(0, 1), scale, 1.0, w8[:, :rank])
    x8, x_scale = quantized_rows(x, ends, tokens, None, xa, inverse, rank)
    w8, scale = (t.unflatten(0, (experts, -1)) for t in (w8, scale))
    return _scaled_products(x8, x_scale, w8, scale, ends, x.dtype)


def backward_product(
    dy: Tensor,
    ends: Tensor,
    tokens: Tensor | None,
    w: FrozenWeight,
    dxa: Tensor | None = None,
    a: Tensor | None = None,
) -> Tensor:
    """dX (S, I), likewise, plus dxa (S, R) times A of each expert if given."""
    experts, rank, inverse = len(ends), 0 if a is None else fp8.rank_columns(a.shape[1]), None
    rows, device = len(w.weight) // experts, w.weight.device
    wt8 = torch.empty(experts, w.in_features, rank + rows, dtype=fp8.FP8, device=device)
    w = w.with_float_absmax()
    scale = fp8.row_scale(w)
    fp8.weight_to_fp8(w, scale, transposed=True, out=wt8[..., rank:])
    if a is not None:
        inverse = fp8.write_a(a.mT.flatten(0, 1), wt8.flatten(0, 1)[:, :rank])
    dy8, dy_scale = quantized_rows(dy, ends, tokens, scale.view(experts, rows), dxa, inverse, rank)
    ones = fp8.ones(experts * w.in_features, device).view(experts, -1)
    return _scaled_products(dy8, dy_scale, wt8, ones, ends, dy.dtype)


def quantized_rows(
    x: Tensor,
    ends: Tensor,
    tokens: Tensor | None,
    column_scales: Tensor | None,
    beside: Tensor | None,
    inverse: Tensor | None,
    wide: int,
) -> tuple[Tensor, Tensor]:
    """Rows in fp8 behind `wide` columns of what is beside them times `inverse`, and each one's scale.

    column_scales (E, K): what a row is multiplied with before, by its expert.
    """
    if x.is_cuda:
        return quantize_rows_on_gpu(x, ends, tokens, column_scales, beside, inverse, wide)
    x = (x if tokens is None else x[tokens]).float()
    if column_scales is not None:
        counts = ends.diff(prepend=ends.new_zeros(1))
        x = x * column_scales.repeat_interleave(counts, 0)
    if beside is not None:
        beside = nn.functional.pad(beside.float() * inverse, (0, wide - beside.shape[1]))
        x = torch.cat([beside, x], 1)
    return fp8.quantize_tokens([x], [1.0])


def quantize_rows_on_gpu(
    x: Tensor,
    ends: Tensor,
    tokens: Tensor | None,
    column_scales: Tensor | None,
    beside: Tensor | None,
    inverse: Tensor | None,
    wide: int,
) -> tuple[Tensor, Tensor]:
    """The same in one pass."""
    rows, width = len(x if tokens is None else tokens), x.shape[1]
    out = torch.empty(rows, wide + width, dtype=fp8.FP8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _quantize_rows[(rows,)](
        x,
        tokens,
        ends,
        column_scales,
        beside,
        inverse,
        out,
        scale,
        x.stride(0),
        width,
        0 if beside is None else beside.shape[1],
        wide,
        len(ends),
        block,
        triton.next_power_of_2(max(wide, 1)),
        triton.next_power_of_2(len(ends)),
        num_warps=4 if block <= 4096 else 8 if block <= 16384 else 16,
    )
    return out, scale


def _scaled_products(
    x8: Tensor, x_scale: Tensor, w8: Tensor, w_scale: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """Each group of x8 (S, K) times its expert's of w8 (E, O, K) transposed, under their scales."""
    if x8.is_cuda:
        y = torch._scaled_grouped_mm(
            x8,
            w8.mT,
            x_scale,
            w_scale,
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    else:
        x, w = x8.float() * x_scale[:, None], w8.float() * w_scale[..., None]
        y = nn.functional.grouped_mm(x, w.mT, offs=ends)
    return y.to(dtype)
