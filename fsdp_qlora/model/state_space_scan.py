"""Mamba 2's scan in plain torch, as one op: by chunks and parts of its heads, and it keeps its inputs alone.

A head's state S (N, V) takes up token t with a step dt (https://arxiv.org/abs/2405.21060),

    S_t = exp(dt_t A) S_(t-1) + dt_t k_t v_t^T        y_t = S_t^T q_t + D v_t

where keys k and queries q, B and C in the paper, are shared by the heads of a group. Over chunks of C tokens
that is attention with decays within each chunk, matmuls for what a chunk adds to the state and reads of it,
and a loop over chunks that carries it on.

transformers has the same sums for where mamba-ssm is missing. But it multiplies and sums what has the axes of
both sides, (C, C, H, N) of each chunk, with keys for each head, and autograd keeps that. Here the keys stay
the group's, and a backward makes its chunks again for a few heads at a time: what it holds for them does not
grow with a model's heads.

Shapes: B rows, T tokens, H heads in G groups, V values of a head, N of a state for each of these; M chunks of
C tokens; g groups of a part, h heads of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .opaque_ops import outside_of_op, tensor_cores

CHUNK = 128  # tokens; about where scores of a chunk take as much as its states
PART = 2**17  # tokens times heads at once


@torch.library.custom_op("fsdp_qlora::state_space_scan", mutates_args=())
def state_space_scan(
    value: Tensor,
    dt: Tensor,
    key: Tensor,
    query: Tensor,
    decay: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    rows: int,
    least_dt: float,
    most_dt: float,
) -> Tensor:
    """What each token reads of its state, (B T, H, V) in the values' dtype; computed in fp32, or in fp64.

    On a GPU products of what came in 16 bits round their factors to TF32's 11 bits, with sums in fp32; what
    is carried from chunk to chunk stays exact.

    value (B T, H, V); dt (B T, H), to which come its bias, softplus and the limits `least_dt` and `most_dt`;
    key, query (B T, G, N); decay (H,), A, below 0; skip (H,), D; dt_bias (H,). rows: B.
    """
    given = _by_group((value, dt, key, query, decay, skip, dt_bias), rows)
    out = torch.empty_like(given[0], memory_format=torch.contiguous_format)
    with torch.autocast(value.device.type, enabled=False), tensor_cores(value):
        for part in _parts(given[0]):
            out[:, :, *part] = _by_chunks(*_taken(given, part), least_dt, most_dt)
    return out.view(value.shape)


@torch.library.custom_op("fsdp_qlora::state_space_scan_backward", mutates_args=())
def state_space_scan_backward(
    d_out: Tensor,
    value: Tensor,
    dt: Tensor,
    key: Tensor,
    query: Tensor,
    decay: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    rows: int,
    least_dt: float,
    most_dt: float,
) -> list[Tensor]:
    """Gradients of the seven tensors, given the output's."""
    tensors = (value, dt, key, query, decay, skip, dt_bias)
    grads = [x.new_empty(x.shape) for x in tensors]
    for i in _SHARED:
        grads[i] = torch.zeros_like(grads[i], dtype=_wide(key))
    given, made = _by_group(tensors, rows), _by_group(grads, rows)
    d_out = d_out.reshape(given[0].shape)
    plain = torch.autocast(d_out.device.type, enabled=False)
    with outside_of_op(), torch.enable_grad(), plain, tensor_cores(value):
        for part in _parts(given[0]):
            taken = [x.detach().requires_grad_() for x in _taken(given, part)]
            out = _by_chunks(*taken, least_dt, most_dt)
            found = torch.autograd.grad(out, taken, d_out[:, :, *part].to(out.dtype))
            for i, (into, grad) in enumerate(zip(_taken(made, part), found, strict=True)):
                into.add_(grad) if i in _SHARED else into.copy_(grad)
    return [grad.to(x.dtype) for grad, x in zip(grads, tensors, strict=True)]


@state_space_scan.register_fake
def _(value, *given):
    return value.new_empty(value.shape)


@state_space_scan_backward.register_fake
def _(d_out, *given):
    return [x.new_empty(x.shape) for x in given[:-3]]


def _save(ctx, inputs, output):
    *tensors, ctx.rows, ctx.least_dt, ctx.most_dt = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, d_out):
    given = *ctx.saved_tensors, ctx.rows, ctx.least_dt, ctx.most_dt
    return *state_space_scan_backward(d_out, *given), None, None, None


state_space_scan.register_autograd(_gradients, setup_context=_save)


# ---- parts of the heads -------------------------------------------------------------------------

_SHARED = (2, 3)  # of the op's tensors, keys and queries: their gradients add up from part to part


