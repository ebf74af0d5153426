"""Dropout whose mask is made from a seed, so that nothing of x's size is kept for the backward.

A layer draws one number per forward and keeps that: forward and backward make the same mask from it,
and a block that is recomputed is given it (memory/checkpointing_policy.py). Masks drawn anew from the
generator's state need torch.compile to set that state back, which no CUDA graph allows.

Shapes: N tokens, I inputs, R rank.  x (N, I), A (R, I)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import dropout_kernels as kernels


def dropped(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """x (N, I) with a share p of its elements set to zero and the rest scaled up by 1 / (1 - p).

    Which ones is a function of the seed, int64 (), of the shape and the kind of device.
    """
    if kernels.can_drop(x):
        return kernels.dropped(x, seed, p)
    generator = torch.Generator(x.device).manual_seed(seed.item())
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(
        1 - p, generator=generator
    )
    return x * keep * (1 / (1 - p))


def product_of_dropped(x: Tensor, a: Tensor, seed: Tensor, p: float) -> Tensor:
    """dropped(x) A^T (N, R), in x's dtype."""
    if kernels.can_multiply(x, a):
        return kernels.product_of_dropped(x, a, seed, p)
    return dropped(x, seed, p) @ a.to(x.dtype).t()


def dropped_product(y: Tensor, a: Tensor, seed: Tensor, p: float) -> Tensor:
    """dropped(y A) (N, I) of y (N, R), in y's dtype."""
    if kernels.can_multiply(y, a):
        return kernels.dropped_product(y, a, seed, p)
    return dropped(y @ a.to(y.dtype), seed, p)


def _new_seed(device: torch.device) -> Tensor:
    """A number that no other rank draws from the same state; in one kernel."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randint(rank, 2**62 + rank, (), device=device)


# Opaque, so that a compiled block draws what an eager one does, and keeps the seed where it is told to.
# `layer` is any tensor of the layer: calls with equal arguments, as of q, k and v, would become one.
@torch.library.custom_op(
    "fsdp_qlora::dropout_seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def dropout_seed(x: Tensor, layer: Tensor) -> Tensor:
    """A new seed, int64 (), on x's device, from its default generator and the rank.

    So ranks in one random state, as after `torch.manual_seed(0)` on each, drop other places.
    """
    return _new_seed(x.device)


@torch.library.custom_op(
    "fsdp_qlora::dropout_seeds", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def dropout_seeds(x: Tensor, count: int) -> list[Tensor]:
    """The seeds that as many calls of `dropout_seed` give (shared_inputs.py)."""
    return [_new_seed(x.device) for _ in range(count)]


# For a layer that needs the dropped x itself, as DoRA's does; its gradient drops the same places.
drop_inputs = torch.library.custom_op("fsdp_qlora::drop_inputs", dropped, mutates_args=())


@dropout_seed.register_fake
def _(x, layer):
    return x.new_empty((), dtype=torch.int64)


@dropout_seeds.register_fake
def _(x, count):
    return [x.new_empty((), dtype=torch.int64) for _ in range(count)]


@drop_inputs.register_fake
def _(x, seed, p):
    return x.new_empty(x.shape)


def _save_seed(ctx, inputs, output):
    _, seed, ctx.p = inputs
    ctx.save_for_backward(seed)


def _drop_backward(ctx, dy):
    return drop_inputs(dy, *ctx.saved_tensors, ctx.p), None, None


drop_inputs.register_autograd(_drop_backward, setup_context=_save_seed)


class SeededDropout(nn.Dropout):
    """Dropout of what another layer computes with its input: ranks in one state drop other places."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        rows = x.reshape(-1, x.shape[-1])
        return drop_inputs(rows, dropout_seed(rows, rows), self.p).view(x.shape)
