"""Dropout whose mask is made from a seed, so that nothing of x's size is kept for the backward.

A layer draws one number per forward and keeps that: forward and backward make the same mask from it,
and a block that is recomputed is given it (memory/activations.py). Masks drawn anew from the
generator's state need torch.compile to set that state back, which no CUDA graph allows.

The kernel counts through a Philox generator: element i of x has the i-th number that a seed gives
(Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011).

Shapes: N tokens, I inputs.  x (N, I)
"""
from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without
    triton = None

if triton:
    @triton.jit
    def _dropped(x_ptr, seed_ptr, out_ptr, n, p, scale, BLOCK: tl.constexpr):
        # A call of Philox gives four numbers: four blocks, one behind the other, take one each. Seven
        # rounds pass the tests of randomness that torch's ten do (the paper's table 2).
        program, seed = tl.program_id(0).to(tl.int64), tl.load(seed_ptr)
        numbers = tl.rand4x(seed, program * BLOCK + tl.arange(0, BLOCK), n_rounds=7)
        for i in tl.static_range(4):
            places = (program * 4 + i) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + places, mask=places < n, other=0.0)
            kept = tl.where(numbers[i] >= p, x.to(tl.float32) * scale, 0.0)
            tl.store(out_ptr + places, kept.to(x.dtype), mask=places < n)


def dropped(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """x with a share p of its elements set to zero and the rest scaled up by 1 / (1 - p).

    Which ones is a function of the seed, int64 (), of the shape and the kind of device.
    """
    x = x.contiguous()
    if x.is_cuda and triton: return dropped_by_kernel(x, seed, p)
    generator = torch.Generator(x.device).manual_seed(seed.item())
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p, generator=generator)
    return x * keep * (1 / (1 - p))


def dropped_by_kernel(x: Tensor, seed: Tensor, p: float, block: int = 1024) -> Tensor:
    """`dropped` of a contiguous x, in one pass that the host does not wait for."""
    out = torch.empty_like(x)
    _dropped[(triton.cdiv(x.numel(), 4 * block),)](x, seed, out, x.numel(), p, 1 / (1 - p), block)
    return out


# Opaque, so that a compiled block draws what an eager one does, and keeps the seed where it is told to.
# `layer` is any tensor of the layer: calls with equal arguments, as of q, k and v, would become one.
@torch.library.custom_op("fsdp_qlora::dropout_seed", mutates_args=(),
                         tags=(torch.Tag.nondeterministic_seeded,))
def dropout_seed(x: Tensor, layer: Tensor) -> Tensor:
    """A new seed, int64 (), on x's device, from its default generator."""
    return torch.randint(2**62, (), device=x.device)


@torch.library.custom_op("fsdp_qlora::dropout_seeds", mutates_args=(),
                         tags=(torch.Tag.nondeterministic_seeded,))
def dropout_seeds(x: Tensor, count: int) -> list[Tensor]:
    """The seeds that as many calls of `dropout_seed` give (fusion.py)."""
    return [torch.randint(2**62, (), device=x.device) for _ in range(count)]


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
