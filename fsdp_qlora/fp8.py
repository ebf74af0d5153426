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
from bitsandbytes.functional import get_4bit_type
from torch import Tensor

from .absmax import decode_absmax
from .fourbit import BLOCKSIZE, blocks_of, dense_weight, padded

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
TINY = 1e-12  # keeps the scale of an all-zero row finite
MULTIPLE = 16  # the tensor cores take operands in rows of 16 bytes

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without; the same arithmetic runs in torch there
    triton = None


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
    x8, x_scale = quantize_tokens(x)
    return scaled_product(x8, x_scale, w8, scale, left, right, x.dtype)


def backward_product(dy: Tensor, weight: Tensor, absmax: Tensor | None, in_features: int,
                     quant_type: str, left: Tensor | None = None, right: Tensor | None = None
                     ) -> Tensor:
    """dY W in fp8, plus left (N, R) right^T (R, I) in dY's dtype if given; the result too."""
    absmax = float_scales(absmax, in_features)
    scale = row_scale(weight, absmax)
    wt8 = weight_to_fp8(weight, absmax, in_features, quant_type, scale, transposed=True)
    dy8, dy_scale = quantize_tokens(dy, scale)
    ones = torch.ones(in_features, device=scale.device)
    return scaled_product(dy8, dy_scale, wt8, ones, left, right, dy.dtype)


def float_scales(absmax: Tensor | None, in_features: int) -> Tensor | None:
    """fp32 scales (O, I/64) from either form that stores them."""
    return None if absmax is None else decode_absmax(absmax, blocks_of(in_features))


def row_scale(weight: Tensor, absmax: Tensor | None) -> Tensor:
    """fp32 (O,): the factor that takes each row's largest value to 448, the largest of fp8."""
    largest = weight.abs().amax(1).float() if absmax is None else absmax.amax(1)
    return (largest / FP8_MAX).clamp(min=TINY)


def weight_to_fp8(weight: Tensor, absmax: Tensor | None, in_features: int, quant_type: str,
                  scale: Tensor, transposed: bool) -> Tensor:
    """W / scale in fp8, (O, I), or (I, O) if `transposed`; both are contiguous."""
    if absmax is not None and weight.is_cuda:
        return nf4_to_fp8(weight, absmax, in_features, quant_type, scale, transposed)
    dense = dense_weight(weight, absmax, in_features, quant_type, torch.float32) / scale[:, None]
    return (dense.t() if transposed else dense).to(FP8).contiguous()


