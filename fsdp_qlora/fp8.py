"""Products of frozen weights in 8-bit floats, for GPUs that multiply them twice as fast (Hopper on).

Only the frozen weight's products are in fp8, forward and backward; adapters stay in bf16. Scales
are dynamic: one per token, one per weight row (arXiv:2209.05433 describes the formats). A weight
row's scale follows from its blocks' absmax, so 4-bit weights become fp8 in one pass, without a
16-bit copy between.

In the backward, dX = dY W sums over W's rows, where the row scales would have to be inside the sum:
they are multiplied into dY before dY is quantized.

Shapes: N tokens, I inputs, O outputs, R rank.  x (N, I), W (O, I), y (N, O)
"""
from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .absmax import decode_absmax
from .fourbit import BLOCKSIZE, blocks_of, dense_weight
from .kernels import nf4_to_fp8, quantize_tokens_on_gpu, triton

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
TINY = 1e-12  # keeps the scale of an all-zero row finite
MULTIPLE = 16  # the tensor cores take operands in rows of 16 bytes


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
                    left: Tensor | None = None, right: Tensor | None = None) -> Tensor:
    """x W^T in fp8, plus left (N, R) right^T (R, O) in x's dtype if given; the result too."""
    absmax = float_scales(absmax, x.shape[1])
    scale = row_scale(weight, absmax)
    w8 = weight_to_fp8(weight, absmax, x.shape[1], quant_type, scale, transposed=False)
    x8, x_scale = quantize_tokens([x])
    return scaled_product(x8, x_scale, w8, scale, left, right, x.dtype)


def backward_product(dys: list[Tensor], weights: list[Tensor], absmaxes: list[Tensor | None],
                     in_features: int, quant_type: str, left: Tensor | None = None,
                     right: Tensor | None = None) -> Tensor:
    """The sum of dY W over layers of one input, in fp8, plus left (N, R) right^T (R, I) if given.

    One product: the dY stand side by side under one scale per token, the W one below the other.
    """
    absmaxes = [float_scales(absmax, in_features) for absmax in absmaxes]
    scales = [row_scale(*each) for each in zip(weights, absmaxes, strict=True)]
    wt8 = torch.empty(in_features, sum(map(len, weights)), dtype=FP8, device=dys[0].device)
    parts = wt8.split([len(weight) for weight in weights], dim=1)
    for weight, absmax, scale, part in zip(weights, absmaxes, scales, parts, strict=True):
        weight_to_fp8(weight, absmax, in_features, quant_type, scale, transposed=True, out=part)
    dy8, dy_scale = quantize_tokens(dys, scales)
    return scaled_product(dy8, dy_scale, wt8, ones(in_features, dy8.device), left,
                          right, dys[0].dtype)


@cache
def ones(length: int, device: torch.device) -> Tensor:
    """Scales of columns that have none; made once."""
    return torch.ones(length, device=device)


def float_scales(absmax: Tensor | None, in_features: int) -> Tensor | None:
    """fp32 scales (O, I/64) from either form that stores them."""
    return None if absmax is None else decode_absmax(absmax, blocks_of(in_features))


def row_scale(weight: Tensor, absmax: Tensor | None) -> Tensor:
    """fp32 (O,): the factor that takes each row's largest value to 448, the largest of fp8."""
    largest = weight.abs().amax(1).float() if absmax is None else absmax.amax(1)
    return (largest / FP8_MAX).clamp(min=TINY)


def weight_to_fp8(weight: Tensor, absmax: Tensor | None, in_features: int, quant_type: str,
                  scale: Tensor, transposed: bool, out: Tensor | None = None) -> Tensor:
    """W / scale in fp8, (O, I), or (I, O) if `transposed`; into `out` if given."""
    shape = (in_features, len(weight)) if transposed else (len(weight), in_features)
    if out is None: out = torch.empty(shape, dtype=FP8, device=weight.device)
    if absmax is not None and weight.is_cuda:
        nf4_to_fp8(weight, absmax, in_features, quant_type, scale, transposed, out)
        return out
    dense = dense_weight(weight, absmax, in_features, quant_type, torch.float32) / scale[:, None]
    return out.copy_(dense.t() if transposed else dense)


def quantize_tokens(xs: list[Tensor], column_scales: list[Tensor] | None = None
                    ) -> tuple[Tensor, Tensor]:
    """x (N, K) side by side, times `column_scales` (K,) if given, in fp8, and fp32 scales (N,)."""
    if xs[0].is_cuda: return quantize_tokens_on_gpu(xs, column_scales)
    x = torch.cat(xs, 1).float()
    if column_scales is not None: x = x * torch.cat(column_scales)
    scale = (x.abs().amax(1) / FP8_MAX).clamp(min=TINY)
    return (x / scale[:, None]).to(FP8), scale


def scaled_product(a8: Tensor, a_scale: Tensor, b8: Tensor, b_scale: Tensor, left: Tensor | None,
                   right: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(a8 * a_scale) (b8 * b_scale)^T, plus left right^T if given, in `dtype`.

    a8 (M, K), a_scale (M,), b8 (N, K), b_scale (N,), left (M, R), right (N, R).
    """
    if a8.is_cuda:
        product = torch._scaled_mm(a8, b8.t(), scale_a=a_scale[:, None], scale_b=b_scale[None],
                                   out_dtype=dtype, use_fast_accum=True)
    else:
        product = ((a8.float() * a_scale[:, None]) @ (b8.float() * b_scale[:, None]).t()).to(dtype)
    return product if left is None else product.addmm_(left, right.t())
