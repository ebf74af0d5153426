"""fp16 gradients scaled up, so that small ones are not rounded to zero.

torch's GradScaler in a few lines (arXiv:1710.03740): a step whose gradients overflow is skipped and the
scale halved; after many good ones it is doubled. Whether they overflowed is read from the norm over all
ranks, which every step has anyway, so every rank decides the same, and no rank waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_GROWTH, _BACKOFF, _GROWTH_STEPS = 2.0, 0.5, 2000  # torch's defaults
_FIRST_SCALE, LEAST_SCALE = 2.0**16, 1.0  # below it no scale is to blame


class LossScaler:
    """The factor of the loss, which follows from the steps so far; it stays on `device`."""

    def __init__(
        self, device: torch.device, scale: float = _FIRST_SCALE, growth_steps: int = _GROWTH_STEPS
    ):
        self.growth_steps = growth_steps
        self.scale = torch.tensor(scale, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter]):
        """Divide the gradients by the scale, in place, each rank its own rows; before clipping."""
        inverse = {self.scale.device: 1 / self.scale}
        for p in parameters:
            if p.grad is None:
                continue
            rows = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            if rows.device not in inverse:
                inverse[rows.device] = (1 / self.scale).to(rows.device)
            rows.mul_(inverse[rows.device])

    @torch.no_grad()
    def update(self, finite: Tensor):
        """Take note of a step: whether its gradients were finite, a tensor without a shape."""
        finite = finite.to(self.scale.device)
        good = torch.where(finite, self.good_steps + 1, 0)
        grow = good >= self.growth_steps
        lower = (self.scale * _BACKOFF).clamp(min=LEAST_SCALE)
        self.scale = torch.where(finite, torch.where(grow, self.scale * _GROWTH, self.scale), lower)
        self.good_steps = torch.where(grow, 0, good)

    def state_dict(self) -> dict:
        """As numbers, for a checkpoint."""
        return dict(scale=self.scale.item(), good_steps=self.good_steps.item())

    def load_state_dict(self, state: dict):
        """The other way."""
        self.scale.fill_(state["scale"])
        self.good_steps.fill_(state["good_steps"])
