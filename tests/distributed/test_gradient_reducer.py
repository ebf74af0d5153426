"""Averaged gradients are those of torch's DistributedDataParallel, also where ranks have none."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_qlora.sharding.ddp import GradientReducer
from tests.ranks import run_ranks


class Chosen(nn.Module):
    """Layers of which a batch goes through some; nobody's goes through the last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, chosen: list[int]):
        for i in chosen:
            x = self.layers[i](x)
        return x


def gradients() -> tuple[list, list]:
    """Of two steps: here, and by DDP."""
    rank = dist.get_rank()
    ours, theirs = Chosen(), DistributedDataParallel(Chosen(), find_unused_parameters=True)
    GradientReducer(ours)
    x, chosen = torch.full((2, 3), 1.0 + rank), [0] if rank == 0 else [0, 1]
    found = []
    for model in (ours, theirs):
        for _ in range(2):
            model(x, chosen).square().sum().backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return tuple(found)


def test_a_gradient_that_some_ranks_lack_counts_as_zero_and_one_that_all_lack_stays_missing():
    for ours, theirs in run_ranks(gradients, 2):
        assert [g is None for g in ours] == [g is None for g in theirs]
        assert [g is None for g in ours] == [False] * 4 + [True] * 2
        for mine, other in zip(ours[:4], theirs[:4], strict=True):
            torch.testing.assert_close(mine, other)
