"""The gated delta rule in plain torch, as one op: quick to compile, and it keeps its inputs alone.

A head's state S (K, V) takes up token t with a decay a and a rate b (https://arxiv.org/abs/2412.06464),

    S_t = a_t S_(t-1) + b_t k_t (v_t - (a_t S_(t-1))^T k_t)^T        o_t = S_t^T q_t

where `a` is one number for a head, or one for each channel of its keys (Kimi delta attention,
https://arxiv.org/abs/2510.26692). Over chunks of C tokens that is a triangular system for each chunk,
which are solved together, and a loop over chunks for their states.

transformers has the same sums for where flash-linear-attention is missing. But torch.compile unrolls
their loops, 64 chunks in 4,096 tokens; autograd keeps every step; and the gradient of a chunk's slice is
as large as the whole row. Here a compiled block has one op, whose backward makes its chunks again.

Shapes: B rows, T tokens, H heads, K and V sizes of a head's keys and values; N chunks of C tokens,
G = B H. A decay has one channel or K.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .opaque_ops import exactly, outside_of_op, tensor_cores

CHUNK = 64  # tokens
_PART = 16  # tokens of a chunk whose decays by channel are taken pair by pair


@torch.library.custom_op("fsdp_qlora::delta_rule", mutates_args=())
def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    rows: int,
    normalized: bool,
) -> Tensor:
    """What each token reads of its state, (B T, H, V) in the queries' dtype; computed in fp32.

    On a GPU products of what came in 16 bits round their factors to TF32's 11 bits, with sums in fp32, as
    flash-linear-attention's round to 16; what is summed up from chunk to chunk and in a chunk stays exact.

    query, key (B T, H, K), value (B T, H, V); decay (B T, H) or (B T, H, K), the logarithm of `a`;
    beta (B T, H), the rate. rows: B. normalized: divide queries and keys by their lengths.
    """
    with torch.autocast(query.device.type, enabled=False), tensor_cores(query):
        return _by_chunks(query, key, value, decay, beta, rows, normalized)


@torch.library.custom_op("fsdp_qlora::delta_rule_backward", mutates_args=())
def delta_rule_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    rows: int,
    normalized: bool,
) -> list[Tensor]:
    """Gradients of the five tensors, given the output's."""
    given = [x.detach().requires_grad_() for x in (query, key, value, decay, beta)]
    plain = torch.autocast(d_out.device.type, enabled=False)
    with outside_of_op(), torch.enable_grad(), plain, tensor_cores(query):
        out = _by_chunks(*given, rows, normalized)
        return [x.contiguous() for x in torch.autograd.grad(out, given, d_out)]


@delta_rule.register_fake
def _(query, key, value, decay, beta, rows, normalized):
    return query.new_empty(value.shape)


@delta_rule_backward.register_fake
def _(d_out, *given):
    return [x.new_empty(x.shape) for x in given[:-2]]


def _save(ctx, inputs, output):
    *tensors, ctx.rows, ctx.normalized = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, d_out):
    return *delta_rule_backward(d_out, *ctx.saved_tensors, ctx.rows, ctx.normalized), None, None


delta_rule.register_autograd(_gradients, setup_context=_save)


# ---- what it computes ---------------------------------------------------------------------------


def _by_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    rows: int,
    normalized: bool,
) -> Tensor:
    dtype, tokens = query.dtype, len(query) // rows
    query, key, value, decay, beta = (_in_chunks(x, rows) for x in (query, key, value, decay, beta))
    size = query.shape[-1]
    if normalized:
        query, key = _scaled(query, 1 / size), _scaled(key, size**-0.5)
    else:
        query = query * size**-0.5
    decay = decay.cumsum(-2)  # from a chunk's start to after each token
    grown, last = decay.exp(), decay[..., -1:, :]
    if decay.shape[-1] == 1:  # numbers of a token go with products of C x C, not of C x K
        shares = _shares(decay, decay).squeeze(-1)
        of_keys, of_queries = _Products.apply(query, key)
        system, seen = of_keys * (shares * beta), of_queries * shares
        inverse = _Inverse.apply(system)
        rates = (inverse * -(beta * grown).mT) @ key
    else:
        system, seen = _decayed_products((key * beta, query), key, decay)
        inverse = _Inverse.apply(system)
        rates = (inverse * -beta.mT) @ (key * grown)
    values = (inverse * beta.mT) @ value
    out = _Read.apply(values, rates, key * (last - decay).exp(), query * grown, seen, last.exp().mT)
    return _in_rows(out, rows, tokens).to(dtype)


