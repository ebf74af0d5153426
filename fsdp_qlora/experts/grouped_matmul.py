"""Products of tokens that lie in groups, each group with the weight of its own expert.

One kernel for all groups, which reads where they end from the GPU's own memory: the host never waits
for how many tokens an expert got, so a block with experts can be compiled and queued like any other.
Weights of few bits are unpacked for all experts, some of their rows at a time, and never kept.
torch's grouped product: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.grouped_mm.html

Shapes: S rows of tokens, ordered by expert; E experts; I inputs, O outputs of each.
ends (E,) int32, the row after an expert's last.  x (S, I), y (S, O), weight (E O, I), packed or not
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..quantization.formats import FrozenWeight

PART_VALUES = 2**28  # of W that exist at once: 512 MiB in bf16
_ALIGNMENT = 16  # bytes, of the rows of what the kernel takes


@torch.library.custom_op("fsdp_qlora::grouped_linear", mutates_args=())
def grouped_linear(
    x: Tensor,
    ends: Tensor,
    weight: Tensor,
    absmax: Tensor | None,
    in_features: int,
    quant_type: str,
) -> Tensor:
    """y, where each group of x is multiplied with its expert's W^T."""
    return forward_products(x, ends, FrozenWeight(weight, absmax, in_features, quant_type))


@torch.library.custom_op("fsdp_qlora::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    dy: Tensor,
    ends: Tensor,
    weight: Tensor,
    absmax: Tensor | None,
    in_features: int,
    quant_type: str,
) -> Tensor:
    """dX (S, I)."""
    return backward_products(dy, ends, FrozenWeight(weight, absmax, in_features, quant_type))


@torch.library.custom_op("fsdp_qlora::grouped_gradient", mutates_args=())
def _grouped_gradient(dy: Tensor, x: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """dW (E, O, I) in `dtype`: zero for an expert without tokens."""
    return outer_products(dy, x, ends).to(dtype)


def forward_products(x: Tensor, ends: Tensor, w: FrozenWeight) -> Tensor:
    """What `grouped_linear` gives."""
    parts = list(_output_parts(w, len(ends)))
    if len(parts) == 1:
        return grouped(x, _dense_part(w, parts[0], len(ends), x.dtype).transpose(1, 2), ends)
    y = x.new_empty(len(x), len(w.weight) // len(ends))
    for part in parts:
        dense = _dense_part(w, part, len(ends), x.dtype)
        y[:, part] = grouped(x, dense.transpose(1, 2), ends)
    return y


def backward_products(dy: Tensor, ends: Tensor, w: FrozenWeight) -> Tensor:
    """What `_grouped_linear_backward` gives."""
    dx = None
    for part in _output_parts(w, len(ends)):
        dense = _dense_part(w, part, len(ends), dy.dtype)
        product = grouped(dy[:, part], dense, ends)
        dx = product if dx is None else dx.add_(product)
    return dx


def _output_parts(w: FrozenWeight, experts: int) -> Iterator[slice]:
    """Which outputs of every expert are made at a time."""
    rows, values = (
        len(w.weight) // experts,
        experts * w.in_features,
    )  # of an output, over all experts
    step = rows if w.absmax is None else max(1, PART_VALUES // (64 * values)) * 64
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _dense_part(w: FrozenWeight, part: slice, experts: int, dtype: torch.dtype) -> Tensor:
    """Some outputs' rows of every expert's W, (E, part, I) in `dtype`."""
    rows, scales = (
        None if t is None else t.unflatten(0, (experts, -1))[:, part].flatten(0, 1)
        for t in (w.weight, w.absmax)
    )
    return FrozenWeight(rows, scales, *w.form).dense(dtype).unflatten(0, (experts, -1))


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


def spans(ends: Tensor) -> list[slice]:
    """The rows of each group; the host waits for them."""
    stops = ends.tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


# ---- shapes for tracing, and autograd ----------------------------------------------------------


@grouped_linear.register_fake
def _(x, ends, weight, absmax, in_features, quant_type):
    return x.new_empty(x.shape[0], weight.shape[0] // ends.shape[0])


@_grouped_linear_backward.register_fake
def _(dy, ends, weight, absmax, in_features, quant_type):
    return dy.new_empty(dy.shape[0], in_features)


@_grouped_gradient.register_fake
def _(dy, x, ends, dtype):
    return dy.new_empty(ends.shape[0], dy.shape[1], x.shape[1], dtype=dtype)


def _save(ctx, inputs, output):
    x, ends, weight, absmax, *ctx.form = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, ends, weight, absmax)


def _backward(ctx, dy):
    x, ends, weight, absmax = ctx.saved_tensors
    dy, dx, dw = dy.contiguous(), None, None
    if ctx.needs_input_grad[0]:
        dx = _grouped_linear_backward(dy, ends, weight, absmax, *ctx.form)
    if ctx.needs_input_grad[2]:
        dw = _grouped_gradient(dy, x, ends, weight.dtype).flatten(0, 1)
    return dx, None, dw, *[None] * 3


grouped_linear.register_autograd(_backward, setup_context=_save)
