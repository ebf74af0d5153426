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

import inspect
import sys
from collections.abc import Callable
from functools import cache, wraps

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.run import has_flash_linear_attention
from ..own_forward import compute_by
from .opaque_ops import outside_of_op

CHUNK = 64  # tokens
_PART = 16  # tokens of a chunk whose decays by channel are taken pair by pair
_OF_FILES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")  # in transformers
_OF_MIXERS = "chunk_gated_delta_rule"  # an attribute, in its older versions


def apply_delta_rule(model: nn.Module):
    """Let a model's delta nets compute by this file's op if they have no kernels, in place, also on meta."""
    if has_flash_linear_attention():
        return
    for mixer in model.modules():
        if getattr(mixer, "has_own_rule", False):
            continue
        if theirs := getattr(mixer, _OF_MIXERS, None):
            mixer.chunk_gated_delta_rule = _own_rule(theirs)
        elif name := _rule_of(type(mixer)):
            _make_choosable(type(mixer).__module__, name)
            compute_by(mixer, _by_own_rule)
        else:
            continue
        mixer.has_own_rule = True


@cache
def _rule_of(kind: type[nn.Module]) -> str | None:
    """The name by which a mixer's code calls the rule."""
    used = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return next((name for name in _OF_FILES if used and name in used.co_names), None)


def _by_own_rule(mixer: nn.Module, own, *args, **kwargs):
    """A mixer's forward, which hands on to the rule what it does not know."""
    return own(mixer, *args, own_rule=True, **kwargs)


def _make_choosable(file: str, name: str):
    """Let those who call a function of transformers ask for this file's; for others it stays as it is."""
    theirs = getattr(sys.modules[file], name)
    if hasattr(theirs, "own_rule"):
        return
    ours = _own_rule(theirs)

    @wraps(theirs)
    def chosen(*args, own_rule: bool = False, **kwargs):
        return (ours if own_rule else theirs)(*args, **kwargs)

    chosen.own_rule = True  # type: ignore[attr-defined]
    setattr(sys.modules[file], name, chosen)


@cache
def _own_rule(theirs: Callable) -> Callable:
    """This file's rule, called as transformers'; with a state to go on from, or to give, it is theirs."""

    @wraps(theirs)
    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **more,
    ) -> tuple[Tensor, Tensor | None]:
        if initial_state is None and not output_final_state:
            # A slice would keep all that the convolution gave. inductor can't keep views whose first stride
            # is a number of tokens that may change, so rows come one behind the other.
            given = (x.contiguous().flatten(0, 1) for x in (query, key, value, g, beta))
            out = delta_rule(*given, len(query), use_qk_l2norm_in_kernel)
            return out.unflatten(0, query.shape[:2]), None
        state = dict(initial_state=initial_state, output_final_state=output_final_state)
        more |= state | dict(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        return theirs(query, key, value, g=g, beta=beta, **more)

    return rule


# ---- the op -------------------------------------------------------------------------------------


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

    query, key (B T, H, K), value (B T, H, V); decay (B T, H) or (B T, H, K), the logarithm of `a`;
    beta (B T, H), the rate. rows: B. normalized: divide queries and keys by their lengths.
    """
    with torch.autocast(query.device.type, enabled=False):
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
    with outside_of_op(), torch.enable_grad(), torch.autocast(d_out.device.type, enabled=False):
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
    if normalized:
        query, key = (
            x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key)
        )
    query = query * query.shape[-1] ** -0.5
    decay = decay.cumsum(-2)  # from a chunk's start to after each token
    rates, grown = key * beta, decay.exp()
    last = decay[..., -1:, :]
    system, seen = _decayed_products((rates, query), key, decay)
    one = torch.eye(CHUNK, device=system.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)
    solved = inverse @ (value * beta), inverse @ (rates * grown)
    written, states = _States.apply(*solved, key * (last - decay).exp(), last.exp().mT)
    out = torch.baddbmm(
        ((query * grown) @ states).flatten(0, 1), seen.flatten(0, 1), written.flatten(0, 1)
    )
    return _in_rows(out.view_as(written), rows, tokens).to(dtype)


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
    if decay.shape[-1] == 1:
        shares = _shares(decay, decay).squeeze(-1)
        return [(left @ right.mT) * shares for left in lefts]
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


class _States(torch.autograd.Function):
    """What chunks write, W = U - R S, (N, G, C, V), and the state before each, (N, G, K, V).

    The state after a chunk is d S + K^T W, with its keys K and rates R (N, G, C, K), its values U
    (N, G, C, V) and its decay d (N, G, 1 or K, 1).
    """

    @staticmethod
    def forward(ctx, values: Tensor, rates: Tensor, keys: Tensor, decay: Tensor):
        chunks, heads, _, size = rates.shape
        states = values.new_zeros(chunks, heads, size, values.shape[-1])
        written = torch.empty_like(values)
        for i in range(chunks):
            torch.baddbmm(values[i], rates[i], states[i], alpha=-1, out=written[i])
            if i + 1 < chunks:
                kept = decay[i] * states[i]
                torch.baddbmm(kept, keys[i].mT, written[i], out=states[i + 1])
        ctx.save_for_backward(rates, keys, decay, written, states)
        return written, states

    @staticmethod
    def backward(ctx, d_written: Tensor, d_states: Tensor):
        rates, keys, decay, written, states = ctx.saved_tensors
        d_values = torch.empty_like(written)
        after = torch.zeros_like(states)  # the gradient of the state after each chunk
        for i in reversed(range(len(states))):
            torch.baddbmm(d_written[i], keys[i], after[i], out=d_values[i])
            if i:
                before = torch.addcmul(d_states[i], decay[i], after[i])
                torch.baddbmm(before, rates[i].mT, d_values[i], alpha=-1, out=after[i - 1])
        d_decay = (states * after).sum(-1, keepdim=True)
        if decay.shape[-2] == 1:
            d_decay = d_decay.sum(-2, keepdim=True)
        return d_values, -d_values @ states.mT, written @ after.mT, d_decay