def _scaled(x: Tensor, size: float) -> Tensor:
    """x divided by its length, times the root of its last dimension and `size`."""
    of = x.shape[-1:]
    return F.rms_norm(x, of, x.new_full(of, size), 1e-6 / of[0])


def _in_chunks(x: Tensor, rows: int) -> Tensor:
    """(B T, H) or (B T, H, D) as (N, G, C, 1 or D) in fp32, with zeros after a row's end."""
    x = (x if x.dim() == 3 else x[..., None]).unflatten(0, (rows, -1))
    if over := x.shape[1] % CHUNK:
        x = F.pad(x, (0, 0, 0, 0, 0, CHUNK - over))
    x = x.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4)
    return x.to(torch.float32, memory_format=torch.contiguous_format).flatten(1, 2)


def _in_rows(x: Tensor, rows: int, tokens: int) -> Tensor:
    """The way back: (N, G, C, V) as (B T, H, V)."""
    x = x.unflatten(1, (rows, -1)).permute(1, 0, 3, 2, 4)
    return x.flatten(1, 2)[:, :tokens].flatten(0, 1).contiguous()


def _decayed_products(lefts: tuple[Tensor, ...], right: Tensor, decay: Tensor) -> list[Tensor]:
    """Of each left, left_i right_j exp(decay_i - decay_j) for tokens j <= i of a chunk: (N, G, C, C)."""
    # Decays by channel go with what is multiplied: both factors are at most 1 from a part's first token
    # on, and up to it. Within the part there is no such place.
    rows: list[list[Tensor]] = [[] for _ in lefts]
    for start in range(0, CHUNK, _PART):
        before, part = (
            (..., slice(start), slice(None)),
            (..., slice(start, start + _PART), slice(None)),
        )
        first = decay[..., start : start + 1, :]
        shares, since = _shares(decay[part], decay[part]), (decay[part] - first).exp()
        far, near = right[before] * (first - decay[before]).exp(), right[part][..., None, :, :]
        for left, found in zip(lefts, rows, strict=True):
            within = (left[part][..., :, None, :] * near * shares).sum(-1)
            row = torch.cat([(left[part] * since) @ far.mT, within], -1)
            found.append(F.pad(row, (0, CHUNK - row.shape[-1])))
    return [torch.cat(found, -2) for found in rows]


def _shares(at: Tensor, of: Tensor) -> Tensor:
    """exp(at_i - of_j) for each channel, (..., tokens, tokens, channels), 0 where j > i."""
    tokens = at.shape[-2]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=at.device).triu(1)[..., None]
    return (at[..., :, None, :] - of[..., None, :, :]).masked_fill(later, float("-inf")).exp()


