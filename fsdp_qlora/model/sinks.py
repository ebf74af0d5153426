"""Attention with sinks by flash kernels, which need not know of them: nothing of T x T is kept.

A sink is a head's learned logit beside those of the tokens: it takes a share of the softmax and gives no
value (https://arxiv.org/abs/2508.10925). With O and L what a kernel gives without it, output and
log-sum-exp, and s the sink,

    O' = O sigmoid(L - s)        L' = log(exp L + exp s)

A flash backward makes probabilities again as exp(score - L), and of O it needs rowsum(dO O) alone. Given
O' and L' it makes those with the sink, so that dQ, dK and dV are exact, and ds = -sum exp(s - L') dO O'.

Kernels: FlashAttention 4's (flash_attention_4.py), torch's FlashAttention on other GPUs, and torch's for
the CPU, which takes one row after the other under a mask.

Shapes: B rows, T tokens of a row, or N tokens of all packed rows; H heads, K key-value heads,
D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .flash_attention_4 import flash_attention_4, flash_attention_4_backward

aten = torch.ops.aten


@torch.library.custom_op("fsdp_qlora::attention_with_sinks", mutates_args=())
def attention_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    borders: Sequence[Tensor],
    longest: Sequence[int],
    scale: float | None,
    window: int | None,
    fa4: bool,
) -> tuple[Tensor, Tensor]:
    """Causal attention's output, shaped as q, and its log-sum-exp in fp32, (B, H, T) or (H, N).

    q (B, T, H, D), k and v (B, S, K, D), whose last tokens are at one place; packed q (N, H, D), k and
    v (M, K, D). sinks (H,).
    borders: of packed rows, two int32 (rows + 1,): where they begin among queries and among keys, and
    their end; else none. longest: tokens of the longest row, of queries and of keys.
    scale: of the scores, D ** -0.5 if None. window: tokens that are seen, the present one included.
    fa4: whether FlashAttention 4's kernels are to do it.
    """
    forward, _ = _kernels(q, fa4)
    out, lse = forward(q, k, v, borders, longest, scale, window)
    sinks = sinks.float()[:, None]
    out.mul_((lse - sinks).sigmoid_().transpose(-1, -2)[..., None])
    return out, torch.logaddexp(lse, sinks)


@torch.library.custom_op("fsdp_qlora::attention_with_sinks_backward", mutates_args=())
def attention_with_sinks_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    borders: Sequence[Tensor],
    longest: Sequence[int],
    scale: float | None,
    window: int | None,
    fa4: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and sinks, given the output's; of no sinks where they are None."""
    _, backward = _kernels(q, fa4)
    made = backward(d_out.contiguous(), q, k, v, out, lse, borders, longest, scale, window)
    if sinks is None:
        return *made, q.new_empty(0)
    shared = (d_out.float() * out).sum(-1).transpose(-1, -2)  # as lse
    shares = (sinks.float()[:, None] - lse).exp_().mul_(shared)
    return *made, -shares.transpose(-1, -2).flatten(0, -2).sum(0).to(sinks.dtype)


@attention_with_sinks.register_fake
def _(q, k, v, sinks, borders, longest, scale, window, fa4):
    tokens, heads = q.shape[:-2], q.shape[-2]
    lse = (*tokens[:-1], heads, tokens[-1])
    return _empty_as(q, fa4), q.new_empty(lse, dtype=torch.float32)


@attention_with_sinks_backward.register_fake
def _(d_out, q, k, v, sinks, out, lse, borders, longest, scale, window, fa4):
    made = (_empty_as(x, fa4) for x in (q, k, v))
    return *made, q.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _empty_as(x: Tensor, fa4: bool) -> Tensor:
    """What the kernels make of x's shape: FlashAttention 4's is contiguous, torch's has x's strides."""
    return torch.empty_like(
        x, memory_format=torch.contiguous_format if fa4 else torch.preserve_format
    )


def _save(ctx, inputs, output):
    *tensors, borders, ctx.longest, ctx.scale, ctx.window, ctx.fa4 = inputs
    ctx.save_for_backward(*tensors, *output, *borders)
    ctx.set_materialize_grads(False)  # nothing asks for the gradient of lse


