"""Products of tokens that lie in groups, each group with the weight of its own expert.

One kernel for all groups, which reads where they end from the GPU's own memory: the host never waits
for how many tokens an expert got, so a block with experts can be compiled and queued like any other.
Weights of few bits are unpacked for all experts, some of their rows at a time, and never kept. Nor are
tokens in the order of their experts: products that take them reorder them themselves, in forward and
backward, so that a block keeps N rows where there are K times as many.
torch's grouped product: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.grouped_mm.html

Shapes: N tokens, K experts of each, S = N K rows of tokens, ordered by expert; E experts; I inputs,
O outputs of each.
x (S, I), y (S, O), or (N, ..) on the side where they are tokens; weight (E O, I), packed or not
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..quantization.formats import FrozenWeight
from ..quantization.kernels import can_unpack_experts, unpack_experts
from . import fp8_products
from .row_sums import sum_rows

PART_VALUES = 2**29  # of W that exist at once: 1 GiB in bf16, and twice as many in fp8
_ALIGNMENT = 16  # bytes, of the rows of what the kernel takes


class Routing(NamedTuple):
    """Which rows each expert gets, and on which side of a product there are tokens instead of rows."""

    ends: Tensor  # (E,) int32, the row after an expert's last
    tokens: Tensor | None = None  # (S,) the token of each row
    rows: Tensor | None = None  # (N, K) the rows of each token
    tokens_at: str = ""  # "input", "output", or neither

    def inputs(self, x: Tensor) -> Tensor:
        """What a product takes, as rows."""
        return x.index_select(0, self.tokens) if self.tokens_at == "input" else x

    def outputs(self, y: Tensor) -> Tensor:
        """What a product gives: sums over the rows of each token, in fp32, if tokens are wanted."""
        return sum_rows(y, self.rows) if self.tokens_at == "output" else y

    def output_gradients(self, dy: Tensor) -> Tensor:
        """The adjoint of `outputs`."""
        return dy.index_select(0, self.tokens) if self.tokens_at == "output" else dy

    def input_gradients(self, dx: Tensor) -> Tensor:
        """The adjoint of `inputs`."""
        return sum_rows(dx, self.rows) if self.tokens_at == "input" else dx


@torch.library.custom_op("fsdp_qlora::grouped_linear", mutates_args=())
def grouped_linear(
    x: Tensor,
    ends: Tensor,
    tokens: Tensor | None,
    rows: Tensor | None,
    tokens_at: str,
    weight: Tensor,
    absmax: Tensor | None,
    in_features: int,
    quant_type: str,
    product_dtype: str,
) -> Tensor:
    """y, where each group of x is multiplied with its expert's W^T."""
    routing = Routing(ends, tokens, rows, tokens_at)
    w = FrozenWeight(weight, absmax, in_features, quant_type)
    if product_dtype == "fp8":
        return routing.outputs(fp8_forward_products(x, routing, w))
    return routing.outputs(forward_products(routing.inputs(x), ends, w))


@torch.library.custom_op("fsdp_qlora::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    dy: Tensor,
    ends: Tensor,
    tokens: Tensor | None,
    rows: Tensor | None,
    tokens_at: str,
    weight: Tensor,
    absmax: Tensor | None,
    in_features: int,
    quant_type: str,
    product_dtype: str,
) -> Tensor:
    """dX, of x's shape."""
    routing = Routing(ends, tokens, rows, tokens_at)
    w = FrozenWeight(weight, absmax, in_features, quant_type)
    if product_dtype == "fp8":
        return routing.input_gradients(fp8_backward_products(dy, routing, w))
    return routing.input_gradients(backward_products(routing.output_gradients(dy), ends, w))


@torch.library.custom_op("fsdp_qlora::grouped_gradient", mutates_args=())
def _grouped_gradient(
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    tokens: Tensor | None,
    rows: Tensor | None,
    tokens_at: str,
    dtype: torch.dtype,
) -> Tensor:
    """dW (E, O, I) in `dtype`: zero for an expert without tokens."""
    routing = Routing(ends, tokens, rows, tokens_at)
    return outer_products(routing.output_gradients(dy), routing.inputs(x), ends).to(dtype)


