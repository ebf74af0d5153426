"""AdamW whose states take 2 or 1 bytes instead of 4, for weights that are sharded or not.

What full fine-tuning of 8 billion weights needs to fit 80 GB: 2 bytes of weight, 2 of gradient, and
two states of 1 byte. Arithmetic is in float32; bfloat16 results are rounded stochastically
(`rounding.py`), weights and states alike.

8-bit states are block-wise quantized, arXiv:2110.02861, by bitsandbytes' ops. A block never spans two
rows, so states are sharded by rows as their weights are, and can be saved, loaded and cut anew for
another number of ranks. bitsandbytes' own AdamW8bit fails on sharded tensors; torchao's takes its
rounding from each rank's random generator, which lets replicas drift apart (docs/LOG.md).

Shapes: a weight (..., O, I), its codes likewise, its scales (..., O, I / blocksize).
"""
from __future__ import annotations

from functools import cache

import torch
from bitsandbytes.functional import create_dynamic_map
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..dist import local_rows
from .base import ShardedOptimizer, int32, sent, zeros_beside
from .rounding import element_bits, hashed, store

BLOCKSIZES = (256, 128, 64)
MIN_8BIT_SIZE = 4096    # smaller weights keep float32 states, as in bitsandbytes
CHUNK = 2**26           # values updated at once: the float32 copies of their states take 0.5 GiB
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # signed?


class CompactAdamW(ShardedOptimizer):
    """AdamW with states in "bf16", or in "8bit" where a weight's rows are whole blocks."""

    def __init__(self, params, lr: float, state_dtype: str, betas=(0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.state_dtype = state_dtype

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        """Zero moments of a weight; 8-bit ones have scales beside their codes."""
        eight = self.state_dtype == "8bit"
        block = blocksize(p) if eight else None
        dtype = torch.uint8 if block else torch.float32 if eight else torch.bfloat16
        state = {moment: zeros_beside(p, p.shape[-1:], dtype) for moment in MOMENTS}
        if not block: return state
        return state | {f"{moment}_absmax": zeros_beside(p, (p.shape[-1] // block,), torch.float32)
                        for moment in MOMENTS}

    def update(self, p: Tensor, state: dict[str, Tensor], group: dict, salt: int):
        """AdamW's update of one weight and its moments, in place, a chunk at a time."""
        weight, first_row, _ = local_rows(p)
        if not weight.numel(): return
        local = {name: local_rows(value)[0].view(-1) for name, value in state.items()
                 if name != "step"}
        device = place_of_update(p)
        factors = sent(update_factors(group, int(state["step"])), torch.float32, device)
        first = first_row * (p.numel() // p.shape[0])
        weight, grad = weight.view(-1), local_rows(p.grad)[0].reshape(-1)
        update = compiled_update() if device.type == "cuda" else adamw_update
        for start in range(0, len(weight), CHUNK):
            part = slice(start, min(start + CHUNK, len(weight)))
            w, g = weight[part].to(device), grad[part].to(device)
            moments = [unpacked(local, name, part, device) for name in MOMENTS]
            places = sent([int32(first + start), salt], torch.int32, device)
            update(w, g, *moments, factors, places)
            for name, moment in zip(MOMENTS, moments, strict=True): pack(local, name, part, moment)
            if device != weight.device: weight[part] = w


def place_of_update(p: Tensor) -> torch.device:
    """Where a weight is updated: by the GPU also if it is kept in host memory.

    On the host the many small operations of rounding and quantization would take minutes a step.
    """
    if isinstance(p, DTensor) and p.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return p.device


def blocksize(p: Tensor) -> int | None:
    """The largest block that divides a row, or None where 8 bits are not used."""
    if p.dim() < 2 or p.numel() < MIN_8BIT_SIZE: return None
    return next((size for size in BLOCKSIZES if p.shape[-1] % size == 0), None)


def update_factors(group: dict, step: int) -> list[float]:
    """Numbers of one step: decay, step size, sqrt of the second bias correction, betas, eps."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    return [1 - lr * group["weight_decay"], lr / (1 - beta1**step), (1 - beta2**step) ** 0.5,
            beta1, beta2, group["eps"]]


def adamw_update(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
                 factors: Tensor, places: Tensor):
    """The update of N weights and their moments, in place.

    `places` holds the place of the first in the whole weight and a salt. Numbers that change with the
    step are tensors, so that the compiled form is compiled once.
    """
    decay, step_size, bias, beta1, beta2, eps = factors.unbind()
    grad = grad.float()
    m = torch.lerp(grad, exp_avg.float(), beta1)
    v = torch.lerp(grad * grad, exp_avg_sq.float(), beta2)
    w = weight.float() * decay - step_size * m / (v.sqrt() / bias + eps)
    bits = element_bits(len(weight), places)
    store(weight, w, bits)
    store(exp_avg, m, bits >> 16)
    store(exp_avg_sq, v, hashed(bits, places[1]))


@cache
def compiled_update():
    """`adamw_update` in one kernel: each value is read and written once."""
    return torch.compile(adamw_update, fullgraph=True, dynamic=True)


def unpacked(local: dict[str, Tensor], name: str, part: slice, device: torch.device) -> Tensor:
    """A part of a moment to update: itself, a copy on `device`, or 8-bit codes made float32 there."""
    codes, absmax = local[name], local.get(f"{name}_absmax")
    if absmax is None: return codes[part].to(device)
    block = len(codes) // len(absmax)
    return torch.ops.bitsandbytes.dequantize_blockwise(
        codes[part].to(device), absmax[part.start // block:part.stop // block].to(device),
        code_table(MOMENTS[name], device), block, torch.float32)


def pack(local: dict[str, Tensor], name: str, part: slice, moment: Tensor):
    """Write an updated copy back, to its codes if there are; a moment that is its own needs nothing."""
    codes, absmax = local[name], local.get(f"{name}_absmax")
    if absmax is None:
        if moment.device != codes.device: codes[part] = moment
        return
    block = len(codes) // len(absmax)
    codes[part], absmax[part.start // block:part.stop // block] = (
        torch.ops.bitsandbytes.quantize_blockwise(moment, code_table(MOMENTS[name], moment.device),
                                                  block))


@cache
def code_table(signed: bool, device: torch.device) -> Tensor:
    """The 256 values of a code: dynamic exponents, between -1 or 0 and 1."""
    return create_dynamic_map(signed=signed).to(device)