class _Products(torch.autograd.Function):
    """Of each chunk, keys with keys and queries with keys: twice (N, G, C, C)."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor):
        ctx.save_for_backward(query, key)
        return key @ key.mT, query @ key.mT

    @staticmethod
    def backward(ctx, d_of_keys: Tensor, d_of_queries: Tensor):
        query, key = ctx.saved_tensors
        d_key = (d_of_keys + d_of_keys.mT) @ key
        return d_of_queries @ key, _plus(d_key, d_of_queries.mT, query)


class _Inverse(torch.autograd.Function):
    """Of 1 + the part below the diagonal of a system (N, G, C, C), in blocks: exact, which powers are not."""

    @staticmethod
    def forward(ctx, system: Tensor):
        with exactly(system):
            inverse = _inverse(system)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, d_inverse: Tensor):
        (inverse,) = ctx.saved_tensors
        return (inverse.mT @ d_inverse @ inverse.mT).neg_().tril_(-1)


def _inverse(system: Tensor) -> Tensor:
    size, parts = _PART, _on_diagonal(system, _PART)
    one = torch.eye(size, device=system.device)
    inverse = one.repeat(*parts.shape[:3], 1, 1)
    for i in range(size - 1):  # of all parts at once, row by row
        rows, row = inverse[..., i + 1 :, : i + 1], inverse[..., i : i + 1, : i + 1]
        rows.addcmul_(parts[..., i + 1 :, i : i + 1], row, value=-1)
    while size < CHUNK:  # of two neighbours: ((a, 0), (b, c)) has ((1/a, 0), (-1/c b 1/a, 1/c))
        upper, lower = inverse[:, :, 0::2], inverse[:, :, 1::2]
        between = lower @ _on_diagonal(system, 2 * size)[..., size:, :size] @ upper
        left = torch.cat([upper, between.neg_()], -2)
        inverse = torch.cat([left, F.pad(lower, (0, 0, size, 0))], -1)
        size *= 2
    return inverse.squeeze(2)


def _on_diagonal(x: Tensor, size: int) -> Tensor:
    """A view of the blocks on the diagonal of x (N, G, C, C): (N, G, C / size, size, size)."""
    blocks = x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return blocks.diagonal(0, -4, -2).movedim(-1, 2)


class _Read(torch.autograd.Function):
    """What tokens read, O = Q S + P W (N, G, C, V), where chunks write W = U + R S and S is the state before.

    The state after a chunk is d S + K^T W, which is A S + K^T U with A = d + K^T R: these matrices are made
    for all chunks at once, and the loop has one product for each. Values U (N, G, C, V), which become W in
    place; rates R, keys K and queries Q (N, G, C, K); shares P of what was written (N, G, C, C); decay d
    (N, G, 1 or K, 1).
    """

    @staticmethod
    def forward(
        ctx,
        values: Tensor,
        rates: Tensor,
        keys: Tensor,
        queries: Tensor,
        seen: Tensor,
        decay: Tensor,
    ):
        steps = keys.mT @ rates
        steps.diagonal(0, -2, -1).add_(decay.squeeze(-1))
        states = values.new_empty(*steps.shape[:3], values.shape[-1])
        states[0] = 0
        _product(keys[:-1].mT, values[:-1], states[1:])
        with exactly(values):
            for before, after, step in zip(states[:-1], states[1:], steps[:-1], strict=True):
                after.baddbmm_(step, before)
        written = _plus(values, rates, states)
        ctx.save_for_backward(rates, keys, queries, seen, decay, steps, states, written)
        return _plus(queries @ states, seen, written)

    @staticmethod
    def backward(ctx, d_out: Tensor):
        rates, keys, queries, seen, decay, steps, states, written = ctx.saved_tensors
        d_out = d_out.contiguous()  # else each product would copy it
        d_written = seen.mT @ d_out
        after = torch.empty_like(states)  # the gradient of the state after each chunk
        after[-1] = 0
        _product(queries[1:].mT, d_out[1:], after[:-1])
        _plus(after[:-1], rates[1:].mT, d_written[1:])
        with exactly(d_out):
            for i in reversed(range(1, len(after))):
                after[i - 1].baddbmm_(steps[i].mT, after[i])
        d_values = _plus(d_written, keys, after)
        d_decay = (states * after).sum(-1, keepdim=True)
        if decay.shape[-2] == 1:
            d_decay = d_decay.sum(-2, keepdim=True)
        of_keys, of_queries, of_shares = (
            a @ b.mT for a, b in ((written, after), (d_out, states), (d_out, written))
        )
        return d_values, d_values @ states.mT, of_keys, of_queries, of_shares, d_decay


def _product(left: Tensor, right: Tensor, out: Tensor):
    torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out=out.flatten(0, 1))


def _plus(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """x + left right of each chunk and head, in place of x: baddbmm would copy it first."""
    x.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))
    return x