def quantize_tokens(x: Tensor, column_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x (N, K), times `column_scale` (K,) if given, as fp8 (N, K) and fp32 scales (N,)."""
    if x.is_cuda: return quantize_tokens_on_gpu(x, column_scale)
    x = x.float() if column_scale is None else x.float() * column_scale
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


# ---- kernels -----------------------------------------------------------------------------------

if triton:
    @triton.jit
    def _quantize_tokens(x_ptr, column_scale_ptr, out_ptr, scale_ptr, K, HAS_COLUMNS: tl.constexpr,
                         BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        inside = columns < K
        x = tl.load(x_ptr + row * K + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_COLUMNS: x *= tl.load(column_scale_ptr + columns, mask=inside, other=0.0)
        scale = tl.maximum(tl.max(tl.abs(x), 0) / 448.0, 1e-12)
        tl.store(scale_ptr + row, scale)
        tl.store(out_ptr + row * K + columns, (x / scale).to(tl.float8e4nv), mask=inside)

    @triton.jit
    def _lookup(index, code_ptr):
        """code[index] for 4-bit indices by halving: 15 selections are faster than loads."""
        odd, two, four, eight = index & 1, index & 2, index & 4, index & 8
        a = tl.where(odd == 1, tl.load(code_ptr + 1), tl.load(code_ptr))
        b = tl.where(odd == 1, tl.load(code_ptr + 3), tl.load(code_ptr + 2))
        c = tl.where(odd == 1, tl.load(code_ptr + 5), tl.load(code_ptr + 4))
        d = tl.where(odd == 1, tl.load(code_ptr + 7), tl.load(code_ptr + 6))
        low = tl.where(four == 0, tl.where(two == 0, a, b), tl.where(two == 0, c, d))
        a = tl.where(odd == 1, tl.load(code_ptr + 9), tl.load(code_ptr + 8))
        b = tl.where(odd == 1, tl.load(code_ptr + 11), tl.load(code_ptr + 10))
        c = tl.where(odd == 1, tl.load(code_ptr + 13), tl.load(code_ptr + 12))
        d = tl.where(odd == 1, tl.load(code_ptr + 15), tl.load(code_ptr + 14))
        high = tl.where(four == 0, tl.where(two == 0, a, b), tl.where(two == 0, c, d))
        return tl.where(eight == 0, low, high)

    @triton.jit
    def _nf4_to_fp8(packed_ptr, absmax_ptr, code_ptr, scale_ptr, out_ptr, O, I,
                    TRANSPOSED: tl.constexpr, BO: tl.constexpr):
        # One block of 64 inputs of BO rows: 32 bytes a row, one absmax a row.
        rows = tl.program_id(0) * BO + tl.arange(0, BO)
        block, inside = tl.program_id(1), rows < O
        half = block * 32 + tl.arange(0, 32)
        packed = tl.load(packed_ptr + rows[:, None] * (I // 2) + half[None, :],
                         mask=inside[:, None], other=0).to(tl.int32)
        absmax = tl.load(absmax_ptr + rows * (I // 64) + block, mask=inside, other=0.0)
        factor = (absmax / tl.load(scale_ptr + rows, mask=inside, other=1.0))[:, None]
        high = (_lookup(packed >> 4, code_ptr) * factor).to(tl.float8e4nv)
        low = (_lookup(packed & 15, code_ptr) * factor).to(tl.float8e4nv)
        out = tl.interleave(high, low)  # (BO, 64)
        columns, rows = (block * 64 + tl.arange(0, 64)).to(tl.int64), rows.to(tl.int64)
        if TRANSPOSED:
            tl.store(out_ptr + columns[:, None] * O + rows[None, :], tl.trans(out),
                     mask=inside[None, :])
        else:
            tl.store(out_ptr + rows[:, None] * I + columns[None, :], out, mask=inside[:, None])


def quantize_tokens_on_gpu(x: Tensor, column_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """`quantize_tokens` in one pass."""
    n, k = x.shape
    out = torch.empty(n, k, dtype=FP8, device=x.device)
    scale = torch.empty(n, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    _quantize_tokens[(n,)](x, column_scale, out, scale, k, column_scale is not None, block,
                           num_warps=4 if block <= 4096 else 8 if block <= 16384 else 16)
    return out, scale


@cache
def code_table(quant_type: str, device: torch.device) -> Tensor:
    """The 16 values of a 4-bit code, fp32; made once, since making it waits for the GPU."""
    return get_4bit_type(quant_type, device=device)


def nf4_to_fp8(weight: Tensor, absmax: Tensor, in_features: int, quant_type: str, scale: Tensor,
               transposed: bool) -> Tensor:
    """Packed 4-bit rows to fp8 in one pass: (O, I), or (I, O) if `transposed`."""
    assert padded(in_features) == in_features
    rows = weight.shape[0]
    shape = (in_features, rows) if transposed else (rows, in_features)
    out = torch.empty(shape, dtype=FP8, device=weight.device)
    code = code_table(quant_type, weight.device)
    block = 128
    grid = (triton.cdiv(rows, block), in_features // BLOCKSIZE)
    _nf4_to_fp8[grid](weight.view(torch.uint8), absmax, code, scale, out, rows, in_features,
                      transposed, block, num_warps=4)
    return out
