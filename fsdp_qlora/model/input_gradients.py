"""An input of a block that asks for its gradient, as those of later blocks do.

A frozen embedding's output does not. A leaf that did (`requires_grad_`) would get the gradient, and
autograd would keep both until the backward's end, where activation offload is to free them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ASKS = torch.empty(0, requires_grad=True)


def asking_for_gradient(hidden: Tensor) -> Tensor:
    """`hidden`, from which a gradient is asked that nobody gets; unchanged if it is asked for already."""
    if not torch.is_grad_enabled() or hidden.requires_grad:
        return hidden
    return _AsksForGradient.apply(hidden, _ASKS)


class _AsksForGradient(torch.autograd.Function):
    """Its output needs a gradient since its second input does; it gives neither input any."""

    @staticmethod
    def forward(ctx, hidden: Tensor, asks: Tensor) -> Tensor:
        return hidden.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, None]:
        return None, None