def _by_group(tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Views of the op's tensors: (B, T, G, H / G, ...) of values and dt, (B, T, G, N) of keys, (G, H / G)."""
    tokens, heads = tensors[:4], (tensors[2].shape[1], -1)
    of_rows = [x.unflatten(0, (rows, -1)) for x in tokens]
    of_rows[:2] = (x.unflatten(2, heads) for x in of_rows[:2])
    return of_rows + [x.unflatten(0, heads) for x in tensors[4:]]


def _parts(value: Tensor) -> Iterator[tuple[slice, slice]]:
    """Groups, and heads of each, whose tokens are PART at most: values (B, T, G, H / G, V)."""
    rows, tokens, groups, heads, _ = value.shape
    at_once = max(PART // (rows * tokens), 1)
    some = max(at_once // heads, 1)
    for group in range(0, groups, some):
        for head in range(0, heads, at_once):
            yield slice(group, group + some), slice(head, head + at_once)


def _taken(tensors: Sequence[Tensor], part: tuple[slice, slice]) -> list[Tensor]:
    """A part's views of the op's tensors by group."""
    group, _ = part
    values, keys = [x[:, :, *part] for x in tensors[:2]], [x[:, :, group] for x in tensors[2:4]]
    return values + keys + [x[part] for x in tensors[4:]]


# ---- what it computes ---------------------------------------------------------------------------


def _by_chunks(
    value: Tensor,
    dt: Tensor,
    key: Tensor,
    query: Tensor,
    decay: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    least_dt: float,
    most_dt: float,
) -> Tensor:
    """Of a part, (B, T, g, h, V) in what it sums in."""
    tokens, wide = value.shape[1], _wide(value)
    dt = F.softplus(dt.to(wide) + dt_bias.to(wide)).clamp(least_dt, most_dt)
    value, dt, key, query = (_in_chunks(x, wide) for x in (value, dt, key, query))
    steps = (dt * decay.to(wide)[:, None]).cumsum(-2)  # (B, M, g, C, h): from a chunk's start on
    total, added, of_heads = steps[..., -1:, :], value * dt[..., None], value.shape[-2:]
    within = _Within.apply(query @ key.mT, steps.mT, added.movedim(-2, -3)).movedim(-3, -2)
    states = key.mT @ (added * (total - steps).exp()[..., None]).flatten(-2)
    before = _Carried.apply(states.unflatten(-1, of_heads), total.exp()[..., None])
    read = (query @ before.flatten(-2)).unflatten(-1, of_heads)
    out = torch.addcmul(within, read, steps.exp()[..., None])
    out = torch.addcmul(out, value, skip.to(wide)[:, None, :, None])
    return out.movedim(2, 3).flatten(1, 2)[:, :tokens]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _in_chunks(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T, g, ...) as (B, M, g, C, ...), with zeros after a row's end."""
    size = min(CHUNK, x.shape[1])
    if over := x.shape[1] % size:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, size - over))
    x = x.unflatten(1, (-1, size)).movedim(3, 2)
    return x.to(dtype, memory_format=torch.contiguous_format).contiguous()


class _Within(torch.autograd.Function):
    """What tokens of a chunk read of those up to them, (B, M, g, h, C, V): scores with decays times values.

    Scores (B, M, g, C, C), which the heads of a group share; the logarithms of decays since a chunk's start
    (B, M, g, h, C); what tokens add (B, M, g, h, C, V).
    """

    @staticmethod
    def forward(ctx, scores: Tensor, steps: Tensor, added: Tensor):
        tokens = scores.shape[-1]
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device).triu_(1)
        shares = steps[..., :, None] - steps[..., None, :]
        shares.masked_fill_(later, float("-inf")).exp_()
        ctx.save_for_backward(scores, shares, added)
        return (shares * scores.unsqueeze(-3)) @ added

    @staticmethod
    def backward(ctx, d_out: Tensor):
        scores, shares, added = ctx.saved_tensors
        of_heads = scores.unsqueeze(-3)
        d_added = (shares * of_heads).mT @ d_out
        d_seen = (d_out @ added.mT).mul_(shares)
        d_scores = d_seen.sum(-3)
        d_seen.mul_(of_heads).diagonal(0, -2, -1).zero_()  # no decay is between a token and itself
        return d_scores, d_seen.sum(-1) - d_seen.sum(-2), d_added


class _Carried(torch.autograd.Function):
    """The state before each chunk, of what each adds (B, M, g, N, h, V) and its decay (B, M, g, 1, h, 1)."""

    @staticmethod
    def forward(ctx, added: Tensor, decay: Tensor):
        before = torch.empty_like(added)
        before[:, 0] = 0
        for i in range(1, added.shape[1]):
            torch.addcmul(added[:, i - 1], before[:, i - 1], decay[:, i - 1], out=before[:, i])
        ctx.save_for_backward(before, decay)
        return before

    @staticmethod
    def backward(ctx, d_before: Tensor):
        before, decay = ctx.saved_tensors
        after = torch.empty_like(before)  # the gradient of the state after each chunk
        after[:, -1] = 0
        for i in reversed(range(1, before.shape[1])):
            torch.addcmul(d_before[:, i], after[:, i], decay[:, i], out=after[:, i - 1])
        return after, (after * before).sum((-3, -1), keepdim=True)
