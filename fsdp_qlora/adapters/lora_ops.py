"""The arithmetic of an adapted linear layer: y = x W^T + scaling (x A^T) B^T, with W frozen.

A layer keeps only its input, the rank-R product and the packed weight; W is dequantized again in
backward. LoRA is arXiv:2106.09685.

Where 4-bit weights are unpacked for a 16-bit product on a GPU, the adapter is added on the way, in
fp32: one rounding for W + scaling B A, where W alone would be rounded too. So the layer is one large
product in each direction, and no rank-R product writes an output of full size.

Shapes: N tokens of all rows, I inputs, O outputs, R rank.  x (N, I), A (R, I), B (O, R), y (N, O)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..quantization import fp8
from ..quantization.formats import FrozenWeight
from ..quantization.kernels import can_unpack_adapted, unpack_adapted
from .dropout import dropped, dropped_product, product_of_dropped


# Two opaque ops, so that torch.compile's partitioner can't keep a dequantized W, and so that a block
# that is recomputed runs its last large product once: autograd saves a Python op's tensors when it
# has run, so the op that saves is the cheap one. What links them is a token of y's shape that takes
# no memory: its gradient is dY.
@torch.library.custom_op("fsdp_qlora::adapted_inputs", mutates_args=())
def adapted_inputs(
    x: Tensor,
    weight: Tensor,
    absmax: Tensor | None,
    a: Tensor,
    b: Tensor,
    seed: Tensor | None,
    scaling: float,
    p: float,
    in_features: int,
    quant_type: str,
    product_dtype: str,
) -> tuple[Tensor, Tensor]:
    """x' A^T (N, R), and a token (N, O) that carries the gradient of y to all that is saved here.

    x' is x, or with a seed what dropout of a share p leaves of it.
    """
    xa = x @ a.to(x.dtype).t() if seed is None else product_of_dropped(x, a, seed, p)
    return xa, x.new_zeros(1).expand(x.shape[0], b.shape[0])


@torch.library.custom_op("fsdp_qlora::adapted_linear", mutates_args=())
def adapted_linear(
    token: Tensor,
    x: Tensor,
    xa: Tensor,
    weight: Tensor,
    absmax: Tensor | None,
    bias: Tensor | None,
    a: Tensor | None,
    b: Tensor,
    scaling: float,
    in_features: int,
    quant_type: str,
    product_dtype: str,
) -> Tensor:
    """y = x W^T + bias + scaling (x' A^T) B^T, given xa = x' A^T (N, R); `a` is A where x' is x.

    A rank-R product comes before the large one, which adds to it in its epilogue: that hides the
    reading of y.
    """
    w = FrozenWeight(weight, absmax, in_features, quant_type)
    if product_dtype == "fp8":
        y = fp8.forward_product(x, w, xa, b, scaling)
    elif a is not None and can_unpack_adapted(w, b.shape[1], x.dtype):
        y = x @ unpack_adapted(w, a, b, scaling).t()
    else:
        y = xa @ _scaled(b, scaling, x.dtype).t()
        y.addmm_(x, w.dense(x.dtype).t())
    return y if bias is None else y.add_(bias)


@torch.library.custom_op("fsdp_qlora::adapted_linear_backward", mutates_args=())
def adapted_linear_backward(
    dy: Tensor,
    x: Tensor,
    xa: Tensor,
    weight: Tensor,
    absmax: Tensor | None,
    a: Tensor,
    b: Tensor,
    seed: Tensor | None,
    scaling: float,
    p: float,
    in_features: int,
    quant_type: str,
    product_dtype: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dX (N, I), dA (R, I) and dB (O, R); the gradients of A and B are summed in their own dtype."""
    w = FrozenWeight(weight, absmax, in_features, quant_type)
    if seed is None:
        adapter = ([a], [b], [scaling])
        dx, da, db = _shared_input_backward([dy], x, [xa], [w], *adapter, product_dtype)
        return dx, da, db
    dxa = dy @ _scaled(b, scaling, dy.dtype)
    dx = dropped_product(dxa, a, seed, p)
    if product_dtype == "fp8":
        dx += fp8.backward_product([dy], [w])
    else:
        dx.addmm_(dy, w.dense(dy.dtype))
    da = product(dxa.t(), dropped(x, seed, p), a.dtype)
    return dx, da, product(dy.t(), xa, b.dtype) * scaling


# ---- layers that share an input: a compiled block calls these instead (shared_inputs.py) --------------


@torch.library.custom_op("fsdp_qlora::shared_inputs", mutates_args=())
def shared_inputs(x: Tensor, a: Sequence[Tensor]) -> list[Tensor]:
    """x A^T (N, R) of each layer, with x read once."""
    products = x @ torch.cat([each.to(x.dtype) for each in a]).t()
    return [part.contiguous() for part in products.split([len(each) for each in a], dim=1)]


@torch.library.custom_op("fsdp_qlora::shared_fp8_linears", mutates_args=())
def shared_fp8_linears(
    x: Tensor,
    xa: Sequence[Tensor],
    weight: Sequence[Tensor],
    absmax: Sequence[Tensor],
    bias: Sequence[Tensor],
    b: Sequence[Tensor],
    scaling: Sequence[float],
    in_features: int,
    quant_type: str,
) -> list[Tensor]:
    """Each layer's y (..., O) of one x (..., I) in fp8: `adapted_linear`, or `frozen_linear` without b.

    x is quantized once. Of absmax and bias, there is one for each layer or none.
    """
    frozen = _frozen(weight, absmax, in_features, quant_type)
    ys = fp8.forward_products(x.reshape(-1, in_features), frozen, xa, b, scaling)
    for y, its_bias in zip(ys, bias, strict=False):
        y.add_(its_bias)
    return [y.view(*x.shape[:-1], -1) for y in ys]


@torch.library.custom_op("fsdp_qlora::shared_inputs_backward", mutates_args=())
def shared_inputs_backward(
    dy: Sequence[Tensor],
    x: Tensor,
    xa: Sequence[Tensor],
    weight: Sequence[Tensor],
    absmax: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scaling: Sequence[float],
    in_features: int,
    quant_type: str,
    product_dtype: str,
) -> list[Tensor]:
    """The sum of the layers' dX, then each layer's dA, then each dB; no absmax if W is dense."""
    dx, da, *db = _shared_input_backward(
        dy, x, xa, _frozen(weight, absmax, in_features, quant_type), a, b, scaling, product_dtype
    )
    parts = [da] if len(a) == 1 else [p.clone() for p in da.split([len(each) for each in a])]
    return [dx, *parts, *db]


@torch.library.custom_op("fsdp_qlora::shared_frozen_backward", mutates_args=())
def shared_frozen_backward(
    dy: Sequence[Tensor],
    weight: Sequence[Tensor],
    absmax: Sequence[Tensor],
    in_features: int,
    quant_type: str,
    product_dtype: str,
) -> Tensor:
    """The sum of dX (..., I) of layers without an adapter; no absmax if W is dense."""
    dys = [each.reshape(-1, each.shape[-1]) for each in dy]
    frozen = _frozen(weight, absmax, in_features, quant_type)
    if product_dtype == "fp8":
        dx = fp8.backward_product(dys, frozen)
    else:
        dx = _sum_of_products(dys, (w.dense(dys[0].dtype) for w in frozen))
    return dx.view(*dy[0].shape[:-1], in_features)


def _frozen(
    weights: Sequence[Tensor], absmaxes: Sequence[Tensor], in_features: int, quant_type: str
) -> list[FrozenWeight]:
    """The weights of layers that share an input; no absmax if they are dense."""
    absmaxes = absmaxes or [None] * len(weights)
    return [
        FrozenWeight(*each, in_features, quant_type) for each in zip(weights, absmaxes, strict=True)
    ]


def _shared_input_backward(
    dys, x: Tensor, xas, frozen: list[FrozenWeight], as_, bs, scalings, product_dtype: str
) -> list[Tensor]:
    """dX (N, I) summed over layers with the input x, their dA one below the other, each one's dB.

    x is read once for all dA, and dX is written by one product after another, not added up after.
    """
    dtype = x.dtype
    dxa = [dy @ _scaled(b, s, dtype) for dy, b, s in zip(dys, bs, scalings, strict=True)]
    dxa = dxa[0] if len(dxa) == 1 else torch.cat(dxa, 1)
    da = product(dxa.t(), x, as_[0].dtype)
    dbs = [
        product(dy.t(), xa, b.dtype) * s
        for dy, xa, b, s in zip(dys, xas, bs, scalings, strict=True)
    ]
    if product_dtype != "fp8" and all(
        can_unpack_adapted(w, b.shape[1], dtype) for w, b in zip(frozen, bs, strict=True)
    ):
        dense = (unpack_adapted(*each) for each in zip(frozen, as_, bs, scalings, strict=True))
        return [_sum_of_products(dys, dense), da, *dbs]
    a = as_[0] if len(as_) == 1 else torch.cat(list(as_))
    if product_dtype == "fp8":
        return [fp8.backward_product(dys, frozen, dxa, a), da, *dbs]
    dense = (w.dense(dtype) for w in frozen)
    return [_sum_of_products(dys, dense, dxa @ a.to(dtype)), da, *dbs]


def _sum_of_products(dys, weights, total: Tensor | None = None) -> Tensor:
    """total + sum of dY W; each W is made when its turn comes, and gone before the next."""
    weights = iter(weights)
    for dy in dys:  # zip would hold on to a W while it asks for the next
        total = dy @ next(weights) if total is None else total.addmm_(dy, next(weights))
    return total


def _scaled(b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """scaling B in `dtype`, in one launch: rounded once, from B's own dtype."""
    return torch.mul(b, scaling, out=torch.empty_like(b, dtype=dtype))


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrix product in the operands' dtype whose sums stay in `dtype` where the device can."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


# ---- shapes for tracing, and autograd ----------------------------------------------------------


@adapted_inputs.register_fake
def _(x, weight, absmax, a, b, seed, scaling, p, in_features, quant_type, product_dtype):
    n = x.shape[0]
    return x.new_empty(n, a.shape[0]), x.new_empty(1).expand(n, b.shape[0])


@adapted_linear.register_fake
def _(token, x, xa, weight, absmax, bias, a, b, scaling, in_features, quant_type, product_dtype):
    return x.new_empty(x.shape[0], b.shape[0])


@adapted_linear_backward.register_fake
def _(dy, x, xa, weight, absmax, a, b, seed, scaling, p, in_features, quant_type, product_dtype):
    return x.new_empty(x.shape), a.new_empty(a.shape), b.new_empty(b.shape)


@shared_inputs.register_fake
def _(x, a):
    return [x.new_empty(x.shape[0], len(each)) for each in a]


@shared_fp8_linears.register_fake
def _(x, xa, weight, absmax, bias, b, scaling, in_features, quant_type):
    return [x.new_empty(*x.shape[:-1], len(each)) for each in weight]


@shared_inputs_backward.register_fake
def _(dy, x, xa, weight, absmax, a, b, scaling, in_features, quant_type, product_dtype):
    return [x.new_empty(x.shape), *(each.new_empty(each.shape) for each in (*a, *b))]


@shared_frozen_backward.register_fake
def _(dy, weight, absmax, in_features, quant_type, product_dtype):
    return dy[0].new_empty(*dy[0].shape[:-1], in_features)


def _save_inputs(ctx, inputs, output):
    x, weight, absmax, a, b, seed, *ctx.constants = inputs
    ctx.save_for_backward(x, output[0], weight, absmax, a, b, seed)


def _inputs_backward(ctx, _, dy):
    dx, da, db = adapted_linear_backward(dy.contiguous(), *ctx.saved_tensors, *ctx.constants)
    return dx, None, None, da, db, *[None] * 6


def _token_backward(ctx, dy):
    return dy, *[None] * 11


adapted_inputs.register_autograd(_inputs_backward, setup_context=_save_inputs)
adapted_linear.register_autograd(_token_backward)
