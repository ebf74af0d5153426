"""Adafactor for weights that are sharded or not: a row and a column of state instead of a matrix.

torch.optim.Adafactor fails on DTensors ("in-place operations that require placement changes"); this is
its arithmetic with the sums taken over ranks. The method is arXiv:1804.04235.

Shapes: a weight (..., O, I) has row_var (..., O, 1) and col_var (..., 1, I); a vector has its variance.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..dist import full_tensor, local_rows
from .base import ShardedOptimizer, int32, sent, zeros_beside
from .rounding import element_bits, store


class Adafactor(ShardedOptimizer):
    """torch.optim.Adafactor, sharded; arithmetic in float32, bfloat16 weights rounded stochastically.

    eps2 is the least size that a weight is taken to have; d bounds an update's size.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps2: float = 1e-3,
        d: float = 1.0,
    ):
        super().__init__(params, dict(lr=lr, beta2_decay=beta2_decay, eps2=eps2, d=d))

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        """Zero variances; a matrix's columns are the same on every rank."""
        if p.dim() < 2:
            return dict(variance=zeros_beside(p, p.shape[-1:], torch.float32))
        rows = zeros_beside(p, (1,), torch.float32)
        columns = (
            torch.zeros(1, p.shape[-1], device=p.device)
            if p.dim() == 2
            else zeros_beside(p, (1, p.shape[-1]), torch.float32)
        )
        return dict(row_var=rows, col_var=columns)

    def update(self, p: Tensor, state: dict[str, Tensor], group: dict, salt: int):
        """One update, with four small sums over ranks."""
        weight, first_row, _ = local_rows(p)
        step, lr, grad = int(state["step"]), float(group["lr"]), local_rows(p.grad)[0].float()
        direction = grad * _whitening(p, grad, state, step ** group["beta2_decay"])
        size = summed(p, direction.square().sum()).sqrt() / p.numel() ** 0.5
        w = weight.float()
        weight_size = summed(p, w.square().sum()).sqrt() / p.numel() ** 0.5
        alpha = weight_size.clamp(min=group["eps2"]) * min(lr, step**-0.5)
        w -= direction * (alpha / (size / group["d"]).clamp(min=1))
        places = sent([int32(first_row * (p.numel() // p.shape[0])), salt], torch.int32, w.device)
        store(weight, w, element_bits(w.numel(), places).view(w.shape))


def _whitening(p: Tensor, grad: Tensor, state: dict[str, Tensor], new_share: float) -> Tensor:
    """1 / sqrt of the estimated second moment of this rank's rows, after taking in `grad`."""
    eps = torch.finfo(p.dtype).eps
    if p.dim() < 2:
        variance = local_rows(state["variance"])[0].lerp_(grad.square(), new_share)
        return variance.clamp(min=eps * eps).rsqrt()
    rows, columns = local_rows(state["row_var"])[0], local_rows(state["col_var"])[0]
    rows.lerp_(grad.square().mean(-1, keepdim=True), new_share)
    over_ranks = p if p.dim() == 2 else grad  # rows of a stack of matrices are on one rank
    columns.lerp_(summed(over_ranks, grad.square().sum(-2, keepdim=True)) / p.shape[-2], new_share)
    mean = summed(over_ranks, rows.sum(-2, keepdim=True)) / p.shape[-2]
    return (rows @ columns / mean.clamp(min=eps)).clamp(min=eps * eps).rsqrt()


def summed(p: Tensor, part: Tensor) -> Tensor:
    """The sum of `part` over the ranks that hold rows of p, on its device, GPU or host."""
    if not isinstance(p, DTensor):
        return part
    placements = [Partial() if place.is_shard() else Replicate() for place in p.placements]
    return full_tensor(DTensor.from_local(part, p.device_mesh, placements, run_check=False)).to(
        part.device
    )
