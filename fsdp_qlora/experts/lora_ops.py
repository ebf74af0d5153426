"""The arithmetic of adapted experts: y = x W^T + scaling (x A^T) B^T, with W, A and B of each expert.

One op for all experts of a layer, which keeps its input alone: W is dequantized again in backward, and
x A^T, which only the gradient of B asks for, made there. Where a kernel unpacks W, B A is added on the
way, so that no product but W's passes over the rows in a forward; elsewhere the adapter's is added to it.
A and B lie as PEFT's `target_parameters` has them, and each expert's are cut out here. An expert without
tokens gets gradients of zero.

Shapes: those of grouped_matmul.py; R rank.  A (E R, I) expert by expert, B (O, R E) rank by rank
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..quantization.formats import FrozenWeight
from ..quantization.kernels import can_unpack_experts
from .grouped_matmul import (
    Routing,
    backward_products,
    forward_products,
    fp8_backward_products,
    fp8_forward_products,
    grouped,
    length_at,
    outer_products,
)

_RANK_STEP = 8  # ranks are filled up with zeros to a multiple, which the grouped kernel asks for


@torch.library.custom_op("fsdp_qlora::adapted_experts", mutates_args=())
def adapted_experts(
    x: Tensor,
    ends: Tensor,
    tokens: Tensor | None,
    rows: Tensor | None,
    tokens_at: str,
    weight: Tensor,
    absmax: Tensor | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
    in_features: int,
    quant_type: str,
    product_dtype: str,
) -> Tensor:
    """y, of rows or of tokens."""
    routing = Routing(ends, tokens, rows, tokens_at)
    w = FrozenWeight(weight, absmax, in_features, quant_type)
    a, b = _each_a(a, len(ends), x.dtype), _each_b(b, scaling, len(ends), x.dtype)
    x = routing.inputs(x)
    if product_dtype == "fp8":
        return routing.outputs(fp8_forward_products(x, Routing(ends), w, grouped(x, a.mT, ends), b))
    if can_unpack_experts(w, len(ends), b.shape[2], x.dtype):
        return routing.outputs(forward_products(x, ends, w, a, b))
    y = forward_products(x, ends, w)
    return routing.outputs(y.add_(grouped(grouped(x, a.mT, ends), b.mT, ends)))


@torch.library.custom_op("fsdp_qlora::adapted_experts_backward", mutates_args=())
def _adapted_experts_backward(
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    tokens: Tensor | None,
    rows: Tensor | None,
    weight: Tensor,
    absmax: Tensor | None,
    a: Tensor,
    b: Tensor,
    tokens_at: str,
    scaling: float,
    in_features: int,
    quant_type: str,
    product_dtype: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dX, of x's shape, dA (E R, I) and dB (O, R E); these two are rounded once to x's dtype."""
    routing, rank = Routing(ends, tokens, rows, tokens_at), len(a) // len(ends)
    of_a, of_b = a.dtype, b.dtype
    w = FrozenWeight(weight, absmax, in_features, quant_type)
    a, b = _each_a(a, len(ends), dy.dtype), _each_b(b, scaling, len(ends), dy.dtype)
    dy, x = routing.output_gradients(dy), routing.inputs(x)
    dxa, xa = grouped(dy, b, ends), grouped(x, a.mT, ends)
    da = outer_products(dxa, x, ends)[:, :rank].to(of_a)
    db = outer_products(dy, xa, ends)[:, :, :rank].to(of_b) * scaling
    del x, xa
    if product_dtype == "fp8":
        dx = fp8_backward_products(dy, Routing(ends), w, dxa, a)
    elif can_unpack_experts(w, len(ends), b.shape[2], dy.dtype):
        dx = backward_products(dy, ends, w, a, b)
    else:
        dx = backward_products(dy, ends, w).add_(grouped(dxa, a, ends))
    del dy
    dx, da, db = routing.input_gradients(dx), da.flatten(0, 1), db.permute(1, 2, 0).flatten(1)
    return dx, da.contiguous(), db.contiguous()


def _each_a(a: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """A of each expert (E, R, I), with rows of zeros after its last."""
    a = a.unflatten(0, (experts, -1)).to(dtype)
    missing = -a.shape[1] % _RANK_STEP
    return nn.functional.pad(a, (0, 0, 0, missing)) if missing else a


def _each_b(b: Tensor, scaling: float, experts: int, dtype: torch.dtype) -> Tensor:
    """scaling B of each expert (E, O, R), with columns of zeros after its last; rounded once."""
    b = b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    missing = -b.shape[2] % _RANK_STEP
    b = nn.functional.pad(b, (0, missing)) if missing else b
    return torch.mul(b, scaling, out=torch.empty(b.shape, dtype=dtype, device=b.device))


# ---- shapes for tracing, and autograd ----------------------------------------------------------


@adapted_experts.register_fake
def _(x, ends, tokens, rows, tokens_at, weight, absmax, a, b, *constants):
    return x.new_empty(length_at("output", x, tokens, rows, tokens_at), b.shape[0])


@_adapted_experts_backward.register_fake
def _(dy, x, ends, tokens, rows, weight, absmax, a, b, *constants):
    return x.new_empty(x.shape), a.new_empty(a.shape), b.new_empty(b.shape)


def _save(ctx, inputs, output):
    x, ends, tokens, rows, tokens_at, weight, absmax, a, b, *constants = inputs
    ctx.constants = tokens_at, *constants
    ctx.save_for_backward(x, ends, tokens, rows, weight, absmax, a, b)


def _backward(ctx, dy):
    dx, da, db = _adapted_experts_backward(dy.contiguous(), *ctx.saved_tensors, *ctx.constants)
    return dx, *[None] * 6, da, db, *[None] * 4


adapted_experts.register_autograd(_backward, setup_context=_save)