def forward_products(x: Tensor, ends: Tensor, w: FrozenWeight, a=None, b=None) -> Tensor:
    """y (S, O) of rows x (S, I); with A (E, R, I) and B (E, O, R), of W + B A."""
    parts = _output_parts(w, len(ends), 2)
    if len(parts) == 1:
        return grouped(x, _dense_part(w, parts[0], len(ends), x.dtype, a, b).mT, ends)
    y = x.new_empty(len(x), len(w.weight) // len(ends))
    for part in parts:
        y[:, part] = grouped(x, _dense_part(w, part, len(ends), x.dtype, a, b).mT, ends)
    return y


def backward_products(dy: Tensor, ends: Tensor, w: FrozenWeight, a=None, b=None) -> Tensor:
    """dX (S, I) of the gradients dy (S, O) of rows; A and B as above."""
    first, *others = _output_parts(w, len(ends), 2)
    dx = grouped(dy[:, first], _dense_part(w, first, len(ends), dy.dtype, a, b), ends)
    for part in others:
        dx += grouped(dy[:, part], _dense_part(w, part, len(ends), dy.dtype, a, b), ends)
    return dx


def fp8_forward_products(
    x: Tensor, routing: Routing, w: FrozenWeight, xa: Tensor | None = None, b: Tensor | None = None
) -> Tensor:
    """y (S, O) in fp8, of what the product takes; with xA (S, R) and B (E, O, R), of W + B A."""
    ends = routing.ends
    tokens = routing.tokens if routing.tokens_at == "input" else None
    ys = [
        fp8_products.forward_product(x, ends, tokens, *_part(w, part, len(ends), b), xa)
        for part in _output_parts(w, len(ends), 1)
    ]
    return ys[0] if len(ys) == 1 else torch.cat(ys, 1)


def fp8_backward_products(
    dy: Tensor,
    routing: Routing,
    w: FrozenWeight,
    dxa: Tensor | None = None,
    a: Tensor | None = None,
) -> Tensor:
    """dX (S, I) in fp8, of the gradient of what the product gives, plus dxA (S, R) times A (E, R, I)."""
    ends, dx = routing.ends, None
    tokens = routing.tokens if routing.tokens_at == "output" else None
    for part in _output_parts(w, len(ends), 1):
        w_part, _ = _part(w, part, len(ends))
        of_part = fp8_products.backward_product(dy[:, part], ends, tokens, w_part, dxa, a)
        dx, dxa, a = of_part if dx is None else dx.add_(of_part), None, None
    return dx


def _output_parts(w: FrozenWeight, experts: int, value_bytes: int) -> list[slice]:
    """Which outputs of every expert are made at a time, of values of so many bytes."""
    rows, values = len(w.weight) // experts, w.in_features * experts  # of an output, over all
    is_there = w.absmax is None and value_bytes > 1
    parts = 1 if is_there else -(-rows * values * value_bytes // (2 * PART_VALUES))
    step = -(-rows // (64 * parts)) * 64  # the kernel takes rows of whole 16 bytes
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _part(
    w: FrozenWeight, part: slice, experts: int, b: Tensor | None = None
) -> tuple[FrozenWeight, Tensor | None]:
    """Some outputs' rows of every expert's W, still packed, and of B (E, O, R)."""
    if part == slice(0, len(w.weight) // experts):
        return w, b
    rows, scales = (
        None if t is None else t.unflatten(0, (experts, -1))[:, part].flatten(0, 1)
        for t in (w.weight, w.absmax)
    )
    return FrozenWeight(rows, scales, *w.form), None if b is None else b[:, part]


def _dense_part(
    w: FrozenWeight,
    part: slice,
    experts: int,
    dtype: torch.dtype,
    a: Tensor | None,
    b: Tensor | None,
) -> Tensor:
    """Some outputs' rows of every expert's W + B A, (E, part, I) in `dtype`."""
    w, b = _part(w, part, experts, b)
    if can_unpack_experts(w, experts, 0 if b is None else b.shape[2], dtype):
        return unpack_experts(w, experts, a, b)
    dense = w.dense(dtype).unflatten(0, (experts, -1))
    return dense if b is None else torch.baddbmm(dense, b, a)


def grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each group of x (S, I) times its expert's of `weights` (E, I, O): (S, O)."""
    if _is_aligned(x) and _is_aligned(weights):
        return nn.functional.grouped_mm(x, weights, offs=ends)
    y = x.new_zeros(len(x), weights.shape[2])  # odd sizes, one product after the other
    for rows, weight in zip(spans(ends), weights, strict=True):
        if rows.start < rows.stop:
            torch.mm(x[rows], weight, out=y[rows])
    return y


def outer_products(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """dY^T X of each group: (E, O, I), zero for one without rows."""
    if _is_aligned(dy) and _is_aligned(x):
        products = nn.functional.grouped_mm(dy.t(), x, offs=ends)
        # Not on every GPU does the kernel write those: https://github.com/pytorch/pytorch/issues/172439
        empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        return products.masked_fill_(empty[:, None, None], 0)
    return torch.stack([dy[rows].t() @ x[rows] for rows in spans(ends)])


def _is_aligned(operand: Tensor) -> bool:
    """Whether the kernel takes an operand: rows, or columns, that begin at whole 16 bytes."""
    strides = sorted(operand.stride()[-2:])
    return strides[0] == 1 and not strides[1] * operand.element_size() % _ALIGNMENT


def is_aligned_size(count: int) -> bool:
    """Whether rows of so many values, of two bytes or more, begin at whole 16 bytes."""
    return not 2 * count % _ALIGNMENT


def spans(ends: Tensor) -> list[slice]:
    """The rows of each group; the host waits for them."""
    stops = ends.tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


# ---- shapes for tracing, and autograd ----------------------------------------------------------


def length_at(side: str, other: Tensor, tokens: Tensor | None, rows: Tensor | None, at: str):
    """How long a product's tensor is on one side, by the one on the other."""
    if at == "":
        return other.shape[0]
    return rows.shape[0] if at == side else tokens.shape[0]


@grouped_linear.register_fake
def _(x, ends, tokens, rows, tokens_at, weight, absmax, in_features, quant_type, product_dtype):
    n = length_at("output", x, tokens, rows, tokens_at)
    return x.new_empty(n, weight.shape[0] // ends.shape[0])


@_grouped_linear_backward.register_fake
def _(dy, ends, tokens, rows, tokens_at, weight, absmax, in_features, quant_type, product_dtype):
    return dy.new_empty(length_at("input", dy, tokens, rows, tokens_at), in_features)


@_grouped_gradient.register_fake
def _(dy, x, ends, tokens, rows, tokens_at, dtype):
    return dy.new_empty(ends.shape[0], dy.shape[1], x.shape[1], dtype=dtype)


def _save(ctx, inputs, output):
    x, ends, tokens, rows, ctx.tokens_at, weight, absmax, *ctx.form = inputs
    x = x if ctx.needs_input_grad[5] else None
    ctx.save_for_backward(x, ends, tokens, rows, weight, absmax)


def _backward(ctx, dy):
    x, *indices, weight, absmax = ctx.saved_tensors
    routing, dy, dx, dw = (*indices, ctx.tokens_at), dy.contiguous(), None, None
    if ctx.needs_input_grad[0]:
        dx = _grouped_linear_backward(dy, *routing, weight, absmax, *ctx.form)
    if ctx.needs_input_grad[5]:
        dw = _grouped_gradient(dy, x, *routing, weight.dtype).flatten(0, 1)
    return dx, *[None] * 4, dw, *[None] * 4


grouped_linear.register_autograd(_backward, setup_context=_save)