def _gradients(ctx, d_out, _):
    q, k, v, sinks, out, lse, *borders = ctx.saved_tensors
    trained = sinks if ctx.needs_input_grad[3] else None
    more = (borders, ctx.longest, ctx.scale, ctx.window, ctx.fa4)
    *gradients, d_sinks = attention_with_sinks_backward(d_out, q, k, v, trained, out, lse, *more)
    of_borders = [None] * len(borders)
    return *gradients, None if trained is None else d_sinks, of_borders, None, None, None, None


attention_with_sinks.register_autograd(_gradients, setup_context=_save)


# ---- kernels without sinks ----------------------------------------------------------------------


def _kernels(q: Tensor, fa4: bool) -> tuple[Callable, Callable]:
    """Forward and backward of attention on q's device."""
    if fa4:
        return _fa4_forward, _fa4_backward
    return (_gpu_forward, _gpu_backward) if q.is_cuda else (_cpu_forward, _cpu_backward)


def _fa4_forward(q, k, v, borders, longest, scale, window):
    return flash_attention_4(q, k, v, _of_both(borders), scale, window)


def _fa4_backward(d_out, q, k, v, out, lse, borders, longest, scale, window):
    return flash_attention_4_backward(d_out, q, k, v, out, lse, _of_both(borders), scale, window)


def _of_both(borders: Sequence[Tensor]) -> Tensor | None:
    """The borders of queries, which are those of keys."""
    return borders[0] if borders else None


def _gpu_forward(q, k, v, borders, longest, scale, window):
    of_rows = borders or (None, None)
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, *of_rows, *longest, 0.0, window is None, False, scale=scale, **_window(window)
    )
    return out, lse


def _gpu_backward(d_out, q, k, v, out, lse, borders, longest, scale, window):
    of_rows = borders or (None, None)
    seed, unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)  # of dropout, which is none
    return aten._flash_attention_backward(
        *(d_out, q, k, v, out, lse, *of_rows, *longest, 0.0, window is None, seed, unused),
        scale=scale,
        **_window(window),
    )


def _window(window: int | None) -> dict[str, int]:
    """How many tokens before and after the present one are seen; -1 is all."""
    left, right = (-1, -1) if window is None else (window - 1, 0)
    return dict(window_size_left=left, window_size_right=right)


def _cpu_forward(q, k, v, borders, longest, scale, window):
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    for (query, into, sums), (key, value) in _rows(borders, (q, out, lse[..., None]), (k, v)):
        made, of_row = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=_mask(query, key, window), scale=scale
        )
        into.copy_(made)
        sums.copy_(of_row[..., None])
    return out, lse.transpose(-1, -2).contiguous()


def _cpu_backward(d_out, q, k, v, out, lse, borders, longest, scale, window):
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    lse = lse.transpose(-1, -2)[..., None]
    for (d, query, o, sums, *into), (key, value, *more) in _rows(
        borders, (d_out, q, out, lse, dq), (k, v, dk, dv)
    ):
        made = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(d, query, key, value, o, sums[..., 0].contiguous(), 0.0, False),
            attn_mask=_mask(query, key, window),
            scale=scale,
        )
        for gradient, found in zip((*into, *more), made, strict=True):
            gradient.copy_(found)
    return dq, dk, dv


def _rows(
    borders: Sequence[Tensor], of_queries: tuple[Tensor, ...], of_keys: tuple[Tensor, ...]
) -> Iterator[list[list[Tensor]]]:
    """Views (B, heads, T, ...) of all rows alone; of packed ones, of each row that has queries."""
    if not borders:
        yield [[x.transpose(1, 2) for x in both] for both in (of_queries, of_keys)]
        return
    for spans in zip(*(pairwise(ends.tolist()) for ends in borders), strict=True):
        if spans[0][0] < spans[0][1]:
            yield [
                [x[None, start:end].transpose(1, 2) for x in both]
                for (start, end), both in zip(spans, (of_queries, of_keys), strict=True)
            ]


def _mask(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """0 of the keys (1, 1, T, S) that a query sees, the last of both at one place; else -inf."""
    tokens, keys = query.shape[2], key.shape[2]
    seen = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)
    if window is not None:
        seen = seen.triu(keys - tokens + 1 - window)
    return torch.zeros(1, 1, tokens, keys, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
