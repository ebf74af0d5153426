"""Where the rows of tokens go, once for all products of a block, and how even that is.

Training a mixture on few rows, or on rows of one kind, may send most tokens to few experts: others
are then neither trained nor of use, and the busiest one decides how long a block takes.

Shapes: N tokens, K experts of each, S = N K rows, E experts of each of M blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..dist import all_reduce
from .grouped_matmul import Routing


@torch.library.custom_op("fsdp_qlora::sorted_rows", mutates_args=())
def _sorted_rows(
    chosen: Tensor, experts: int, counts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ends (E,), tokens (S,) and rows (N, K) of a Routing, and the place of each row among the NK.

    Adds each expert's rows to `counts` (E,). The graph around is not told of it: nothing in it reads
    them, and a block that is computed again counts again, which leaves shares as they are.
    """
    ordered, order = chosen.flatten().to(torch.int32).sort(stable=True)
    each = torch.arange(experts, device=chosen.device, dtype=torch.int32)
    ends = torch.searchsorted(ordered, each, right=True, out_int32=True)
    places = torch.arange(len(order), device=chosen.device)
    rows = torch.empty_like(order).scatter_(0, order, places).view_as(chosen)
    if counts is not None:
        counts.data.add_(ends.diff(prepend=ends.new_zeros(1)))  # a graph may have saved it
    return ends, order // chosen.shape[-1], rows, order


@_sorted_rows.register_fake
def _(chosen, experts, counts):
    rows, made = chosen.numel(), dict(dtype=torch.int64)
    return (
        chosen.new_empty(experts, dtype=torch.int32),
        chosen.new_empty(rows, **made),
        chosen.new_empty(chosen.shape, **made),
        chosen.new_empty(rows, **made),
    )


def route(chosen: Tensor, experts: int, counts: Tensor | None = None) -> tuple[Routing, Tensor]:
    """Where rows go by the experts (N, K) that tokens chose, and the place of each among the NK."""
    ends, tokens, rows, order = _sorted_rows(chosen, experts, counts)
    return Routing(ends, tokens, rows), order


class ExpertLoad:
    """How evenly a model's experts were used since it was last asked; nothing waits for the answer."""

    def __init__(self, mixtures: list[nn.Module], device: torch.device):
        widest = max(m.num_experts for m in mixtures)
        self.counts = torch.zeros(len(mixtures), widest, device=device)
        self.experts = torch.tensor([m.num_experts for m in mixtures], device=device)
        for module, counts in zip(mixtures, self.counts, strict=True):
            module.row_counts = counts[: module.num_experts]

    def take(self) -> Tensor:
        """Shares over all ranks, as means over blocks: of the rows that went to the busiest expert, and
        of the experts that got none. (2,), on the device."""
        counts = self.counts.clone()
        all_reduce(counts)
        self.counts.zero_()
        busiest = counts.amax(1) / counts.sum(1).clamp(min=1)
        idle = 1 - (counts > 0).sum(1) / self.experts
        return torch.stack([busiest.mean(), idle.mean()])
